"""Serves schedulers and engines that run their own forwards with what this package's cache does not use.

Tables that grow token by token, with lookahead slots and copies on write, are `BlockTable`.
"""

from .ring import Ring
from .swapping import AllocStatus, BlockSwapper, SwapCopy

__all__ = ["AllocStatus", "BlockSwapper", "Ring", "SwapCopy"]
