"""The slots of a ring of blocks, and how it ends."""

from __future__ import annotations

import pytest

from hf_paged_cache.errors import CacheArgumentError


def test_the_slots_of_a_window_run_round_its_blocks_one_for_each_token(make_allocator):
    allocator = make_allocator(num_blocks=9, block_size=4)
    allocation = allocator.allocate(num_tokens=11, window=6)
    assert allocation.block_ids == [1, 2]
    assert allocation.slots(0, 11) == [4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6]
    assert (allocation.num_slots, allocation.num_tokens, allocation.window) == (8, 11, 6)
    assert repr(allocation) == "Ring(num_blocks=2, num_tokens=11, window=6)"


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_the_tokens_of_a_window_lie_in_slots_of_their_own(make_allocator, block_size, window):
    allocator = make_allocator(num_blocks=20, block_size=block_size)
    allocator.allocate((), 2).free()  # the blocks are handed out in another order
    for num_tokens in range(3 * window + 2):
        with allocator.allocate(num_tokens=num_tokens, window=window) as allocation:
            assert len(allocation.block_ids) == -(-min(num_tokens, window) // block_size)
            slots = allocation.slots(0, num_tokens)
            assert len(slots) == num_tokens
            assert {slot // block_size for slot in slots} == set(allocation.block_ids)
            written = {}  # slot -> position
            for position, slot in enumerate(slots):
                written[slot] = position
                seen = range(max(0, position + 1 - window), position + 1)
                assert [written[slots[each]] for each in seen] == list(seen)
            for start in range(num_tokens + 1):
                for stop in range(start, num_tokens + 1):
                    assert allocation.slots(start, stop) == slots[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 8), (8, 8)])
def test_positions_beyond_the_tokens_of_a_window_have_no_slot(allocator, start, stop):
    allocation = allocator.allocate(num_tokens=7, window=3)
    with pytest.raises(CacheArgumentError, match=r"no slots for positions .*; there are 7"):
        allocation.slots(start, stop)


def test_a_freed_window_has_no_slots(allocator):
    allocation = allocator.allocate(num_tokens=7, window=3)
    allocation.free()
    assert allocation.slots(0, 0) == []
    with pytest.raises(CacheArgumentError, match=r"no slots for positions \[0, 1\); there are 0"):
        allocation.slots(0, 1)
