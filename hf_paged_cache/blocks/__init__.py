"""Owns which tokens are held in which block. Integers only: refuses torch, transformers, clocks and I/O.

Complete on its own, for a scheduler or an engine that runs its own forwards. The cache of this package
holds blocks by leases, and uses tables for pins and to look up alone: a table that grows, and is written and copied token by token, is an
engine's, as is all of `for_engines`.
"""

from .allocation import Allocation
from .allocator import PrefixCachingBlockAllocator
from .block_table import BlockTable
from .free_queue import FreeBlockQueue
from .groups import Group, resumable, resumable_where
from .hashing import BlockHash, HashChain, root_hash
from .metrics import PrefixCacheMetrics
from .prefix_index import PrefixIndex
from .sight import Sight, Window
from .snapshots import Snapshots
from .window_blocks import WindowBlocks

__all__ = [
    "Allocation",
    "BlockHash",
    "BlockTable",
    "FreeBlockQueue",
    "Group",
    "HashChain",
    "PrefixCacheMetrics",
    "PrefixCachingBlockAllocator",
    "PrefixIndex",
    "Sight",
    "Snapshots",
    "Window",
    "WindowBlocks",
    "resumable",
    "resumable_where",
    "root_hash",
]
