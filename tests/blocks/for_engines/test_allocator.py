"""What an engine asks of an allocator beyond what the cache does: rings, blocks touched by hand, what a batch reads once."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.for_engines import EngineAllocator
from hf_paged_cache.errors import BlockStateError, CacheArgumentError


def queue_of(allocator):
    return allocator.snapshot()[1]


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
