"""Requests that are given as numbers of their blocks, replayed through the allocator that the cache uses."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged_cache.blocks import BlockHash, PrefixCachingBlockAllocator


def replay_blocks(requests: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """Blocks hit by each request.

    A number names a block and all before it.
    """
    allocator = PrefixCachingBlockAllocator(num_blocks + 1, 1)  # and the null block
    hits = []
    for request in requests:
        hashes = [BlockHash(number.to_bytes(32, "little"), b"") for number in request]
        with allocator.allocate(hashes) as allocation:
            num_found = allocation.num_prefix_blocks
            allocator.allocate_mutable(allocation, len(hashes) - num_found)
            allocator.commit_many(allocation, num_found, hashes[num_found:])
        hits.append(num_found)
    allocator.check()
    return hits
