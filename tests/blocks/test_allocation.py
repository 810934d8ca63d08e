"""One holder of blocks, and how it ends."""

from __future__ import annotations

import copy
import pickle

import pytest

from hf_paged_cache.errors import BlockStateError, CacheArgumentError


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
