"""Reads what a store may be given besides its model, as a user writes it: sizes, a folder, permissions.

Refuses bad options before anything is loaded. No torch.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from os import PathLike, fspath
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

from .blocks.arguments import check_eviction, file_mode, int_of_at_least, num_bytes_of
from .errors import CacheArgumentError

_OF_CACHES = ("cache_salt", "capture")  # options of a cache alone
_GONE = {  # option that is gone -> what to do instead
    "attention": "each call has its own keys and values now, and what rows share is read once; leave it out",
    "on_full": "no call is refused for want of blocks: what does not fit is not kept; leave it out",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class StoreSizes(TypedDict, total=False):
    """`StoreSizes` names the options of a store, as they are given; see `PrefixStore`.

    A function that takes these options has `**sizes: Unpack[StoreSizes]`.
    """

    block_size: int
    num_blocks: int | None
    max_bytes: int | str | None
    host_bytes: int | str
    disk_folder: str | PathLike[str] | None
    disk_bytes: int | str | None
    disk_mode: int | None
    eviction: str
    trust_hooks: bool


_DEFAULTS: StoreSizes = {
    "block_size": 16,
    "num_blocks": None,
    "max_bytes": None,
    "host_bytes": 0,
    "disk_folder": None,
    "disk_bytes": None,
    "disk_mode": None,
    "eviction": "reuse",
    "trust_hooks": False,
}


class StoreOptions(NamedTuple):
    """`StoreOptions` holds the options of a store, in bytes and checked."""

    block_size: int
    num_blocks: int | None
    max_bytes: int | None
    host_bytes: int
    disk_folder: str | PathLike[str] | None
    disk_bytes: int | None
    disk_mode: int
    eviction: str
    trust_hooks: bool


def shows_store_options(function: _Function) -> _Function:
    """Let the signature of a function that takes `**sizes` show each option.

    So `help`, notebooks, and whoever inspects the function see the options.
    """
    signature, hints = inspect.signature(function), StoreSizes.__annotations__
    sizes = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in _DEFAULTS.items()
    ]
    others = [parameter for name, parameter in signature.parameters.items() if name != "sizes"]
    at = next((i for i, each in enumerate(others) if each.kind is inspect.Parameter.VAR_KEYWORD), len(others))
    shown = signature.replace(parameters=[*others[:at], *sizes, *others[at:]])
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function


def given_sizes(sizes: StoreSizes) -> dict[str, Any]:
    """Return the options that say something: None counts as left out, and so does no host memory.

    Raises:
        TypeError: an option that no store has, or has no more; the message names it.
    """
    require_not_gone(sizes)
    for name in sizes:
        if name not in _DEFAULTS:
            close = difflib.get_close_matches(name, [*_DEFAULTS, *_OF_CACHES], 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TypeError(
                f"unexpected keyword argument {name!r}; {hint}a store takes {', '.join(_DEFAULTS)}, and a PagedPrefixCache also "
                f"{', '.join(_OF_CACHES)}"
            )
    return {name: size for name, size in sizes.items() if size is not None and (name, size) != ("host_bytes", 0)}


def require_not_gone(given: Iterable[str]) -> None:
    """Refuse options that are gone by name, and say what to do instead.

    Raises:
        TypeError: an option is gone; the message names the first.
    """
    for name in given:
        if name in _GONE:
            raise TypeError(f"{name} is an option no more: {_GONE[name]}")


@shows_store_options
def store_options(**sizes: Unpack[StoreSizes]) -> StoreOptions:
    """Read and check the options of a store.

    Raises:
        CacheArgumentError: an option is out of its range, or does not go with another; the message names the first such
            option.
    """
    given: Any = {**_DEFAULTS, **given_sizes(sizes)}
    num_blocks, max_bytes, disk_folder = given["num_blocks"], given["max_bytes"], given["disk_folder"]
    disk_bytes, disk_mode = given["disk_bytes"], given["disk_mode"]
    check_eviction(given["eviction"])
    int_of_at_least("block_size", given["block_size"], 1, "tokens; 16 suits most models")
    if num_blocks is not None and max_bytes is not None:
        raise CacheArgumentError(f"give num_blocks or max_bytes, not both (got {num_blocks} and {max_bytes})")
    if num_blocks is not None:
        int_of_at_least("num_blocks", num_blocks, 2, "blocks: one is reserved, and a call needs at least one")
    if disk_folder is not None and not (isinstance(disk_folder, str | PathLike) and fspath(disk_folder)):
        raise CacheArgumentError(f"disk_folder is {disk_folder!r}; give a folder's path")
    options = StoreOptions(
        given["block_size"],
        num_blocks,
        None if max_bytes is None else num_bytes_of("max_bytes", max_bytes, 1),
        num_bytes_of("host_bytes", given["host_bytes"], 0),
        disk_folder,
        None if disk_bytes is None else num_bytes_of("disk_bytes", disk_bytes, 1),
        file_mode("disk_mode", disk_mode),
        given["eviction"],
        given["trust_hooks"],
    )
    if not isinstance(options.trust_hooks, bool):
        raise CacheArgumentError(f"trust_hooks is {options.trust_hooks!r}; give True or False")
    if disk_folder is None and disk_bytes is not None:
        raise CacheArgumentError(f"disk_bytes is {disk_bytes} without disk_folder; say in which folder they are")
    if disk_folder is None and disk_mode is not None:
        raise CacheArgumentError(f"disk_mode is {disk_mode:#o} without disk_folder; say of which folder's files")
    return options
