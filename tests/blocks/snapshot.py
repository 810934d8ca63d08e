"""What an allocator is like, as a value."""

from hf_paged_cache.blocks import PrefixCachingBlockAllocator


def snapshot_of(allocator: PrefixCachingBlockAllocator) -> tuple[object, ...]:
    """A value that is equal while nothing has changed: first ref counts, then the queue in the order of eviction."""
    allocator._settle()
    states = allocator._states
    lists = [list(block_ids) for block_ids in allocator._held.values()]
    queue = [*reversed(states.free), *states.once, *states.again]
    return (states.ref_counts[:], queue, allocator.num_evictions, states.hashes[:], set(states.uncomputed), lists)
