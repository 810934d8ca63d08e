"""What a store may be given besides its model, as a user writes it: sizes, a folder, permissions. Read and refused before anything is loaded; no torch."""

from os import PathLike, fspath
from typing import Any, NamedTuple

from .blocks.arguments import file_mode, int_of_at_least, num_bytes_of
from .errors import CacheArgumentError

ATTENTIONS = ("contiguous", "gather")


class StoreOptions(NamedTuple):
    """Options of `PrefixStore`, in bytes and checked; see there."""

    block_size: int
    num_blocks: int | None
    max_bytes: int | None
    host_bytes: int
    disk_folder: str | PathLike[str] | None
    disk_bytes: int | None
    disk_mode: int


def store_options(
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    max_bytes: int | str | None = None,
    host_bytes: int | str = 0,
    disk_folder: str | PathLike[str] | None = None,
    disk_bytes: int | str | None = None,
    disk_mode: int | None = None,
) -> StoreOptions:
    """Read the options of a store.

    Raises:
        CacheArgumentError: naming the first that is out of its range, or does not go with another.
    """
    int_of_at_least("block_size", block_size, 1, "tokens; 16 suits most models")
    if num_blocks is not None and max_bytes is not None:
        raise CacheArgumentError(f"give num_blocks or max_bytes, not both (got {num_blocks} and {max_bytes})")
    if num_blocks is not None:
        int_of_at_least("num_blocks", num_blocks, 2, "blocks: one is reserved, and a call needs at least one")
    if disk_folder is not None and not (isinstance(disk_folder, str | PathLike) and fspath(disk_folder)):
        raise CacheArgumentError(f"disk_folder is {disk_folder!r}; give a folder's path")
    options = StoreOptions(
        block_size,
        num_blocks,
        None if max_bytes is None else num_bytes_of("max_bytes", max_bytes, 1),
        num_bytes_of("host_bytes", host_bytes, 0),
        disk_folder,
        None if disk_bytes is None else num_bytes_of("disk_bytes", disk_bytes, 1),
        file_mode("disk_mode", disk_mode),
    )
    if disk_folder is None and disk_bytes is not None:
        raise CacheArgumentError(f"disk_bytes is {disk_bytes} without disk_folder; say in which folder they are")
    if disk_folder is None and disk_mode is not None:
        raise CacheArgumentError(f"disk_mode is {disk_mode:#o} without disk_folder; say of which folder's files")
    return options


def require_attention(attention: Any) -> None:
    """Refuse a way to read keys and values that there is not."""
    if attention not in ATTENTIONS:
        raise CacheArgumentError(f"attention is {attention!r}; give {' or '.join(map(repr, ATTENTIONS))}")
