"""Who holds what: collection, repair, and what `check` notices."""

import pytest

from hf_paged_cache.blocks import Allocation
from hf_paged_cache.errors import BlockStateError, CacheArgumentError

from .snapshot import snapshot_of


def test_collection_itself_changes_nothing_until_the_next_operation(allocator):
    allocation = allocator.allocate((), 3)
    states = allocator._states
    del allocation
    assert states.ref_counts[1] == 1  # noted in a deque by C code; no Python of ours ran
    assert len(allocator.collected) == 1
    allocator.check()
    assert states.ref_counts[1] == 0


def test_an_allocation_collected_before_it_was_registered_is_nothing(allocator):
    Allocation(allocator, [1, 2], 0, b"")
    allocator.check()
    assert len(allocator.collected) == 0


def test_a_freed_allocation_is_not_taken_back_again_when_collected(allocator):
    allocation = allocator.allocate((), 2)
    allocation.free()
    other = allocator.allocate((), 2)
    del allocation
    allocator.check()
    assert {allocator.ref_count(block_id) for block_id in other.block_ids} == {1}


def test_only_a_block_with_one_holder_and_no_hash_is_writable(allocator, hashes):
    one, two = allocator.allocate((), 1), allocator.allocate((), 1)
    forked = allocator.fork(two)
    assert allocator.is_writable(1)
    assert not allocator.is_writable(2)  # shared
    assert not allocator.is_writable(3)  # free
    assert not allocator.is_writable(0)  # the null block
    del forked  # noted only; asking takes it back
    assert allocator.is_writable(2)
    allocator.commit_many(one, 0, hashes([1, 2]))
    assert not allocator.is_writable(1)


@pytest.mark.parametrize("block_id", [0, -1, 17])
def test_what_is_no_block_cannot_be_asked_about(allocator, block_id):
    for ask in (allocator.ref_count, allocator.block_hash_of):
        with pytest.raises(CacheArgumentError, match="blocks are 1 to 16"):
            ask(block_id)


DAMAGE = {
    "counts": lambda it: it._states.ref_counts.__setitem__(1, 2),
    "a block twice": lambda it: next(iter(it._held.values())).append(1),
    "no block": lambda it: next(iter(it._held.values())).append(0),
    "lost": lambda it: it._states.free.pop(),
    "free with a hash": lambda it: it._states.free.append(it._states.once.popitem()[0]),
    "used again": lambda it: it._states._reused.update(it._states.once),
    "order": lambda it: it._states.once.move_to_end(next(iter(it._states.once))),
    "not found": lambda it: it._states.blocks.popitem(),
    "no hash": lambda it: it._states.hashes.__setitem__(2, None),
    "uncomputed": lambda it: it._states.uncomputed.add(2),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_check_notices_damage_and_prints_the_whole_state(make_allocator, hashes, what):
    allocator = make_allocator()
    _allocation = allocator.allocate((), 1)
    cached = allocator.allocate((), 2)
    allocator.commit_many(cached, 0, hashes(range(4)))
    cached.free()
    allocator.check()
    DAMAGE[what](allocator)
    with pytest.raises(BlockStateError) as caught:
        allocator.check()
    for part in ("allocations: [[1", "'ref_counts': [", "'free': [", "'hashes': [", "'uncomputed': "):
        assert part in str(caught.value)
    assert "token_bytes" not in str(caught.value)
    allocator._dirty = True  # any operation that finds the mark derives the state again ...
    if what not in ("a block twice", "no block"):  # ... from the lists, which are the truth
        allocator.check()
    allocator._held.clear()
    allocator._dirty = True


def test_repair_keeps_the_order_of_eviction(allocator, cache_sequence):
    cache_sequence(range(6))
    cache_sequence([7, 7, 8, 8])
    _held = allocator.allocate((), 2)
    singles = [allocator.allocate((), 1) for _ in range(5)]
    for index in (3, 0, 4, 1, 2):
        singles[index].free()
    before = snapshot_of(allocator)
    allocator._dirty = True
    after = snapshot_of(allocator)
    assert after == before
