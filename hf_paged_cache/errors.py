"""Owns the errors of this package: every one of them is a `PagedCacheError`. Refuses to know any other module."""

from __future__ import annotations


class PagedCacheError(Exception):
    """Base of every error raised here on purpose; catch it to tell our refusals from a defect."""


class UnsupportedModelError(PagedCacheError):
    """Raised when a cache is built for a model or layer type that we cannot hold right; use `DynamicCache` for it."""


class OutOfBlocksError(PagedCacheError):
    """Raised before anything has changed when blocks run out; free tables, ask for less, or give the pool more blocks."""


class CacheBusyError(PagedCacheError):
    """Raised when a second call starts on a cache whose call is running; use another cache on the same store."""


class BlockStateError(PagedCacheError):
    """Raised when a block is not in the state that an operation needs, such as a double free; the caller has a defect."""


class CacheArgumentError(PagedCacheError, ValueError):
    """Raised when an argument is outside what its text allows; the message says what was given and what is allowed."""


class PoolArgumentError(PagedCacheError, ValueError):
    """Raised when the pool is given a tensor of the wrong shape or type, or asked for a layer it has not; the message says what was expected."""


class NotPortableError(PagedCacheError):
    """Raised when keys and values cannot leave their process: what they depend on has no name elsewhere, such as a hook."""


class SavedBlocksError(PagedCacheError):
    """Raised when a file of blocks is damaged, or not one of ours; the message names the file and what is wrong."""


class WorkersLostError(PagedCacheError):
    """Raised when workers of a batch job die again and again at one batch; what is done is kept."""


class ForwardMismatchError(PagedCacheError):
    """Raised when a forward writes other than was scheduled for it; run the model through its `__call__`."""
