"""Owns the errors of this package: every one of them is a `PagedCacheError`."""


class PagedCacheError(Exception):
    """`PagedCacheError` is the base of every error that is raised here on purpose."""


class UnsupportedModelError(PagedCacheError):
    """`UnsupportedModelError` is raised for a model that cannot be held right; `DynamicCache` runs it."""


class OutOfBlocksError(PagedCacheError):
    """`OutOfBlocksError` is raised by `prefill`, `pin` or a block table when blocks run out; nothing has changed."""


class CacheBusyError(PagedCacheError):
    """`CacheBusyError` is raised when rows that run, or may resume, are in the way, such as of a reset."""


class BlockStateError(PagedCacheError):
    """`BlockStateError` is raised when a block is not in the state that is needed; the caller has a defect."""


class CacheArgumentError(PagedCacheError, ValueError):
    """`CacheArgumentError` is raised when an argument is not what is allowed; the message says what is."""


class NotPortableError(PagedCacheError):
    """`NotPortableError` is raised when keys and values depend on what no other process knows, such as a hook."""


class SavedBlocksError(PagedCacheError):
    """`SavedBlocksError` is raised when a file of blocks is damaged, or is not one of ours."""


class ForwardMismatchError(PagedCacheError):
    """`ForwardMismatchError` is raised when a forward writes without being announced, or otherwise than announced.

    Run the model through its `__call__`: hooks do not run in `model.forward(...)`.
    """
