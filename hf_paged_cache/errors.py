"""Owns the errors of this package: every one of them is a `PagedCacheError`."""


class PagedCacheError(Exception):
    """`PagedCacheError` is the base of every error raised here on purpose; catch it to tell our refusals from a defect.

    Examples:
        >>> try:
        ...     PagedPrefixCache("no model")
        ... except PagedCacheError as error:
        ...     print(type(error).__name__)
        UnsupportedModelError
    """


class UnsupportedModelError(PagedCacheError):
    """`UnsupportedModelError` is raised when a cache is built for a model that we cannot hold right.

    Use `DynamicCache` for such a model. `check_model` says why without raising.
    """


class OutOfBlocksError(PagedCacheError):
    """`OutOfBlocksError` is raised when blocks run out, before anything has changed.

    Free tables, ask for less, or give the pool more blocks. No `generate` raises it; `prefill` and `pin` may.
    """


class CacheBusyError(PagedCacheError):
    """`CacheBusyError` is raised when rows that run, or may resume, are in the way, such as of a reset."""


class BlockStateError(PagedCacheError):
    """`BlockStateError` is raised when a block is not in the state that is needed; the caller has a defect."""


class CacheArgumentError(PagedCacheError, ValueError):
    """`CacheArgumentError` is raised when an argument is not what is allowed; the message says what is.

    Examples:
        >>> PagedPrefixCache(model, num_blocks=8, max_bytes="4GB")
        Traceback (most recent call last):
        hf_paged_cache.errors.CacheArgumentError: give num_blocks or max_bytes, not both (got 8 and 4GB)
    """


class NotPortableError(PagedCacheError):
    """`NotPortableError` is raised when keys and values depend on what no other process knows, such as a hook."""


class SavedBlocksError(PagedCacheError):
    """`SavedBlocksError` is raised when a file of blocks is damaged, or is not one of ours."""


class ForwardMismatchError(PagedCacheError):
    """`ForwardMismatchError` is raised when a forward writes without being announced, or otherwise than announced.

    Run the model through its `__call__`: hooks do not run in `model.forward(...)`.
    """
