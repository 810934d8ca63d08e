"""Random operations on tables of layers with windows beside a naive model, for as long as one likes.

The model plays the pools. What is written into a slot, of the blocks and of the window blocks of each group, is a number that
names the whole prefix up to that token; after each operation, what a table must be able to read has to be there. So a window
block that is handed to two, taken while it is needed, or not copied on write shows as a wrong prefix. What is hit, what a sequence
can go on from, how many window blocks are needed and whether an operation is refused is found by trying: the model shares no
code with the package, and asks it only which blocks have a hash and which window block they have.

Run it with `python -m tests.blocks.random_windows --operations 1000000 --seed 0`; pytest makes 100,000 of them. A failure names
seed, world and operation; the same numbers play it again.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest

from hf_paged_cache.blocks import BlockTable, HashChain, PrefixCachingBlockAllocator, WindowBlocks, root_hash
from hf_paged_cache.errors import OutOfBlocksError

NAMESPACES = (b"", b"tenant")
ROOTS = {namespace: root_hash(b"model", namespace) for namespace in NAMESPACES}
OPERATIONS_EACH = 2_000
DIED = -1  # what a forward that died has written


class World(NamedTuple):
    """Sizes to play with."""

    block_size: int
    num_blocks: int
    windows: dict[int, int]  # window -> window blocks
    max_tokens: int
    is_checked: bool = (
        True  # `check` is called after each operation; it derives anew what an operation may have left wrong
    )


WORLDS = (
    World(2, 17, {7: 9}, 24),
    World(1, 25, {1: 5, 2: 7, 7: 17}, 20),
    World(4, 15, {2: 6, 16: 13}, 44),
    World(2, 33, {1: 7, 2: 9, 7: 14, 16: 24, 33: 33}, 44),
    World(2, 12, {3: 12}, 20),
    World(4, 17, {7: 7}, 50),
)


@dataclass
class Sequence:
    """What the model knows of a table."""

    namespace: bytes
    tokens: list[int] = field(default_factory=list)
    start: int = 0  # goes on from here, or from `cut` on when its forward has returned
    first: int = 0  # was written from here on
    cut: int = 0

    def copy(self) -> Sequence:
        return replace(self, tokens=list(self.tokens))


class Prefixes:
    """A number for each prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """Of each token, the number of the prefix that ends with it."""
        number, found = -2 - NAMESPACES.index(namespace), []
        for token in tokens:
            number = self._numbers.setdefault((number, token), len(self._numbers))
            found.append(number)
        return found


class Driver:
    """Runs operations on the tables and on the model, and compares them."""

    def __init__(self, world: World, max_tables: int = 4) -> None:
        self.world = world
        self.size = world.block_size
        self.allocator = PrefixCachingBlockAllocator(world.num_blocks, world.block_size)
        self.groups = [WindowBlocks(self.allocator, window, number) for window, number in world.windows.items()]
        self.max_tables = max_tables
        self.tables: list[tuple[BlockTable, Sequence]] = []
        self.prefixes = Prefixes()
        self.in_blocks: dict[int, list[int]] = {}
        self.in_window_blocks: list[dict[int, list[int]]] = [{} for _ in self.groups]
        self.num_refused = self.num_limited = self.num_hits = self.num_copies = self.num_replaced = 0
        self.num_deferred = 0
        self.has_collected = False

    # What the model finds by trying.

    def seen(self, window: int, num_tokens: int) -> range:
        """Logical indices of the blocks with what the token after so many sees in a window; at least with the last one."""
        positions = range(max(0, num_tokens - max(1, window - 1)), num_tokens)
        return range(positions[0] // self.size, positions[-1] // self.size + 1) if positions else range(0)

    def indices_needed(self, window: int, sequence: Sequence) -> list[int]:
        seen, length = max(1, window - 1), len(sequence.tokens)
        positions = {*range(sequence.start - seen, sequence.start), *range(sequence.cut - seen, length)}
        return sorted(
            {position // self.size for position in (*positions, *range(sequence.first, length)) if position >= 0}
        )

    def needed(self, group: WindowBlocks, but: BlockTable | None = None) -> set[int]:
        """Blocks that tables need there."""
        return {
            table.block_ids[index]
            for table, sequence in self.tables
            if table is not but
            for index in self.indices_needed(group.window, sequence)
            if table.block_ids[index] in group.places
        }

    def can_go_on(self, block_ids: list[int], num_tokens: int) -> bool:
        return all(
            block_ids[index] in group.places for group in self.groups for index in self.seen(group.window, num_tokens)
        )

    def resumable(self, block_ids: list[int], num_tokens: int) -> int:
        return next(number for number in range(num_tokens, -1, -1) if self.can_go_on(block_ids, number))

    def cached(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """Blocks of the longest prefix whose full blocks have hashes, found by what was written into them."""
        of_end = {
            content[-1]: block
            for block, content in self.in_blocks.items()
            if block < self.allocator.num_blocks and self.allocator.block_hash_of(block) is not None
        }
        found = []
        for end in self.prefixes.of(namespace, tokens)[self.size - 1 :: self.size]:
            if end not in of_end:
                break
            found.append(of_end[end])
        return found

    def hit(self, namespace: bytes, tokens: list[int]) -> int:
        blocks = self.cached(namespace, tokens)
        lengths = range(len(blocks) * self.size, -1, -self.size)
        return next(number for number in lengths if self.can_go_on(blocks, number))

    def refs(self, block: int) -> int:
        return sum(block in table.block_ids for table, _ in self.tables)

    def is_refused(self, which: int, start: int, first: int, cut: int, stop: int, lookahead: int = 0) -> bool:
        """Whether tokens up to `stop` cannot be appended: too few blocks, or too few window blocks of some group.

        Args:
            start, first: what is needed before these may be taken for the new tokens; see `Sequence`.
        """
        table, sequence = self.tables[which]
        blocks, size, length = table.block_ids, self.size, len(sequence.tokens)
        last = -(-(stop + lookahead) // size) if stop + lookahead > length else len(blocks)
        copied = []
        if stop + lookahead > length and length % size:
            partial = blocks[length // size]
            if self.refs(partial) > 1 or self.allocator.block_hash_of(partial) is not None:
                copied = [length // size]
        num_fresh = max(0, last - len(blocks)) + len(copied)
        if num_fresh > self.allocator.num_available_blocks:
            return True
        for group in self.groups:
            mine = set(copied)  # what it sees there is read from the copy
            for index in self.indices_needed(group.window, Sequence(b"", sequence.tokens, start, first, cut)):
                if blocks[index] in group.places:
                    mine.add(index)
            mine.update(position // size for position in range(max(0, cut - max(1, group.window - 1)), stop))
            fresh = {index for index in mine if index in copied or index >= len(blocks)}
            held = {blocks[index] for index in mine - fresh}
            if len(self.needed(group, but=table) | held) + len(fresh) > group.num_blocks - 1:
                return True
        return False

    # Operations.

    def add(self, tokens: list[int], namespace: bytes) -> None:
        """A new table holds the longest hit."""
        table = BlockTable(self.allocator, ROOTS[namespace], namespace=namespace, groups=self.groups)
        expected, cached = self.hit(namespace, tokens), self.cached(namespace, tokens)
        assert table.hold_prefix(tokens) == expected
        assert table.block_ids == cached[: expected // self.size]
        assert table.num_matched_tokens == len(cached) * self.size
        self.num_hits += expected > 0
        self.num_limited += expected < len(cached) * self.size
        sequence = Sequence(namespace, tokens[:expected], expected, expected, expected)
        self.tables.append((table, sequence))

    def allocate(self, tokens: list[int], lookahead: int, namespace: bytes) -> None:
        table = BlockTable(self.allocator, ROOTS[namespace], namespace=namespace, groups=self.groups)
        expected = self.hit(namespace, tokens)
        sequence = Sequence(namespace, list(tokens), expected, expected, len(tokens))
        try:
            assert table.allocate(tokens, lookahead) == expected
        except OutOfBlocksError:
            self.num_refused += 1
            assert not table.block_ids
            assert not len(table)
            table.free()
            return
        assert table.num_empty_slots >= lookahead
        self.tables.append((table, sequence))
        self.write(table, sequence, expected)

    def append(self, which: int, tokens: list[int], lookahead: int, num_drafts: int | None, *, dies: bool) -> None:
        """A forward of several tokens.

        Args:
            num_drafts: how many of the tokens may be taken back; None: nothing is said of it.
        """
        table, sequence = self.tables[which]
        start = len(sequence.tokens)
        stop = start + len(tokens)
        cut = stop if num_drafts is None else max(start, stop - num_drafts)
        lowest, first = min(sequence.start, start), min(sequence.first, start)
        is_refused = self.is_refused(which, lowest, first, cut, stop, lookahead)
        said = None if num_drafts is None else stop - num_drafts
        if self.attempt(which, lambda: table.append_tokens(tokens, lookahead, cut=said), is_refused):
            sequence.start, sequence.first, sequence.cut = lowest, first, cut
            sequence.tokens += tokens
            assert table.num_empty_slots >= lookahead
            self.write(table, sequence, start, dies=dies)
            if dies:
                kept = start if self.can_go_on(table.block_ids, start) else sequence.start
                assert self.can_go_on(table.block_ids, kept)
                self.truncate(which, kept)

    def step(self, which: int, token: int, *, commits: bool) -> None:
        """A decode step."""
        table, sequence = self.tables[which]
        length = len(sequence.tokens)
        slot = table.append_in_place(token)
        if slot is not None:
            assert length % self.size
            assert self.refs(table.block_ids[length // self.size]) == 1
        else:
            if commits:
                self.commit(which, length)
            made: list[int] = []
            is_refused = self.is_refused(which, length, length, length, length + 1)
            if not self.attempt(which, lambda: made.append(table.append_token(token)), is_refused):
                return
            sequence.start = sequence.first = sequence.cut = length
            slot = made[0]
        sequence.tokens.append(token)
        assert table.slots(length, length + 1) == [slot]
        self.write(table, sequence, length)

    def attempt(self, which: int, real, is_refused: bool) -> bool:
        """Both refuse, which changes nothing, or neither."""
        if not is_refused:
            real()
            return True
        table = self.tables[which][0]
        before = self.snapshot(table)
        with pytest.raises(OutOfBlocksError):
            real()
        after = self.snapshot(table)
        assert after == before, [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        self.num_refused += 1
        return False

    def snapshot(self, table: BlockTable) -> tuple[object, ...]:
        in_use = {block for table, _ in self.tables for block in table.block_ids}
        places = [{block: group.places[block] for block in in_use & group.places.keys()} for group in self.groups]
        needed = [self.needed(group) for group in self.groups]
        copies = [list(group.copies) for group in self.groups]
        return self.allocator.snapshot(), places, needed, copies, list(table.token_ids), table.allocation.resumption

    def write(self, table: BlockTable, sequence: Sequence, start: int, *, dies: bool = False) -> None:
        """What a forward does: copies on write, then each layer reads what it sees and writes."""
        copies = self.allocator.take_copies()
        self.num_copies += len(copies)
        for source, destination in copies:
            self.in_blocks[destination] = list(self.in_blocks[source])
        for group, content in zip(self.groups, self.in_window_blocks, strict=True):
            for source, destination in group.copies:
                content[destination] = list(content[source])
            group.copies.clear()
        prefixes = self.prefixes.of(sequence.namespace, sequence.tokens)
        for group, content in zip(self.groups, self.in_window_blocks, strict=True):
            for position in range(max(0, sequence.start - group.window + 1), sequence.start):
                index, offset = divmod(position, self.size)
                assert content[group.places[table.block_ids[index]]][offset] == prefixes[position]
        for position in range(start, len(sequence.tokens)):
            index, offset = divmod(position, self.size)
            block = table.block_ids[index]
            assert self.allocator.is_writable(block)
            written = DIED if dies else prefixes[position]
            self.in_blocks.setdefault(block, [DIED] * self.size)[offset] = written
            for group, content in zip(self.groups, self.in_window_blocks, strict=True):
                place = group.places.get(block)
                if place is not None:
                    content.setdefault(place, [DIED] * self.size)[offset] = written

    def let_pass(self, which: int) -> None:
        table, sequence = self.tables[which]
        table.let_pass()
        sequence.start = sequence.first = sequence.cut
        for number in range(sequence.cut, len(sequence.tokens) + 1):
            assert self.can_go_on(table.block_ids, number)

    def hold_window(self, which: int, num_tokens: int) -> None:
        table, sequence = self.tables[which]
        if num_tokens <= len(sequence.tokens) and self.can_go_on(table.block_ids, num_tokens):
            table.hold_window(num_tokens)
            sequence.start = num_tokens
            sequence.first, sequence.cut = max(sequence.first, num_tokens), max(sequence.cut, num_tokens)

    def commit(self, which: int, number: int) -> None:
        table, sequence = self.tables[which]
        number = min(number, len(sequence.tokens))
        before = list(table.block_ids)
        table.commit_full_blocks(number)
        self.num_replaced += table.block_ids != before
        for old, new in zip(before, table.block_ids, strict=True):
            assert new == old or self.in_blocks[new] == self.in_blocks[old]
        if table.num_committed_blocks < number // self.size:  # waits for a fork to be gone
            assert self.refs(table.block_ids[table.num_committed_blocks]) > 1
            self.num_deferred += 1

    def truncate(self, which: int, number: int) -> None:
        table, sequence = self.tables[which]
        number = min(number, len(sequence.tokens))
        if not self.can_go_on(table.block_ids, number):
            assert table.num_resumable_tokens(number) < number
            return
        table.truncate(number)
        del sequence.tokens[number:]
        sequence.start, sequence.cut = min(sequence.start, number), min(sequence.cut, number)
        sequence.first = min(sequence.first, number)

    def fork(self, which: int) -> None:
        table, sequence = self.tables[which]
        self.tables.append((table.fork(), sequence.copy()))

    def free(self, which: int, *, collected: bool) -> None:
        table, _ = self.tables.pop(which)
        if not collected:
            table.free()
        self.has_collected |= collected

    def forget(self, tokens: list[int], namespace: bytes) -> None:
        chain = HashChain(ROOTS[namespace], self.size)
        chain.extend(tokens)
        self.allocator.forget(chain.hashes(), namespace)

    def grow(self, rng: random.Random) -> None:
        """More blocks, or more window blocks, or others are reserved."""
        which = rng.randrange(-1, len(self.groups))
        if which >= 0:
            group = self.groups[which]
            group.num_to_come = rng.choice((0, 0, 3, group.num_blocks))  # less is given to what is not needed
            if group.num_blocks < self.world.windows[group.window] + 6:
                group.most = group.num_blocks + 1
                group.grow(group.num_blocks + 1)
        elif self.allocator.num_blocks < self.world.num_blocks + 8:
            self.allocator.grow(self.allocator.num_blocks + 1)

    def reset(self) -> None:
        """Everything is forgotten, and begins anew as small as it was."""
        self.tables.clear()
        gc.collect(0)
        self.allocator.reset_prefix_cache(self.world.num_blocks)
        for group in self.groups:
            group.reset(self.world.windows[group.window])
            group.most = group.num_blocks

    def compare(self) -> None:
        """What each table and each hit must be able to read is there; what is counted is what there is. Changes nothing."""
        allocator, size = self.allocator, self.size
        hashed = [block for block in range(1, allocator.num_blocks) if allocator.block_hash_of(block) is not None]
        all_prefixes = [self.prefixes.of(sequence.namespace, sequence.tokens) for _, sequence in self.tables]
        for (table, sequence), prefixes in zip(self.tables, all_prefixes, strict=True):
            assert list(table.token_ids) == sequence.tokens
            for index in range(-(-len(prefixes) // size)):
                expected = prefixes[index * size : (index + 1) * size]
                assert self.in_blocks[table.block_ids[index]][: len(expected)] == expected
        for group, content in zip(self.groups, self.in_window_blocks, strict=True):
            places = group.places
            assert len(set(places.values())) == len(places)
            assert group.num_needed + group.num_idle + group.num_free == group.num_blocks - 1
            needed = self.needed(group)
            assert group.num_needed == len(needed) or (self.has_collected and group.num_needed > len(needed))
            for block in hashed:
                assert block not in places or content[places[block]] == self.in_blocks[block]
            for (table, sequence), prefixes in zip(self.tables, all_prefixes, strict=True):
                for index in (*self.seen(group.window, sequence.start), *self.seen(group.window, len(prefixes))):
                    assert table.block_ids[index] in places
                for index in range(-(-len(prefixes) // size)):
                    place = places.get(table.block_ids[index])
                    expected = prefixes[index * size : (index + 1) * size]
                    assert place is None or content[place][: len(expected)] == expected
        for table, sequence in self.tables:
            for number in (len(sequence.tokens), sequence.cut):
                assert table.num_resumable_tokens(number) == self.resumable(table.block_ids, number)

    def check(self) -> None:
        """Prove the invariants; what is collected is taken back."""
        self.allocator.check()
        for group in self.groups:
            counts = group.num_needed, sorted(group.places.items())
            group.check()
            in_use = {block for table, _ in self.tables for block in table.block_ids}
            kept = [(block, place) for block, place in counts[1] if block in group.places]
            assert kept == sorted(group.places.items())  # nothing of interest was derived otherwise
            assert {block for block, _ in counts[1]} & in_use == group.places.keys() & in_use
            assert counts[0] == group.num_needed or self.has_collected
        self.has_collected = False


OPERATIONS = ["add"] * 8 + ["append"] * 8 + ["step"] * 14 + ["let_pass"] * 5 + ["hold_window"] * 2 + ["commit"] * 9
OPERATIONS += (
    ["truncate"] * 3 + ["fork"] * 3 + ["free"] * 9 + ["allocate", "collect", "grow", "forget", "forget_cached"]
)


def random_step(driver: Driver, rng: random.Random) -> None:
    """One operation, mostly on tokens of a few documents, so that sequences meet."""
    operation, most = rng.choice(OPERATIONS), driver.world.max_tokens
    namespace = NAMESPACES[rng.random() < 0.15]
    document = random.Random(rng.randrange(3)).choices((0, 1), k=2 * most)
    is_room = len(driver.tables) < driver.max_tables

    def tokens(start: int, number: int) -> list[int]:
        if rng.random() < 0.2:
            return [rng.randrange(2) for _ in range(number)]
        return document[start : start + number]

    if operation == "add" and is_room:
        driver.add(document[: rng.randrange(most)] + tokens(0, 3), namespace)
    elif operation == "allocate" and is_room:
        driver.allocate(document[: rng.randrange(most)] + tokens(0, 2), rng.choice((0, 0, 3)), namespace)
    elif operation == "grow":
        driver.grow(rng)
    elif operation == "forget":
        driver.forget(document[: rng.randrange(most)], namespace)
    elif operation == "forget_cached":
        if rng.random() < 0.1:
            driver.reset()
        elif rng.random() < 0.2:
            driver.allocator.forget_cached_blocks(rng.choice((None, *NAMESPACES)))
    elif driver.tables:
        which = rng.randrange(len(driver.tables))
        length = len(driver.tables[which][1].tokens)
        if operation == "append" and length < most:
            number = min(most - length, rng.choice((0, 1, 2, 5, most)))
            drafts = rng.choice((None, None, 0, 1, 3, 50))
            lookahead = rng.choice((0, 0, 0, 0, 1, 3))
            driver.append(which, tokens(length, number), lookahead, drafts, dies=rng.random() < 0.15)
            if rng.random() < 0.5:
                driver.let_pass(which)
        elif operation == "step":
            for position in range(length, min(length + rng.randrange(1, 5), most + 8)):
                driver.step(which, *tokens(position, 1), commits=rng.random() < 0.5)
        elif operation == "let_pass":
            driver.let_pass(which)
        elif operation == "hold_window":
            driver.hold_window(which, rng.randrange(length + 1))
        elif operation == "commit":
            driver.commit(which, rng.choice((1000, 1000, rng.randrange(length + 1))))
        elif operation == "truncate":
            driver.truncate(
                which, rng.choice((length // 2, rng.randrange(length + 1), max(0, length - rng.randrange(6))))
            )
        elif operation == "fork" and is_room:
            driver.fork(which)
        elif operation in ("free", "collect"):
            driver.free(which, collected=operation == "collect")


def run_operations(world: World, num_operations: int, seed: str) -> Driver:
    """Make that many in one world, and give every block back at the end.

    Raises:
        AssertionError: tables and model part, or a window block is lost.
    """
    rng, driver = random.Random(seed), Driver(world)
    for number in range(num_operations):
        try:
            random_step(driver, rng)
            driver.compare()
            if world.is_checked:
                driver.check()
        except BaseException as error:
            error.add_note(f"operation {number} of seed {seed!r}, {world}")
            raise
    while driver.tables:
        driver.free(0, collected=False)
    driver.compare()
    driver.check()
    driver.allocator.forget_cached_blocks()
    driver.check()
    assert all(group.num_free == group.num_blocks - 1 for group in driver.groups)  # nothing leaks
    return driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = time.perf_counter()
    counts = dict.fromkeys(("refused", "hits", "limited", "copies", "replaced", "deferred"), 0)
    for number in range(0, given.operations, OPERATIONS_EACH):
        turn = number // OPERATIONS_EACH
        world = WORLDS[turn % len(WORLDS)]._replace(is_checked=turn // len(WORLDS) % 2 == 0)
        driver = run_operations(world, min(OPERATIONS_EACH, given.operations - number), f"{given.seed} {number}")
        for name in counts:
            counts[name] += getattr(driver, f"num_{name}")
    print(  # noqa: T201  # a command prints
        f"{given.operations:,} operations agree with the naive model: {counts}, {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
