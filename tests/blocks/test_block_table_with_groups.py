"""A table of a model some of whose layers see a window: what it hits, needs, lets go of and refuses."""

import pytest

from hf_paged_cache.blocks import BlockTable, HashChain, PrefixCachingBlockAllocator, Window, WindowBlocks, root_hash
from hf_paged_cache.errors import CacheArgumentError, OutOfBlocksError

from .test_interrupts import interrupt

ROOT = root_hash(b"model")


class Small:
    """An allocator with blocks of two tokens, and groups of some windows."""

    def __init__(self, windows=None, num_blocks=33):
        self.allocator = PrefixCachingBlockAllocator(num_blocks, 2)
        self.groups = [
            WindowBlocks(self.allocator, Window(window), number) for window, number in (windows or {4: 33}).items()
        ]
        self.group = self.groups[0]

    def table(self, tokens=(), *, is_hit=True, is_committed=False, num_drafts=0):
        table = BlockTable(self.allocator, ROOT, groups=self.groups)
        num_hit = table.hold_prefix(tokens) if is_hit else 0
        if num_hit < len(tokens):
            table.append_tokens(list(tokens)[num_hit:])
        if is_committed:
            table.commit_full_blocks(table.num_tokens)
        table.release_passed(table.num_tokens - num_drafts)
        return table

    def check(self):
        self.allocator.check()
        for group in self.groups:
            group.check()


@pytest.fixture
def small():
    made = Small()
    yield made
    made.check()


def test_blocks_that_are_cut_off_and_cannot_be_hit_leave_no_window_blocks(small) -> None:
    table = small.table()
    table.append_tokens(range(12))
    assert small.group.num_free == 26
    table.truncate(2)
    assert small.group.num_free == 31


def test_drafts_may_be_taken_back_to_where_it_was_said(small) -> None:
    table = small.table(range(10))
    table.append_tokens(range(10, 20))
    table.release_passed(12)
    assert [table.num_resumable_tokens(number) for number in range(12, 21)] == list(range(12, 21))
    assert small.group.num_needed == 6  # tokens 9 to 19
    table.truncate(13)
    assert small.group.num_needed == 3  # tokens 9 to 12: it may still be taken back to 12
    with pytest.raises(CacheArgumentError, match="cannot resume after 6 tokens, which a window has passed; truncate"):
        table.truncate(6)


def test_a_namespace_is_not_told_what_others_have() -> None:
    small = Small({4: 3})
    table = BlockTable(small.allocator, ROOT, namespace=b"tenant", groups=small.groups)
    with pytest.raises(OutOfBlocksError, match=r"need 6 blocks of layers with a window of 4 tokens: there are fewer;"):
        table.append_tokens(range(12))


def test_slots_ahead_copy_window_blocks_as_tokens_do(small) -> None:
    table = small.table(range(3))
    forked = table.fork()
    forked.append_tokens((), 4)
    assert forked.num_empty_slots >= 4
    assert len(small.group.copies) == 1
    with pytest.raises(CacheArgumentError):
        forked.append_tokens((), -1)
    with pytest.raises(CacheArgumentError):
        forked.append_tokens([1 << 70])
    assert forked.num_tokens == 3


def test_blocks_whose_window_blocks_have_gone_are_known_again_once_computed_again(small) -> None:
    small.table(range(12), is_committed=True).free()
    hashes = HashChain(ROOT, small.allocator.block_size, range(12)).hashes_of()
    cached = small.allocator.match_prefix(hashes)
    small.group.drop(cached)
    assert small.table().hold_prefix(range(12)) == 0
    table = small.table(range(12), is_committed=True)
    assert set(table.block_ids).isdisjoint(cached)
    assert small.allocator.match_prefix(hashes) == table.block_ids
    assert small.table().hold_prefix(range(12)) == 12
    assert small.allocator.num_cached_blocks == 0


class Content:
    """Tables in few window blocks, and what was written into these: of each token, its number."""

    def __init__(self):
        self.small = small = Small({4: 14, 2: 13})
        self.content = [{} for _ in small.groups]
        cached = small.table([*range(8)], is_committed=True)
        self.write(cached, 0)
        cached.free()
        self.kept = small.table(range(50, 57))
        self.table = small.table([*range(6), 60, 61, 62], num_drafts=1)
        self.forked = self.table.fork()
        self.equal = small.table([*range(8), 8], is_hit=False)
        for table in (self.kept, self.table, self.equal):
            self.write(table, 0)

    def write(self, table, start):
        for group, content in zip(self.small.groups, self.content, strict=True):
            for source, destination in group.copies:
                content[destination] = dict(content.get(source, {}))
            group.copies.clear()
            for position in range(start, table.num_tokens):
                place = group.places.get(table.block_ids[position // 2])
                if place is not None:
                    content.setdefault(place, {})[position % 2] = table.token_ids[position]

    def is_right(self, table, num_tokens):
        """Whether a sequence can resume from there, and what it sees is what was written."""
        return table.num_resumable_tokens(num_tokens) == num_tokens and all(
            content[group.places[table.block_ids[position // 2]]][position % 2] == table.token_ids[position]
            for group, content in zip(self.small.groups, self.content, strict=True)
            for position in range(max(0, num_tokens - group.window.most_needed), num_tokens)
        )


OPERATIONS = {
    "append": lambda w: w.kept.append_tokens([1, 2, 3, 4, 5]),
    "append to a fork": lambda w: w.forked.append_tokens([1, 2, 3]),
    "append a token": lambda w: w.equal.append_token(1),
    "append a token to a fork": lambda w: w.forked.append_token(1),
    "commit equal blocks": lambda w: w.equal.commit_full_blocks(8),
    "let pass": lambda w: w.kept.release_passed(),
    "truncate": lambda w: w.table.truncate(8),
    "free": lambda w: w.forked.free(),
    "grow": lambda w: w.small.group.grow(14),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_interrupted_anywhere_leaves_what_can_be_rolled_back(name) -> None:
    """But for the end of a table that was to be copied on write: it is known to be lost."""
    operation, instruction, num_lost = OPERATIONS[name], 0, 0
    while interrupt(operation, world := Content(), instruction):
        if instruction % 2:  # else the next operation finds what was left
            world.small.check()
        for table, length in ((world.kept, 7), (world.table, 9), (world.forked, 9), (world.equal, 9)):
            if name == "free" and table is world.forked:
                continue
            if name == "truncate" and table is world.table:
                length = 8
            known = table.num_resumable_tokens(length)
            assert known == length or table is world.forked
            num_lost += known < length
            world.write(table, table.num_tokens)  # copies are made before the next write
            table.truncate(known)
            assert world.is_right(table, known), (instruction, table)
        for group in world.small.groups:
            assert sorted([*group.places.values(), *group._free]) == list(range(1, group.num_blocks))
            assert group.num_needed == len(group.needed_by(world.small.allocator.allocations()))
        world.small.check()
        if name not in ("free", "grow"):
            operation(world)
            world.small.check()
        instruction += 47
    assert instruction > 20
    assert (num_lost > 0) == ("a fork" in name)
