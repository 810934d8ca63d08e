"""Owns which tokens are held in which block. Integers only: refuses torch, transformers, clocks and I/O.

Complete on its own, for a scheduler or an engine that runs its own forwards. This package's cache does not use
`allocate_immutable` and `mark_computed` (blocks whose content comes later), `get_common_computed_block_ids` (what a
batch can read once), `mark_accessed`, `forget_cached_blocks`, extra keys, `BlockTable.allocate` with its lookahead
slots, `BlockTable.unseen_token_ids`, `allocate` with a window (a ring of blocks), and `BlockSwapper`; they are held to
the same invariants and tests.
"""

from .allocation import Allocation
from .allocator import PrefixCachingBlockAllocator
from .block_table import BlockTable
from .free_queue import FreeBlockQueue
from .hashing import BlockHash, HashChain, root_hash
from .metrics import PrefixCacheMetrics
from .prefix_index import PrefixIndex
from .snapshots import Snapshots
from .swapping import AllocStatus, BlockSwapper, SwapCopy
from .window_blocks import WindowBlocks
from .windowed_table import WindowedTable

__all__ = [
    "AllocStatus",
    "Allocation",
    "BlockSwapper",
    "BlockHash",
    "BlockTable",
    "FreeBlockQueue",
    "HashChain",
    "PrefixCacheMetrics",
    "PrefixCachingBlockAllocator",
    "PrefixIndex",
    "Snapshots",
    "SwapCopy",
    "WindowBlocks",
    "WindowedTable",
    "root_hash",
]
