"""Random operations on allocator and tables beside a naive model: same ids, same order of eviction, same refusals.

The model (`NaiveModel`) is lists and dicts and searches; it imports nothing of the package. It also plays the pool: what
is written into a slot is the whole prefix up to that token, which is what keys and values depend on. So a wrong hit, a
missing copy on write or a write into a shared block shows as a wrong prefix in some table's slots.

Tables are of two namespaces, which share nothing. Rings (allocations with a window) are written a token at a time, among the
other operations, and read what their window shows after each.

Scenarios 9, 12, 24, 25, 31, 32, 34, 39, 42, 47, 50, 53, 60, 62 and 70 (vocabulary 2).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import cycle, islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from hf_paged_cache.blocks import Allocation, BlockTable, HashChain, root_hash
from hf_paged_cache.blocks.engine import EngineAllocator
from hf_paged_cache.errors import BlockStateError, OutOfBlocksError

BLOCK_SIZE = 2
NAMESPACES = (b"", b"tenant")
ROOTS = {namespace: root_hash(b"model", namespace) for namespace in NAMESPACES}

Prefix = tuple[bytes, tuple[int, ...]]


@dataclass
class NaiveTable:
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_committed: int = 0
    namespace: bytes = b""
    num_positions: int = 0  # of a ring
    window: int = 0  # of a ring

    def prefix(self, end: int) -> Prefix:
        """What a block's hash covers, and what keys and values depend on."""
        return self.namespace, tuple(self.tokens[:end])


class NaiveOutOfBlocksError(Exception):
    pass


class NaiveModel:
    """What the allocator and its tables must do, by search; a block's hash is its namespace and all tokens up to its end."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks))  # next handed out first
        self.cached: list[int] = []  # next evicted first
        self.hash: dict[int, Prefix] = {}
        self.namespace: dict[int, bytes] = {}  # of every block that was ever taken
        self.uncomputed: set[int] = set()
        self.tables: list[NaiveTable] = []
        self.evictions = 0
        self.copies: list[tuple[int, int]] = []
        self.content: dict[int, list[Prefix | None]] = {}

    def refs(self, block: int) -> int:
        return sum(table.blocks.count(block) for table in self.tables)

    def num_in_use(self, namespace: bytes) -> int:
        return len({block for table in self.tables if table.namespace == namespace for block in table.blocks})

    def num_cached(self, namespace: bytes) -> int:
        return sum(self.hash[block][0] == namespace for block in self.cached)

    def find(self, key: Prefix) -> int | None:
        return next((block for block, other in self.hash.items() if other == key), None)

    def hits(self, wanted: NaiveTable) -> list[int]:
        hits = []
        for end in range(BLOCK_SIZE, len(wanted.tokens) + 1, BLOCK_SIZE):
            block = self.find(wanted.prefix(end))
            if block is None or block in self.uncomputed:
                break
            hits.append(block)
        return hits

    def check_room(self, needed: int, hits: list[int]) -> None:
        if needed + sum(block in self.cached for block in hits) > len(self.free) + len(self.cached):
            raise NaiveOutOfBlocksError

    def hold(self, blocks: list[int]) -> None:
        self.cached = [block for block in self.cached if block not in blocks]

    def take(self, number: int) -> list[int]:
        taken = []
        for _ in range(number):
            if self.free:
                block = self.free.pop(0)
            else:
                block = self.cached.pop(0)
                del self.hash[block]
                self.evictions += 1
            self.content[block] = [None] * BLOCK_SIZE
            taken.append(block)
        return taken

    def settle(self, dropped: list[int]) -> None:
        """Put each block of `dropped` that no table holds any more where it belongs."""
        for block in dropped:
            if self.refs(block):
                continue
            if block in self.uncomputed:
                self.uncomputed.discard(block)
                del self.hash[block]
            if block in self.hash:
                self.cached.append(block)
            else:
                self.free.insert(0, block)

    def allocate(self, table: NaiveTable, tokens: list[int], lookahead: int) -> int:
        hits = self.hits(NaiveTable(tokens, namespace=table.namespace))
        number = -(-(len(tokens) + lookahead) // BLOCK_SIZE) - len(hits)
        self.check_room(number, hits)
        self.hold(hits)
        table.blocks = hits + self.take(number)
        table.tokens = list(tokens)
        table.num_committed = len(hits)
        self.tables.append(table)
        return len(hits) * BLOCK_SIZE

    def touched(self, table: NaiveTable, number: int) -> tuple[list[int], int]:
        if number == 0:
            return [], 0
        first, last = len(table.tokens) // BLOCK_SIZE, -(-(len(table.tokens) + number) // BLOCK_SIZE)
        copied = [
            index
            for index in range(first, last)
            if index < len(table.blocks) and (self.refs(table.blocks[index]) > 1 or table.blocks[index] in self.hash)
        ]
        return copied, max(0, last - len(table.blocks))

    def append(self, table: NaiveTable, tokens: list[int], lookahead: int) -> None:
        copied, fresh = self.touched(table, len(tokens) + lookahead)
        self.check_room(len(copied) + fresh, [])
        for index in copied:
            (block,) = self.take(1)
            old, table.blocks[index] = table.blocks[index], block
            self.settle([old])
            self.copies.append((old, block))
        table.blocks += self.take(fresh)
        table.tokens += tokens

    def commit(self, table: NaiveTable, number: int) -> None:
        replaced = []
        for index in range(table.num_committed, number // BLOCK_SIZE):
            key, own = table.prefix((index + 1) * BLOCK_SIZE), table.blocks[index]
            other = self.find(key)
            if other is not None and other != own and other in self.uncomputed:
                del self.hash[other]
                self.uncomputed.discard(other)
                other = None
            if other is None or other == own:
                self.hash[own] = key
                self.uncomputed.discard(own)
            else:
                replaced.append((index, own, other))
        for index, _, other in replaced:
            self.hold([other])
            table.blocks[index] = other
        self.settle([own for _, own, _ in reversed(replaced)])
        table.num_committed = max(table.num_committed, number // BLOCK_SIZE)

    def truncate(self, table: NaiveTable, number: int) -> None:
        kept = -(-number // BLOCK_SIZE)
        dropped = table.blocks[kept:]
        del table.blocks[kept:], table.tokens[number:]
        table.num_committed = min(table.num_committed, number // BLOCK_SIZE)
        self.settle(dropped[::-1])

    def fork(self, table: NaiveTable) -> NaiveTable:
        kept = -(-len(table.tokens) // BLOCK_SIZE)
        forked = NaiveTable(list(table.tokens), table.blocks[:kept], table.num_committed, table.namespace)
        self.tables.append(forked)
        return forked

    def drop(self, table: NaiveTable) -> None:
        self.tables = [other for other in self.tables if other is not table]
        self.settle(table.blocks[::-1])

    def allocate_ring(self, ring: NaiveTable) -> None:
        number = len({position // BLOCK_SIZE for position in range(min(ring.num_positions, ring.window))})
        self.check_room(number, [])
        ring.blocks = self.take(number)
        self.tables.append(ring)

    def slots_of_ring(self, ring: NaiveTable) -> list[int]:
        """One for each position: the slots of the blocks, again and again."""
        once = [block * BLOCK_SIZE + offset for block in ring.blocks for offset in range(BLOCK_SIZE)]
        return list(islice(cycle(once), ring.num_positions))

    def write_ring(self, ring: NaiveTable, token: int) -> None:
        """Into a block of its own, else into a copy."""
        block, offset = divmod(self.slots_of_ring(ring)[len(ring.tokens)], BLOCK_SIZE)
        if self.refs(block) > 1:
            self.check_room(1, [])
            source = block
            (block,) = self.take(1)
            ring.blocks[ring.blocks.index(source)] = block
            self.settle([source])
            self.content[block] = list(self.content[source])
        ring.tokens.append(token)
        self.content[block][offset] = ring.prefix(len(ring.tokens))

    def fork_ring(self, ring: NaiveTable) -> NaiveTable:
        forked = NaiveTable(list(ring.tokens), list(ring.blocks), 0, ring.namespace, ring.num_positions, ring.window)
        self.tables.append(forked)
        return forked

    def allocate_immutable(self, tokens: list[int], namespace: bytes) -> NaiveTable:
        table = NaiveTable(list(tokens), namespace=namespace)
        keys = [table.prefix(end) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]
        found = [self.find(key) for key in keys]
        hits = [block for block in found if block is not None]
        self.check_room(len(keys) - len(hits), hits)
        self.hold(hits)
        fresh = self.take(len(keys) - len(hits))
        for key, block in zip(keys, found, strict=True):
            if block is None:
                block = fresh.pop(0)
                self.hash[block] = key
                self.uncomputed.add(block)
            table.blocks.append(block)
        self.tables.append(table)
        return table

    def mark_accessed(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
                self.cached.append(block)

    def grow(self, number: int) -> None:
        self.free = list(range(self.num_blocks, number)) + self.free
        self.num_blocks = number

    def forget(self, wanted: NaiveTable) -> None:
        keys = [wanted.prefix(end) for end in range(BLOCK_SIZE, len(wanted.tokens) + 1, BLOCK_SIZE)]
        blocks = [block for key in keys if (block := self.find(key)) is not None]
        for block in blocks:
            del self.hash[block]
            self.uncomputed.discard(block)
        self.free = [block for block in blocks if block in self.cached] + self.free
        self.cached = [block for block in self.cached if block not in blocks]

    def forget_cached(self, namespace: bytes | None) -> None:
        forgotten = [block for block in self.cached if namespace in (None, self.hash[block][0])]
        for block in forgotten:
            del self.hash[block]
        self.free = forgotten + self.free
        self.cached = [block for block in self.cached if block in self.hash]

    def reset(self) -> None:
        self.free, self.cached, self.hash = list(range(1, self.num_blocks)), [], {}


class Driver:
    """Runs each operation on the allocator and on the model, and compares what they return, refuse and look like."""

    def __init__(self, num_blocks: int, max_tables: int = 6) -> None:
        self.allocator = EngineAllocator(num_blocks, BLOCK_SIZE)
        self.model = NaiveModel(num_blocks)
        self.max_tables = max_tables
        self.max_blocks = num_blocks + 8
        self.tables: list[tuple[BlockTable, NaiveTable]] = []
        self.awaiting: list[tuple[Allocation, NaiveTable]] = []  # of allocate_immutable
        self.rings: list[tuple[Allocation, NaiveTable]] = []
        self.num_refused = 0
        self.num_overwritten = 0  # tokens of rings

    def both(self, real, naive):
        """Both must return the same, or both refuse; a refusal must change nothing."""
        before = self.allocator.snapshot()
        try:
            expected = naive()
        except NaiveOutOfBlocksError:
            with pytest.raises(OutOfBlocksError):
                real()
            assert self.allocator.snapshot() == before
            self.num_refused += 1
            return False
        assert real() == expected
        return True

    def allocate(self, tokens: list[int], lookahead: int, namespace: bytes) -> None:
        if len(self.tables) >= self.max_tables:
            return
        table = BlockTable(self.allocator, ROOTS[namespace], namespace=namespace)
        naive = NaiveTable(namespace=namespace)
        if self.both(lambda: table.allocate(tokens, lookahead), lambda: self.model.allocate(naive, tokens, lookahead)):
            self.tables.append((table, naive))
            assert table.num_cached_tokens == naive.num_committed * BLOCK_SIZE
            self.write(table, naive, table.num_cached_tokens)

    def append(self, which: int, tokens: list[int], lookahead: int) -> None:
        table, naive = self.tables[which]
        start = len(naive.tokens)
        copied, fresh = self.model.touched(naive, len(tokens) + lookahead)
        assert table.num_new_blocks_for_append(len(tokens) + lookahead) == len(copied) + fresh
        done = self.both(
            lambda: table.append_tokens(tokens, lookahead), lambda: self.model.append(naive, tokens, lookahead)
        )
        if done:
            assert table.num_empty_slots >= lookahead
            self.write(table, naive, start)

    def write(self, table: BlockTable, naive: NaiveTable, start: int) -> None:
        content = self.model.content
        expected, self.model.copies = self.model.copies, []
        assert self.allocator.take_copies() == expected
        for source, destination in expected:
            content[destination] = list(content[source])
        for position, slot in enumerate(table.slots(start, len(naive.tokens)), start):
            block, offset = divmod(slot, BLOCK_SIZE)
            assert self.allocator.is_writable(block)  # invariant 5
            content[block][offset] = naive.prefix(position + 1)

    def commit(self, which: int, number: int) -> None:
        table, naive = self.tables[which]
        number = min(number, len(naive.tokens))
        new = range(naive.num_committed, number // BLOCK_SIZE)
        hashes = table.commit_full_blocks(number)
        self.model.commit(naive, number)
        own = [self.allocator.block_hash_of(naive.blocks[index]) for index in new]
        assert [each for each in own if each is not None] == [each for each in hashes if each in own]
        assert len(hashes) == len(new)

    def truncate(self, which: int, number: int) -> None:
        table, naive = self.tables[which]
        number = min(number, len(naive.tokens))
        self.both(lambda: table.truncate(number), lambda: self.model.truncate(naive, number))

    def fork(self, which: int) -> None:
        if len(self.tables) < self.max_tables:
            table, naive = self.tables[which]
            self.tables.append((table.fork(), self.model.fork(naive)))

    def free(self, which: int, *, collected: bool) -> None:
        table, naive = self.tables.pop(which)
        self.model.drop(naive)
        if not collected:
            table.free()
            with pytest.raises(BlockStateError):
                table.free()

    def allocate_immutable(self, tokens: list[int], namespace: bytes) -> None:
        if len(self.awaiting) >= 2:
            return
        chain = HashChain(ROOTS[namespace], BLOCK_SIZE)
        chain.extend(tokens)
        allocation = self.allocator.allocate(namespace=namespace)

        def naive() -> None:
            made.append(self.model.allocate_immutable(tokens, namespace))

        made: list[NaiveTable] = []
        if self.both(lambda: self.allocator.allocate_immutable(allocation, chain.hashes()), naive):
            self.awaiting.append((allocation, made[0]))

    def end_immutable(self, which: int, *, computed: bool) -> None:
        allocation, naive = self.awaiting.pop(which)
        if computed:
            for index, block in enumerate(naive.blocks):
                if block in self.model.uncomputed or block not in self.model.hash:
                    for offset in range(BLOCK_SIZE):
                        self.model.content[block][offset] = naive.prefix(index * BLOCK_SIZE + offset + 1)
            self.allocator.mark_computed(naive.blocks)
            self.model.uncomputed -= set(naive.blocks)
        self.model.drop(naive)
        allocation.free()

    def allocate_ring(self, num_tokens: int, window: int, namespace: bytes) -> None:
        if len(self.rings) >= 3:
            return
        ring = NaiveTable(namespace=namespace, num_positions=num_tokens, window=window)
        made: list[Allocation] = []

        def real() -> None:
            made.append(self.allocator.allocate(num_tokens=num_tokens, window=window, namespace=namespace))

        if self.both(real, lambda: self.model.allocate_ring(ring)):
            self.rings.append((made[0], ring))

    def write_ring(self, which: int, token: int) -> None:
        allocation, ring = self.rings[which]
        position = len(ring.tokens)
        if position == ring.num_positions:
            return
        index = position // BLOCK_SIZE % len(ring.blocks)
        source = ring.blocks[index]

        def real() -> None:
            self.allocator.make_writable(allocation, index)

        if self.both(real, lambda: self.model.write_ring(ring, token)):
            copied = [(source, ring.blocks[index])] if ring.blocks[index] != source else []
            assert self.allocator.take_copies() == copied
            assert self.allocator.is_writable(allocation.slots(position, position + 1)[0] // BLOCK_SIZE)
            self.num_overwritten += position >= allocation.num_slots

    def fork_ring(self, which: int) -> None:
        if len(self.rings) < 3:
            allocation, ring = self.rings[which]
            self.rings.append((self.allocator.fork(allocation), self.model.fork_ring(ring)))

    def end_ring(self, which: int, *, collected: bool) -> None:
        allocation, ring = self.rings.pop(which)
        self.model.drop(ring)
        if not collected:
            allocation.free()

    def mark_accessed(self, which: int) -> None:
        if self.model.cached:
            block = self.model.cached[which % len(self.model.cached)]
            self.allocator.mark_accessed([block])
            self.model.mark_accessed([block])

    def grow(self) -> None:
        if self.model.num_blocks < self.max_blocks:
            self.model.grow(self.model.num_blocks + 1)
            self.allocator.grow(self.model.num_blocks)

    def forget(self, tokens: list[int], namespace: bytes) -> None:
        chain = HashChain(ROOTS[namespace], BLOCK_SIZE)
        chain.extend(tokens)
        self.allocator.forget([*chain.hashes()] * 2, namespace)  # what is given twice is forgotten once
        self.model.forget(NaiveTable(tokens, namespace=namespace))

    def forget_cached(self, namespace: bytes | None) -> None:
        self.allocator.forget_cached_blocks(namespace)
        self.model.forget_cached(namespace)

    def reset(self) -> None:
        if any(naive.blocks for naive in self.model.tables):
            with pytest.raises(BlockStateError, match="in use"):
                self.allocator.reset_prefix_cache()
        else:
            self.allocator.reset_prefix_cache()
            self.model.reset()

    def compare(self) -> None:
        allocator, model = self.allocator, self.model
        allocator.check()
        for table, naive in self.tables:
            assert table.block_ids == naive.blocks
            assert list(table.token_ids) == naive.tokens
            assert table.num_committed_blocks == naive.num_committed
            for position, slot in enumerate(table.slots(0, len(naive.tokens))):
                block, offset = divmod(slot, BLOCK_SIZE)
                assert model.content[block][offset] == naive.prefix(position + 1)
        for allocation, naive in self.awaiting:
            assert allocation.block_ids == naive.blocks
        for allocation, ring in self.rings:
            assert allocation.block_ids == ring.blocks
            slots = allocation.slots(0, ring.num_positions)
            assert slots == model.slots_of_ring(ring)
            for position in range(max(0, len(ring.tokens) - ring.window), len(ring.tokens)):
                block, offset = divmod(slots[position], BLOCK_SIZE)
                assert model.content[block][offset] == ring.prefix(position + 1)
        queue = allocator.snapshot()[1]
        assert queue == model.free + model.cached
        assert allocator.num_free_blocks == len(model.free)
        assert allocator.num_cached_blocks == len(model.cached)
        assert allocator.num_evictions == model.evictions
        for namespace in NAMESPACES:
            assert allocator.num_cached_blocks_of(namespace) == model.num_cached(namespace)
            assert allocator.num_blocks_in_use_of(namespace) == model.num_in_use(namespace)
        for block in range(1, model.num_blocks):
            assert allocator.ref_count(block) == model.refs(block)
            assert (allocator.block_hash_of(block) is None) == (block not in model.hash)


OPERATIONS = ["allocate"] * 5 + ["append"] * 8 + ["commit"] * 5 + ["truncate"] * 2 + ["fork"] * 2 + ["free"] * 3
OPERATIONS += ["ring"] * 2 + ["write_ring"] * 8 + ["fork_ring", "free_ring", "collect_ring"]
OPERATIONS += ["collect", "immutable", "end_immutable", "touch", "touch", "grow", "forget", "forget_cached", "reset"]


def random_step(driver: Driver, rng: random.Random) -> None:
    operation = rng.choice(OPERATIONS)
    tokens, namespace = [rng.randrange(2) for _ in range(rng.randrange(9))], NAMESPACES[rng.random() < 0.25]
    if operation == "allocate":
        driver.allocate(tokens, rng.randrange(3), namespace)
    elif operation == "immutable":
        driver.allocate_immutable(tokens, namespace)
    elif operation == "ring":
        driver.allocate_ring(rng.randrange(20), rng.randrange(1, 9), namespace)
    elif operation.endswith("_ring"):
        if driver.rings:
            which = rng.randrange(len(driver.rings))
            if operation == "write_ring":
                driver.write_ring(which, rng.randrange(2))
            elif operation == "fork_ring":
                driver.fork_ring(which)
            else:
                driver.end_ring(which, collected=operation == "collect_ring")
    elif operation == "touch":
        driver.mark_accessed(rng.randrange(100))
    elif operation == "grow" and rng.random() < 0.01:
        driver.grow()
    elif operation == "forget":
        driver.forget(tokens, rng.choice(NAMESPACES))
    elif operation == "forget_cached" and rng.random() < 0.05:
        driver.forget_cached(rng.choice((None, *NAMESPACES)))
    elif operation == "reset":
        driver.reset()
    elif operation == "end_immutable" and driver.awaiting:
        driver.end_immutable(rng.randrange(len(driver.awaiting)), computed=rng.random() < 0.5)
    elif driver.tables:
        which = rng.randrange(len(driver.tables))
        if operation == "append":
            driver.append(which, tokens[: rng.choice((1, 1, 8))], rng.choice((0, 0, 3)))
        elif operation == "commit":
            driver.commit(which, rng.choice((100, rng.randrange(9))))
        elif operation == "truncate":
            driver.truncate(which, rng.randrange(12))
        elif operation == "fork":
            driver.fork(which)
        elif operation in ("free", "collect"):
            driver.free(which, collected=operation == "collect")


class AllocatorMachine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, so that a failure comes back as its shortest program."""

    tokens = st.lists(st.integers(0, 1), max_size=8)
    some = st.integers(0, 5)
    namespaces = st.sampled_from(NAMESPACES)

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(num_blocks=9)

    def which(self, number: int) -> int:
        return number % len(self.driver.tables)

    @rule(tokens=tokens, lookahead=st.integers(0, 2), namespace=namespaces)
    def allocate(self, tokens, lookahead, namespace):
        self.driver.allocate(tokens, lookahead, namespace)

    @rule(number=some, tokens=tokens, lookahead=st.integers(0, 3))
    def append(self, number, tokens, lookahead):
        if self.driver.tables:
            self.driver.append(self.which(number), tokens, lookahead)

    @rule(number=some, up_to=st.integers(0, 12))
    def commit(self, number, up_to):
        if self.driver.tables:
            self.driver.commit(self.which(number), up_to)

    @rule(number=some, kept=st.integers(0, 12))
    def truncate(self, number, kept):
        if self.driver.tables:
            self.driver.truncate(self.which(number), kept)

    @rule(number=some)
    def fork(self, number):
        if self.driver.tables:
            self.driver.fork(self.which(number))

    @rule(number=some, collected=st.booleans())
    def free(self, number, collected):
        if self.driver.tables:
            self.driver.free(self.which(number), collected=collected)

    @rule(tokens=tokens, namespace=namespaces)
    def allocate_immutable(self, tokens, namespace):
        self.driver.allocate_immutable(tokens, namespace)

    @rule(computed=st.booleans())
    def end_immutable(self, computed):
        if self.driver.awaiting:
            self.driver.end_immutable(0, computed=computed)

    @rule(num_tokens=st.integers(0, 12), window=st.integers(1, 8), namespace=namespaces)
    def allocate_ring(self, num_tokens, window, namespace):
        self.driver.allocate_ring(num_tokens, window, namespace)

    @rule(number=some, tokens=tokens)
    def write_ring(self, number, tokens):
        for token in tokens if self.driver.rings else ():
            self.driver.write_ring(number % len(self.driver.rings), token)
            self.driver.compare()

    @rule(number=some)
    def fork_ring(self, number):
        if self.driver.rings:
            self.driver.fork_ring(number % len(self.driver.rings))

    @rule(number=some, collected=st.booleans())
    def end_ring(self, number, collected):
        if self.driver.rings:
            self.driver.end_ring(number % len(self.driver.rings), collected=collected)

    @rule(number=some)
    def touch(self, number):
        self.driver.mark_accessed(number)

    @rule()
    def grow(self):
        self.driver.grow()

    @rule(tokens=tokens, namespace=namespaces)
    def forget(self, tokens, namespace):
        self.driver.forget(tokens, namespace)

    @rule(namespace=st.one_of(st.none(), namespaces))
    def forget_cached(self, namespace):
        self.driver.forget_cached(namespace)

    @rule()
    def reset(self):
        self.driver.reset()

    @invariant()
    def agrees(self):
        self.driver.compare()


def test_no_program_of_operations_tells_the_allocator_from_a_naive_model() -> None:
    steps = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)
    run_state_machine_as_test(AllocatorMachine, settings=steps)
