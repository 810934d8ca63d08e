"""What an engine asks of an allocator beyond what the cache does: blocks touched by hand."""

from __future__ import annotations

import pytest

from hf_paged_cache.errors import BlockStateError, CacheArgumentError

from ..snapshot import snapshot_of


def test_touching_a_block_in_use_changes_nothing_and_a_free_one_is_refused(allocator):
    allocation = allocator.allocate((), 1)
    before = snapshot_of(allocator)
    allocator.mark_accessed(allocation.block_ids)
    with pytest.raises(BlockStateError, match="block 2 is free"):
        allocator.mark_accessed([1, 2])
    with pytest.raises(CacheArgumentError, match="block 0 given; blocks are 1 to 16"):
        allocator.mark_accessed([0])
    assert snapshot_of(allocator) == before
