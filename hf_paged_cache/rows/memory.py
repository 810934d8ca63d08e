"""Owns the tensors of one call's rows, and the copies between them, other rows and the pool's slabs.

A *stream* is the keys, the values or the index keys of one layer. Streams of one shape lie in one tensor. So one launch
copies a run of blocks, or lets rows change places, for all layers.

columns of a row: [0, pad) zeros | [pad, n) valid | [n, room) unspecified, finite
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..kv.block_pool import Slab
from ..kv.tensors import zeros

Stream: TypeAlias = tuple[int, str]  # layer index, "key", "value" or "indexer_key"
_Together: TypeAlias = tuple[Tensor, tuple[Stream, ...]]  # of rows or of the pool: a tensor, and its streams


class Streams(NamedTuple):
    """`Streams` holds streams of one shape in one tensor."""

    tensor: Tensor  # [S, R, H, room, D]
    names: tuple[Stream, ...]  # stream of each of S


class Columns(NamedTuple):
    """`Columns` names the columns `[start, stop)` of one row of this memory, as its tensors count them."""

    memory: Sequence[Streams]
    row: int
    start: int
    stop: int


class Shape(NamedTuple):
    """`Shape` describes streams of one shape, without rows."""

    names: tuple[Stream, ...]
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def shapes_of_slabs(slabs: Iterable[Slab]) -> list[Shape]:
    """Return the shapes of the streams that the pool holds."""
    return [Shape(names, held.shape[1], held.shape[4], held.dtype, held.device) for held, names in slabs]


def shapes_of_rows(memory: Iterable[Streams]) -> list[Shape]:
    """Return the shapes of the streams of rows."""
    return [Shape(names, held.shape[2], held.shape[4], held.dtype, held.device) for held, names in memory]


def make(shapes: Iterable[Shape], num_rows: int, room: int) -> list[Streams]:
    """Make memory for rows: zeros, which nobody has to write on a host."""
    return [
        Streams(zeros((len(names), num_rows, heads, room, head_dim), dtype, device), names)
        for names, heads, head_dim, dtype, device in shapes
    ]


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first id, number of ids) for each run of ids that follow one another.

    Examples:
        >>> list(runs([4, 5, 6, 2, 9, 10]))
        [(4, 3), (2, 1), (9, 2)]
    """
    start, num = 0, len(block_ids)
    for stop in range(1, num + 1):
        if stop == num or block_ids[stop] != block_ids[stop - 1] + 1:
            yield block_ids[start], stop - start
            start = stop


def load_blocks(
    memory: Sequence[Streams],
    slabs: Sequence[Slab],
    row: int,
    column: int,
    block_ids: Sequence[int],
    num_tokens: int,
    skipped: int = 0,
) -> None:
    """Copy the tokens `[skipped, num_tokens)` of blocks to the columns of a row, from column `column` on."""
    for to, held in _alike(memory, slabs):
        size, at, left, skip = held.shape[3], column, num_tokens, skipped
        for first, count in runs(block_ids):
            num = min(left, count * size)
            run = held[:, :, first : first + count].flatten(2, 3)[:, :, skip:num]
            to[:, row, :, at : at + num - skip].copy_(run)
            at, left, skip = at + num - skip, left - num, 0


def write_blocks(columns: Columns, slabs: Sequence[Slab], block_ids: Sequence[int]) -> None:
    """Copy columns into blocks, as many as the blocks hold."""
    for held, to in _alike(columns.memory, slabs):
        size, at = to.shape[3], columns.start
        for first, count in runs(block_ids):
            part = held[:, columns.row, :, at : at + count * size]
            to[:, :, first : first + count].copy_(part.reshape(*part.shape[:2], count, size, part.shape[3]))
            at += count * size


def copy_columns(columns: Columns, memory: Sequence[Streams], row: int, column: int) -> None:
    """Copy columns to a row of other memory, from its column `column` on, as far as each stream has them."""
    for held, to in _alike(columns.memory, memory):
        part = held[:, columns.row, :, columns.start : columns.stop]
        to[:, row, :, column : column + part.shape[2]].copy_(part)


def selected(memory: Iterable[Streams], index: Tensor, num_columns: int, room: int) -> list[Streams]:
    """Make memory in which row `i` has the first columns of row `index[i]`."""
    made = []
    for held, names in memory:
        shape = (held.shape[0], index.shape[0], held.shape[2], room, held.shape[4])
        new = zeros(shape, held.dtype, held.device)
        if num_columns:
            new[:, :, :, :num_columns] = held[:, :, :, :num_columns].index_select(1, index.to(held.device))
        made.append(Streams(new, names))
    return made


def change_places(memory: Iterable[Streams], index: Tensor, start: int, stop: int) -> None:
    """Give row `i` the columns `[start, stop)` of row `index[i]`."""
    for held, _ in memory:
        part = held[:, :, :, start:stop]
        part.copy_(part.index_select(1, index.to(held.device)))


def num_bytes(memory: Iterable[Streams], num_columns: int) -> int:
    """Return the bytes of the first columns."""
    return sum(held[:, :, :, :1].nbytes * min(num_columns, held.shape[3]) for held, _ in memory)


def _alike(left: Sequence[_Together], right: Sequence[_Together]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors that hold the same streams; each stream alone, where others lie with it on one side."""
    by_names = {names: tensor for tensor, names in right}
    apart: dict[Stream, Tensor] = {}
    for tensor, names in left:
        if names in by_names:
            yield tensor, by_names[names]
            continue
        apart = apart or {name: part for held, of in right for name, part in zip(of, torch.split(held, 1), strict=True)}
        for name, part in zip(names, torch.split(tensor, 1), strict=True):
            if name in apart:
                yield part, apart[name]
