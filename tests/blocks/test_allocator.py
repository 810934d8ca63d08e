"""What an allocator refuses, and what `test_random_operations`, which plays it beside a naive model, does not meet."""

import copy
import pickle

import pytest

from hf_paged_cache.blocks import BlockHash, PrefixCachingBlockAllocator
from hf_paged_cache.errors import BlockStateError, CacheArgumentError, OutOfBlocksError

from .snapshot import snapshot_of


def queue_of(allocator):
    return snapshot_of(allocator)[1]


# One holder.


def test_slots_are_block_id_times_block_size_plus_offset(make_allocator):
    allocator = make_allocator(num_blocks=9, block_size=4)
    allocator.allocate((), 2).free()
    allocator.allocate((), 0)
    held = allocator.allocate((), 1)
    allocation = allocator.allocate((), 3)
    held.free()
    expected = [allocation.block_ids[i // 4] * 4 + i % 4 for i in range(12)]
    for start in range(13):
        for stop in range(start, 13):
            assert allocation.slots(start, stop) == expected[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 5)])
def test_positions_without_a_slot_are_refused(allocator, start, stop):
    allocation = allocator.allocate((), 2)
    with pytest.raises(CacheArgumentError, match=r"no slots for positions .*; there are 4"):
        allocation.slots(start, stop)


def test_leaving_a_with_frees_also_by_an_exception_and_not_twice(allocator):
    with pytest.raises(ZeroDivisionError), allocator.allocate((), 2) as allocation:
        raise ZeroDivisionError
    assert allocation.is_freed
    assert allocator.num_blocks_in_use == 0
    with allocator.allocate((), 2) as allocation:
        allocation.free()
    with pytest.raises(BlockStateError):
        allocation.free()


def test_an_allocation_cannot_be_copied_or_pickled(allocator):
    allocation = allocator.allocate((), 1)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="fork"):
            copier(allocation)


# Taking and giving back.


def test_a_failed_allocation_changes_nothing(make_allocator, hashes):  # scenario 12
    allocator = make_allocator(num_blocks=6)
    chain = hashes(range(6))
    cached = allocator.allocate((), 3)
    allocator.commit_many(cached, 0, chain)
    cached.free()
    allocation = allocator.allocate((), 1)
    before = snapshot_of(allocator)
    with pytest.raises(
        OutOfBlocksError, match=r"need 5 blocks: 1 free \+ 3 cached of 5, 3 of them the prefix hit itself"
    ):
        allocator.allocate(chain, 2)
    with pytest.raises(OutOfBlocksError):
        allocator.allocate_mutable(allocation, 5)
    with pytest.raises(OutOfBlocksError):
        allocator.allocate_immutable(allocation, hashes(range(100, 110)))
    assert snapshot_of(allocator) == before


def test_freeing_twice_is_refused_at_once(allocator):  # scenario 18
    allocation = allocator.allocate((), 2)
    allocation.free()
    before = snapshot_of(allocator)
    with pytest.raises(BlockStateError, match="ref_count 0"):
        allocation.free()
    for change in (allocator.allocate_mutable, allocator.truncate, allocator.make_writable, allocator.fork):
        with pytest.raises(BlockStateError):
            change(allocation, 0)
    assert snapshot_of(allocator) == before


def test_an_allocation_of_another_allocator_is_refused(allocator, make_allocator):
    stranger = make_allocator().allocate((), 1)
    with pytest.raises(BlockStateError):
        allocator.free(stranger)


def test_a_fork_may_hold_the_first_blocks_only(allocator):
    original = allocator.allocate((), 3)
    assert allocator.fork(original, 2).block_ids == original.block_ids[:2]
    with pytest.raises(CacheArgumentError):
        allocator.fork(original, -1)


def test_a_cut_prefix_hit_is_shorter(allocator, cache_sequence, hashes):
    cache_sequence(range(6))
    allocation = allocator.allocate(hashes(range(6)), 2)
    assert allocation.num_prefix_blocks == 3
    allocator.truncate(allocation, 1)
    assert allocation.num_prefix_blocks == 1
    assert allocator.fork(allocation).num_prefix_blocks == 1
    longer = allocator.allocate(hashes(range(6)))
    assert allocator.fork(longer, 2).num_prefix_blocks == 2


# Prefix hits.


def test_a_hash_given_twice_is_refused(allocator, cache_sequence, hashes):
    cache_sequence([1, 2])
    (block_hash,) = hashes([1, 2])
    before = snapshot_of(allocator)
    with pytest.raises(CacheArgumentError, match="given twice"):
        allocator.allocate([block_hash, block_hash])
    allocation = allocator.allocate([block_hash])
    with pytest.raises(CacheArgumentError, match="given twice"):
        allocator.allocate_immutable(allocation, [block_hash])
    with pytest.raises(CacheArgumentError, match="given twice"):
        allocator.allocate_immutable(allocation, hashes([3, 4]) * 2)
    allocation.free()
    assert snapshot_of(allocator)[:2] == before[:2]


# Eviction.


def test_blocks_are_handed_out_in_this_order(
    make_allocator, hashes
):  # scenarios 19, 20, 40: free, then LRU, tail first
    allocator = make_allocator(num_blocks=11)
    older, newer = allocator.allocate((), 5), allocator.allocate((), 3)
    allocator.commit_many(older, 0, hashes(range(8)))  # blocks 1 to 4; block 5 is partial
    allocator.commit_many(newer, 0, hashes(range(50, 56)))  # blocks 6 to 8
    older.free()
    newer.free()
    assert queue_of(allocator) == [5, 9, 10, 4, 3, 2, 1, 8, 7, 6]
    assert (allocator.num_free_blocks, allocator.num_cached_blocks) == (3, 7)


# Commit.


def test_committing_again_changes_nothing_and_another_hash_is_refused(allocator, hashes):
    allocation = allocator.allocate((), 2)
    allocator.commit_many(allocation, 0, hashes(range(4)))
    before = snapshot_of(allocator)
    allocator.commit_many(allocation, 0, hashes(range(4)))
    with pytest.raises(BlockStateError, match="block 2 has another hash"):
        allocator.commit_many(allocation, 0, [*hashes(range(2)), *hashes([9, 9])])
    with pytest.raises(CacheArgumentError, match="2 blocks to commit from 1; there are 2"):
        allocator.commit_many(allocation, 1, hashes(range(4)))
    assert snapshot_of(allocator) == before


def test_no_allocation_comes_to_hold_a_block_twice(allocator, hashes):
    allocation = allocator.allocate((), 2)
    allocator.commit_many(allocation, 0, hashes([1, 2]) * 2)
    assert allocation.block_ids == [1, 2]
    assert allocator.block_hash_of(2) is None
    other = allocator.allocate((), 2)
    allocator.commit_many(other, 0, hashes([1, 2]) * 2)
    assert other.block_ids == [1, 4]


def test_a_digest_of_other_tokens_is_neither_hit_nor_replaced(allocator, cache_sequence, hashes):
    cache_sequence([1, 2])
    collision = BlockHash(hashes([1, 2])[0].digest, b"other tokens")
    allocation = allocator.allocate([collision], 1)
    assert allocation.num_prefix_blocks == 0
    allocator.commit_many(allocation, 0, [collision])
    allocator.allocate_immutable(allocation, [collision])
    assert [allocator.block_hash_of(block_id) for block_id in allocation.block_ids] == [None, None]
    assert allocator.match_prefix(hashes([1, 2])) == [1]


# Blocks whose content comes later.


def test_an_uncomputed_block_is_no_hit_until_it_is_marked(allocator, hashes):
    allocation = allocator.allocate()
    chain = hashes(range(4))
    allocator.allocate_immutable(allocation, chain)
    assert allocator.match_prefix(chain) == []
    assert not allocator.is_writable(1)
    allocator.mark_computed([1])
    assert allocator.match_prefix(chain) == [1]
    allocator.mark_computed([2])
    assert allocator.match_prefix(chain) == [1, 2]


# Copy on write.


def test_copies_come_in_the_order_in_which_they_are_due(allocator):  # scenario 48
    one = allocator.allocate((), 2)
    forks = [allocator.fork(one) for _ in range(2)]
    for fork in forks:
        allocator.make_writable(fork, 0)
    allocator.make_writable(forks[0], 1)
    assert allocator.pending_copies == ((1, 3), (1, 4), (2, 5))
    allocator.drop_copies(2)
    assert allocator.pending_copies == ((2, 5),)


# The whole pool.


def test_reset_forgets_copies_that_were_not_made(allocator):
    """Their destinations may by then be written by others."""
    one = allocator.allocate((), 1)
    two = allocator.fork(one)
    allocator.make_writable(two, 0)
    one.free()
    two.free()
    allocator.reset_prefix_cache()
    assert allocator.pending_copies == ()


# Namespaces.


@pytest.mark.parametrize("how", ["commit", "immutable"])
def test_a_root_given_in_two_namespaces_shares_no_block_all_the_same(allocator, hashes, how):
    """A digest is of one namespace: whoever comes second has no hash, and hits nothing."""
    first = allocator.allocate(hashes(range(4)), 2, namespace=b"a")
    allocator.commit_many(first, 0, hashes(range(4)))
    assert allocator.match_prefix(hashes(range(4)), b"a") == first.block_ids
    assert allocator.match_prefix(hashes(range(4))) == allocator.match_prefix(hashes(range(4)), b"b") == []
    second = allocator.allocate(hashes(range(4)), 0 if how == "immutable" else 2, namespace=b"b")
    if how == "immutable":
        allocator.allocate_immutable(second, hashes(range(4)))
    else:
        allocator.commit_many(second, 0, hashes(range(4)))
    assert set(first.block_ids).isdisjoint(second.block_ids)
    assert [allocator.block_hash_of(block_id) for block_id in second.block_ids] == [None, None]
    allocator.check()


def test_a_refusal_in_a_namespace_says_nothing_of_what_others_hold(allocator):
    with allocator.allocate([], 9):
        allocation = allocator.allocate(namespace=b"a")
        with pytest.raises(OutOfBlocksError, match=r"^need 8 blocks: there are fewer; free what"):
            allocator.allocate_mutable(allocation, 8)
        with pytest.raises(OutOfBlocksError, match=r"^need 8 blocks: 7 free"):
            allocator.allocate([], 8)


@pytest.mark.parametrize("spoiled", ["block", "allocation"])
def test_check_sees_a_block_of_another_namespace(spoiled):
    allocator = PrefixCachingBlockAllocator(9, 2)
    allocation = allocator.allocate([], 2, namespace=b"a")
    allocator.check()
    if spoiled == "block":
        allocator._states.namespaces[allocation.block_ids[0]] = b"b"
    else:
        allocation.namespace = b"b"
    with pytest.raises(BlockStateError, match="namespace"):
        allocator.check()


def test_numbers_that_no_pool_or_allocation_can_have_are_refused(allocator):
    allocation = allocator.allocate((), 1)
    for wrong, said in (
        (lambda: allocator.allocate((), -1), "must be 0 or more"),
        (lambda: allocator.allocate_mutable(allocation, -1), "must be 0 or more"),
        (lambda: allocator.truncate(allocation, 2), "cannot keep 2 blocks; give 0 to 1"),
        (lambda: allocator.make_writable(allocation, 1), "there is no block 1"),
        (lambda: allocator.grow(5), "cannot shrink to 5 blocks; give at least 17"),
    ):
        with pytest.raises(CacheArgumentError, match=said):
            wrong()
    allocation.free()
    with pytest.raises(CacheArgumentError, match="num_blocks is 1"):
        allocator.reset_prefix_cache(num_blocks=1)
    assert allocator.num_blocks == 17


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 2), (0, 2), (-5, 2), (5, 0), (5, -1)])
def test_sizes_that_make_no_pool_are_refused(num_blocks, block_size):
    with pytest.raises(CacheArgumentError, match="at least"):
        PrefixCachingBlockAllocator(num_blocks, block_size)
