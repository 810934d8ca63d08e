"""For a scheduler or an engine that runs its own forwards: what this package's cache does not use, held to the same invariants.

Blocks whose content comes later are `PrefixCachingBlockAllocator.allocate_immutable` and `mark_computed`; extra keys, lookahead
slots and `unseen_token_ids` are `BlockTable`'s.
"""

from .allocator import EngineAllocator
from .ring import Ring
from .swapping import AllocStatus, BlockSwapper, SwapCopy

__all__ = ["AllocStatus", "BlockSwapper", "EngineAllocator", "Ring", "SwapCopy"]
