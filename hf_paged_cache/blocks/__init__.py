"""Owns which tokens are held in which block. Integers only: refuses torch, transformers, clocks and I/O."""

from hf_paged_cache.blocks.allocation import Allocation
from hf_paged_cache.blocks.allocator import PrefixCachingBlockAllocator
from hf_paged_cache.blocks.block_table import BlockTable
from hf_paged_cache.blocks.free_queue import FreeBlockQueue
from hf_paged_cache.blocks.hashing import BlockHash, HashChain, root_hash
from hf_paged_cache.blocks.metrics import PrefixCacheMetrics
from hf_paged_cache.blocks.prefix_index import PrefixIndex

__all__ = [
    "Allocation",
    "BlockHash",
    "BlockTable",
    "FreeBlockQueue",
    "HashChain",
    "PrefixCacheMetrics",
    "PrefixCachingBlockAllocator",
    "PrefixIndex",
    "root_hash",
]
