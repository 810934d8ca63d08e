"""Owns which tokens are held in which block. Integers only: refuses torch, transformers, clocks and I/O.

Complete on its own, for a scheduler or an engine that runs its own forwards. What these need and this package's cache does not
use is in `engine`, but for extra keys of hashes, and `allocate` with its lookahead slots and `unseen_token_ids` of a `BlockTable`.
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
