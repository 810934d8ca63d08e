"""Tracks which tokens are held in which block. Integers only: refuses torch, transformers, clocks and I/O.

This folder is complete on its own, for a scheduler or an engine that runs its own forwards. The cache of this
package holds blocks by leases; tables, copies on write and all of `for_engines` are for engines.
"""

from .allocator import Allocation, PrefixCachingBlockAllocator, Resumption
from .block_table import BlockTable
from .groups import Changing, Group, Snapshots, Window, WindowBlocks, resumable, resumable_where
from .hashing import (
    OF_WEIGHTS,
    TOKEN_BYTES,
    BlockHash,
    HashChain,
    RootFacts,
    Roots,
    TokenIds,
    common_prefix_length,
    digest_behind,
    root_hash,
)

__all__ = ["Allocation", "BlockTable", "PrefixCachingBlockAllocator", "Resumption"]
__all__ += ["Changing", "Group", "Snapshots", "Window", "WindowBlocks", "resumable", "resumable_where"]
__all__ += ["OF_WEIGHTS", "TOKEN_BYTES", "BlockHash", "HashChain", "RootFacts", "Roots", "TokenIds"]
__all__ += ["common_prefix_length", "digest_behind", "root_hash"]
