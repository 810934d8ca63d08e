"""One sequence: what it refuses, and what `test_random_operations`, which plays it, does not meet."""

import gc

import pytest

from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.errors import BlockStateError, CacheArgumentError

from .snapshot import snapshot_of

ROOT = root_hash(b"model")


@pytest.fixture
def new_table(allocator):
    def new(token_ids=None, num_lookahead_slots=0, *, commit=False, root=ROOT, extra_keys=None):
        table = BlockTable(allocator, root, extra_keys)
        if token_ids is not None:
            table.allocate(token_ids, num_lookahead_slots)
        if commit:
            table.commit_full_blocks(table.num_tokens)
        return table

    return new


# Allocation and hits.


def test_a_table_of_no_tokens_and_one_of_one_token(allocator, new_table):  # scenario 16
    assert new_table([]).block_ids == []
    one = new_table([5], commit=True)
    assert (len(one.block_ids), one.num_committed_blocks) == (1, 0)
    assert new_table([5]).num_cached_tokens == 0
    assert allocator.num_cached_blocks == 0


def test_other_roots_and_extra_keys_do_not_hit(new_table):
    new_table(range(8), commit=True)
    assert new_table(range(8), root=root_hash(b"other")).num_cached_tokens == 0
    assert new_table(range(8), extra_keys=lambda i: b"image" if i == 2 else b"").num_cached_tokens == 4


def test_a_table_is_allocated_once(new_table):
    table = new_table([1])
    with pytest.raises(BlockStateError, match="not empty"):
        table.allocate([2])
    table.free()
    with pytest.raises(BlockStateError, match="freed"):
        table.allocate([2])
    with_blocks = new_table()
    with_blocks.append_tokens((), 3)
    for fill in (with_blocks.allocate, with_blocks.hold_prefix):
        with pytest.raises(BlockStateError, match="not empty"):
            fill([2])


def test_nothing_is_hashed_for_what_is_never_shared(allocator, monkeypatch):  # scenario 28
    monkeypatch.setattr("hf_paged_cache.blocks.hashing.sha256", pytest.fail)
    table = BlockTable(allocator, ROOT)
    table.append_tokens(range(8))
    table.append_tokens([8], 3)


# Appending.


def test_appending_what_is_no_token_changes_nothing(allocator, new_table):
    table = new_table([1, 2])
    before = snapshot_of(allocator)
    with pytest.raises(CacheArgumentError, match="64 bits"):
        table.append_tokens([3, "4"])
    with pytest.raises(CacheArgumentError, match="num_lookahead_slots is -1"):
        table.append_tokens([3], -1)
    assert snapshot_of(allocator) == before
    assert table.num_tokens == 2


def test_slots_ahead_that_are_there_take_nothing(allocator, new_table):
    table = new_table([1], num_lookahead_slots=4)
    before = snapshot_of(allocator)
    table.append_tokens((), 5)
    assert snapshot_of(allocator) == before
    table.append_tokens((), 6)
    assert table.num_empty_slots == 7


# Committing.


def test_only_computed_tokens_are_committed(new_table):  # scenario 60: a draft is announced, not computed
    table = new_table(range(8))
    table.commit_full_blocks(5)
    assert table.num_committed_blocks == 2
    assert new_table(range(8)).num_cached_tokens == 4
    table.commit_full_blocks(3)  # less than before: nothing to do
    assert table.num_committed_blocks == 2
    for wrong in (9, -1):
        with pytest.raises(CacheArgumentError, match="the table has 8"):
            table.commit_full_blocks(wrong)


# Truncating.


@pytest.mark.parametrize("kept", range(7))
def test_truncating_keeps_the_tokens_and_their_blocks(allocator, new_table, kept):  # scenarios 31, 39
    table, other = new_table(range(6), 4), new_table([7])
    table.truncate(kept)
    assert list(table.token_ids) == list(range(kept))
    assert len(table.block_ids) == -(-kept // 2)
    assert other.block_ids == [6]
    with pytest.raises(CacheArgumentError, match=f"give 0 to {kept}"):
        table.truncate(kept + 1)


def test_cutting_a_hit_makes_it_shorter(new_table):
    new_table(range(6), commit=True)
    table = new_table(range(6))
    table.truncate(3)
    assert table.num_cached_tokens == 3
    table.append_tokens([9, 9])
    assert table.num_cached_tokens <= 4


# Forking.


def test_a_sequence_of_a_hundred_thousand_blocks_forks(make_allocator):  # scenario 51
    allocator = make_allocator(num_blocks=100_010, block_size=1)
    table = BlockTable(allocator, ROOT)
    table.allocate(range(100_000))
    forked = table.fork()
    forked.append_tokens([1])
    assert len(repr(forked)) < 200
    table.free()
    forked.truncate(1)
    assert allocator.num_blocks_in_use == 1


# The end.


def test_a_table_is_freed_once_and_is_over(allocator, new_table):  # scenario 62
    table = new_table(range(5), commit=True)
    table.free()
    assert (table.num_tokens, table.block_ids, table.num_committed_blocks) == (0, [], 0)
    with pytest.raises(BlockStateError):
        table.free()
    with pytest.raises(BlockStateError):
        table.append_tokens([1])
    assert (allocator.num_blocks_in_use, allocator.num_cached_blocks) == (0, 2)


def test_leaving_a_with_and_being_collected_give_the_blocks_back(allocator, new_table):
    with new_table(range(5)) as table:
        assert allocator.num_blocks_in_use == 3
    assert allocator.num_blocks_in_use == 0
    del table
    cycle = [new_table(range(5))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert allocator.num_blocks_in_use == 0
    with new_table(range(5)) as table:
        table.free()


def test_positions_of_blocks_that_others_hold_or_can_hit_are_not_written(allocator, new_table):
    own, hit, shared = new_table([1, 2, 3]), new_table([4, 5, 6], commit=True), new_table([7, 8, 9])
    forked = shared.fork()
    assert own.writable_slots(0, 3) == own.slots(0, 3)
    assert own.writable_slots(3, 3) == hit.writable_slots(1, 1) == []
    assert hit.writable_slots(2, 3) == hit.slots(2, 3)
    for table, start in ((hit, 0), (hit, 1), (shared, 0), (shared, 2)):
        with pytest.raises(BlockStateError, match="which others hold or can hit"):
            table.writable_slots(start, 3)
    assert forked.slots(0, 3) == shared.slots(0, 3)
