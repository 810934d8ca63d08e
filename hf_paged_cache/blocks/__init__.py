"""Tracks which tokens are held in which block. Integers only: refuses torch, transformers, clocks and I/O.

This folder is complete on its own, for a scheduler or an engine that runs its own forwards. The cache of this
package holds blocks by leases; tables, copies on write and all of `for_engines` are for engines.
"""

from .allocator import Allocation, PrefixCachingBlockAllocator, Resumption
from .block_table import BlockTable
from .groups import Group, Window, resumable, resumable_where
from .hashing import BlockHash, HashChain, root_hash
from .snapshots import Snapshots
from .window_blocks import Changing, WindowBlocks

__all__ = [
    "Allocation",
    "BlockHash",
    "BlockTable",
    "Changing",
    "Group",
    "HashChain",
    "PrefixCachingBlockAllocator",
    "Resumption",
    "Snapshots",
    "Window",
    "WindowBlocks",
    "resumable",
    "resumable_where",
    "root_hash",
]
