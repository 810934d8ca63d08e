"""Requests that are given as numbers of their blocks, replayed through the allocator that the cache uses."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged_cache.blocks import BlockHash, PrefixCachingBlockAllocator


def replay_blocks(requests: Sequence[Sequence[int]], num_blocks: int, eviction: str) -> tuple[int, int]:
    """Blocks hit by all requests, and those that a pool twice as large would have hit, too, as the allocator estimates
    it.

    A number names a block and all before it.
    """
    allocator = PrefixCachingBlockAllocator(num_blocks + 1, 1, eviction)  # and the null block
    num_hits = 0
    for request in requests:
        hashes = [BlockHash(number.to_bytes(32, "little"), b"") for number in request]
        with allocator.allocate(hashes) as allocation:
            num_found = allocation.num_prefix_blocks
            allocator.allocate_mutable(allocation, len(hashes) - num_found)
            allocator.commit_many(allocation, num_found, hashes[num_found:])
        num_hits += num_found
    allocator.check()
    return num_hits, allocator.num_missed_blocks
