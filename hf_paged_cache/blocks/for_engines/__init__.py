"""Serves schedulers and engines that run their own forwards with what this package's cache does not use.

It keeps the same invariants. Tables that grow token by token, with lookahead slots and copies on write, are
`BlockTable`.
"""

from .allocator import EngineAllocator
from .ring import Ring
from .swapping import AllocStatus, BlockSwapper, SwapCopy

__all__ = ["AllocStatus", "BlockSwapper", "EngineAllocator", "Ring", "SwapCopy"]
