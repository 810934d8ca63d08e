"""What an engine asks of an allocator beyond what the cache does: rings, blocks touched by hand, what a batch reads once."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.for_engines import EngineAllocator
from hf_paged_cache.errors import BlockStateError, CacheArgumentError, OutOfBlocksError


def queue_of(allocator):
    return allocator.snapshot()[1]


def test_a_touched_block_is_evicted_last(allocator, cache_sequence):  # scenario 43
    assert cache_sequence(range(6)) == [1, 2, 3]
    allocator.mark_accessed([3])
    assert queue_of(allocator)[-3:] == [2, 1, 3]
    allocator.mark_accessed([2, 1])
    assert queue_of(allocator)[-3:] == [3, 2, 1]


def test_touching_a_block_in_use_changes_nothing_and_a_free_one_is_refused(allocator):
    allocation = allocator.allocate((), 1)
    before = allocator.snapshot()
    allocator.mark_accessed(allocation.block_ids)
    with pytest.raises(BlockStateError, match="block 2 is free"):
        allocator.mark_accessed([1, 2])
    with pytest.raises(CacheArgumentError, match="block 0 given; blocks are 1 to 16"):
        allocator.mark_accessed([0])
    assert allocator.snapshot() == before


def test_common_computed_blocks_are_the_leading_ones_that_all_hold(allocator, hashes):
    one = allocator.allocate((), 4)
    allocator.commit_many(one, 0, hashes(range(6)))
    two = allocator.allocate(hashes(range(4)), 1)
    assert allocator.get_common_computed_block_ids([one, two]) == [1, 2]
    assert allocator.get_common_computed_block_ids([one]) == [1, 2, 3]
    assert allocator.get_common_computed_block_ids([]) == []
    three = allocator.allocate(hashes(range(2)), 1)
    assert allocator.get_common_computed_block_ids([one, two, three]) == [1]
    awaiting = allocator.allocate()
    allocator.allocate_immutable(awaiting, hashes([7, 7]))
    assert allocator.get_common_computed_block_ids([awaiting]) == []


# Rings.


@pytest.mark.parametrize(
    ("num_tokens", "window", "num_blocks"),
    [(0, 5, 0), (1, 5, 1), (4, 5, 2), (5, 5, 3), (1000, 5, 3), (1000, 1, 1), (1000, 32, 16), (31, 10**9, 16)],
)
def test_a_window_takes_the_blocks_of_the_tokens_seen_at_once(allocator, num_tokens, window, num_blocks):
    allocation = allocator.allocate(num_tokens=num_tokens, window=window, namespace=b"a")
    assert len(allocation.block_ids) == num_blocks == allocator.num_blocks_in_use_of(b"a")
    assert allocation.num_prefix_blocks == 0


def test_a_window_without_blocks_is_refused_and_changes_nothing(make_allocator, hashes):
    allocator = make_allocator(num_blocks=6)
    chain = hashes(range(4))
    with allocator.allocate((), 2) as cached:
        allocator.commit_many(cached, 0, chain)
    held = allocator.allocate((), 1)
    before = allocator.snapshot()
    with pytest.raises(OutOfBlocksError, match=r"need 5 blocks: 2 free \+ 2 cached of 5; free what"):
        allocator.allocate(num_tokens=100, window=10)
    assert allocator.snapshot() == before
    evicting = allocator.allocate(num_tokens=100, window=8)
    assert (allocator.num_evictions, allocator.match_prefix(chain)) == (2, [])
    held.free()
    evicting.free()
    assert allocator.num_free_blocks == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_tokens": 4},
            r"window is None; it must be an int, 1 or more \(tokens that a layer sees, given with num_t",
        ),
        ({"window": 4}, r"num_tokens is None; it must be an int, 0 or more \(positions in all, given with window\)"),
        ({"num_tokens": 4, "window": 0}, "window is 0; it must be an int, 1 or more"),
        ({"num_tokens": 4, "window": -1}, "window is -1; it must be an int, 1 or more"),
        ({"num_tokens": 4, "window": 2.0}, "window is 2.0; it must be an int, 1 or more"),
        ({"num_tokens": 4, "window": "2"}, "window is '2'; it must be an int"),
        ({"num_tokens": 4, "window": True}, "window is True; it must be an int"),
        ({"num_tokens": -1, "window": 2}, "num_tokens is -1; it must be an int, 0 or more"),
        ({"num_tokens": 4.0, "window": 2}, "num_tokens is 4.0; it must be an int"),
        ({"num_tokens": 4, "window": 2, "num_blocks": 0}, "num_blocks is given beside a window"),
        ({"num_tokens": 4, "window": 2, "num_mutable_blocks": 1}, "num_blocks is given beside a window"),
        ({"num_tokens": 4, "window": 2, "block_hashes": "a hash"}, "never hashed"),
        ({"num_tokens": 4, "window": 2, "block_hashes": iter(())}, "never hashed"),
    ],
)
def test_a_window_that_makes_no_ring_is_refused(allocator, hashes, given, message):
    if given.get("block_hashes") == "a hash":
        given = given | {"block_hashes": hashes(range(4))}
    before = allocator.snapshot()
    with pytest.raises(CacheArgumentError, match=message):
        allocator.allocate(**given)
    assert allocator.snapshot() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda allocator, ring, chain: allocator.commit(ring, 0, chain[0]),
        lambda allocator, ring, chain: allocator.commit_many(ring, 0, chain),
        lambda allocator, ring, chain: allocator.commit_many(ring, 0, ()),
        lambda allocator, ring, chain: allocator.allocate_immutable(ring, chain),
        lambda allocator, ring, chain: allocator.allocate_mutable(ring, 1),
        lambda allocator, ring, chain: allocator.truncate(ring, 1),
        lambda allocator, ring, chain: allocator.fork(ring, 1),
    ],
    ids=["commit", "commit_many", "commit_none", "allocate_immutable", "allocate_mutable", "truncate", "fork_some"],
)
def test_nothing_hashes_adds_or_cuts_blocks_of_a_window(allocator, hashes, change):
    ring = allocator.allocate(num_tokens=9, window=4)
    before = allocator.snapshot()
    with pytest.raises(CacheArgumentError, match=r"num_tokens=9, window=4\) is a ring; it keeps its length"):
        change(allocator, ring, hashes(range(4)))
    assert allocator.snapshot() == before
    ring.free()
    with pytest.raises(BlockStateError, match="it was freed"):
        change(allocator, ring, hashes(range(4)))


def test_a_window_is_forked_as_a_whole_and_copied_on_write(allocator):
    ring = allocator.allocate(num_tokens=9, window=4)
    forked = allocator.fork(ring)
    assert (forked.block_ids, forked.num_tokens, forked.window) == ([1, 2], 9, 4)
    allocator.make_writable(forked, 1)
    assert (forked.block_ids, ring.block_ids, allocator.take_copies()) == ([1, 3], [1, 2], [(2, 3)])
    assert ring.slots(0, 9) == [2, 3, 4, 5, 2, 3, 4, 5, 2]
    assert forked.slots(0, 9) == [2, 3, 6, 7, 2, 3, 6, 7, 2]


@pytest.mark.parametrize("spoiled", ["hash", "blocks"])
def test_check_sees_a_hash_in_a_window_and_a_ring_of_another_length(hashes, spoiled):
    allocator = EngineAllocator(9, 2)
    ring = allocator.allocate(num_tokens=9, window=4)
    allocator.check()
    if spoiled == "hash":
        allocator._states.index.insert(ring.block_ids[0], hashes(range(2))[0], computed=True)
    else:
        ring.window = 5
    with pytest.raises(BlockStateError, match=r"must hold . blocks without a hash: \[1, 2\]"):
        allocator.check()
