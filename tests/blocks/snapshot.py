"""What an allocator is like, as a value."""

from __future__ import annotations

from hf_paged_cache.blocks import PrefixCachingBlockAllocator


def snapshot_of(allocator: PrefixCachingBlockAllocator) -> tuple[object, ...]:
    """A value that is equal while nothing has changed: first ref counts, then the queue in the order of eviction."""
    allocator._settle()
    states, index = allocator._states, allocator._states.index
    times = [time if index.digests[block_id] else 0 for block_id, time in enumerate(states.last_access)]
    hashes = [index.hash_of(block_id) for block_id in range(states.num_blocks)]
    lists = [list(block_ids) for block_ids in allocator._held.values()]
    counts, queue = states.ref_counts[:], list(states.queue)
    return counts, queue, times, allocator.num_evictions, hashes, set(index.uncomputed), lists
