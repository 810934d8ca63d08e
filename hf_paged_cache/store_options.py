"""Reads what a store may be given besides its model, and refuses bad options before anything is loaded. No torch."""

import difflib
from os import PathLike, fspath
from typing import Any, NamedTuple, TypedDict, Unpack

from .blocks.arguments import int_of_at_least, num_bytes_of
from .errors import CacheArgumentError

_OF_CACHES = ("cache_salt", "capture")  # options of a cache alone


class StoreSizes(TypedDict, total=False):
    """`StoreSizes` names the options of a `PrefixStore`, as functions take them: `**sizes: Unpack[StoreSizes]`."""

    block_size: int
    num_blocks: int | None
    max_bytes: int | str | None
    host_bytes: int | str
    disk_folder: str | PathLike[str] | None
    disk_bytes: int | str | None
    trust_hooks: bool


class StoreOptions(NamedTuple):
    """`StoreOptions` holds the options of a store; those in bytes as numbers, once checked."""

    block_size: int = 16
    num_blocks: int | None = None
    max_bytes: int | None = None
    host_bytes: int = 0
    disk_folder: str | PathLike[str] | None = None
    disk_bytes: int | None = None
    trust_hooks: bool = False


def given_sizes(sizes: StoreSizes) -> dict[str, Any]:
    """Return the options that say something: None counts as left out, and so does no host memory.

    Raises:
        TypeError: no store has such an option.
    """
    for name in sizes:
        if name not in StoreOptions._fields:
            close = difflib.get_close_matches(name, [*StoreOptions._fields, *_OF_CACHES], 1)
            hint = f"did you mean {close[0]}? " if close and close[0] != name else ""
            raise TypeError(
                f"unexpected keyword argument {name!r}; {hint}a store takes {', '.join(StoreOptions._fields)}, and a "
                f"PagedPrefixCache also {', '.join(_OF_CACHES)}"
            )
    return {name: size for name, size in sizes.items() if size is not None and (name, size) != ("host_bytes", 0)}


def store_options(**sizes: Unpack[StoreSizes]) -> StoreOptions:
    """Read the options of a store.

    Raises:
        CacheArgumentError: an option is out of its range, or does not go with another.
    """
    options = StoreOptions(**given_sizes(sizes))  # bytes may be texts until they are read below
    int_of_at_least("block_size", options.block_size, 1, "tokens; 16 suits most models")
    num_blocks, max_bytes, disk_folder = options.num_blocks, options.max_bytes, options.disk_folder
    if num_blocks is not None and max_bytes is not None:
        raise CacheArgumentError(f"give num_blocks or max_bytes, not both (got {num_blocks} and {max_bytes})")
    if num_blocks is not None:
        int_of_at_least("num_blocks", num_blocks, 2, "blocks: one is reserved, and a call needs at least one")
    if disk_folder is not None and not (isinstance(disk_folder, str | PathLike) and fspath(disk_folder)):
        raise CacheArgumentError(f"disk_folder is {disk_folder!r}; give a folder's path")
    host_bytes = num_bytes_of("host_bytes", options.host_bytes, 0)
    max_bytes, disk_bytes = (
        None if given is None else num_bytes_of(name, given, 1)
        for name, given in (("max_bytes", max_bytes), ("disk_bytes", options.disk_bytes))
    )
    if not isinstance(options.trust_hooks, bool):
        raise CacheArgumentError(f"trust_hooks is {options.trust_hooks!r}; give True or False")
    if disk_folder is None and disk_bytes is not None:
        raise CacheArgumentError(
            f"disk_bytes is {options.disk_bytes} without disk_folder; say in which folder they are"
        )
    return options._replace(max_bytes=max_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes)
