"""Owns where in the pool the tokens of a forward lie: slots that are written; slots, or whole blocks, that are read.

slot = block_id * block_size + offset in the block. Columns are counted from the left, padding included: column `pad + i`
of a row holds its token `i`. Values are trusted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..errors import PoolArgumentError


class RowLayout(NamedTuple):
    """What a reader must know of one running row."""

    root: bytes
    pad: int  # columns of left padding
    token_ids: TokenIds  # all of the row, the scheduled forward's included
    block_ids: Sequence[int]  # logical block index -> block id


class SlotMapping:
    """The slots that a forward writes: `slots[i]` takes its token `sources[i]`.

    Tokens are counted row by row, `row * num_new_columns + column`; `sources` None: all of them, in order. A token that
    is not among the sources is not written: left padding, and what a row computes again because another row needs it.
    Index tensors are made once for each device and number of heads, and used by every such layer.
    """

    __slots__ = ("_index", "_sources", "end_slot", "first_slot", "num_slots", "slots", "sources")

    def __init__(self, slots: Sequence[int], sources: Sequence[int] | None = None) -> None:
        self.slots = slots
        self.sources = sources
        self.num_slots = len(slots)
        self.end_slot = 1 + max(slots, default=-1)
        self.first_slot = _start_of_run(slots)  # None: the slots do not lie side by side
        self._index: dict[tuple[int, int, torch.device], Tensor] = {}  # heads, block size, device -> see `index_for`
        self._sources: dict[torch.device, Tensor] = {}

    def index_for(self, num_heads: int, block_size: int, device: torch.device) -> Tensor:
        """[num_slots * H] int64 on `device`: the vectors of a layer's tensor that are written, see `vectors_of`."""
        found = self._index.get((num_heads, block_size, device))
        if found is None:
            slots = torch.tensor(self.slots, dtype=torch.int64, device=device)
            found = vectors_of(slots[:, None], torch.arange(num_heads, device=device), num_heads, block_size).flatten()
            self._index[num_heads, block_size, device] = found
        return found

    def sources_on(self, device: torch.device) -> Tensor | None:
        """`sources` as an int64 tensor on `device`."""
        if self.sources is None:
            return None
        found = self._sources.get(device)
        if found is None:
            found = self._sources[device] = torch.tensor(self.sources, dtype=torch.int64, device=device)
        return found


class ReadSource:
    """The slots that a read takes: C columns of each of R rows, slot by slot or, `of_blocks`, in whole blocks.

    Args:
        slots: [R, C] int64.
    """

    __slots__ = ("_index", "by_block", "ids", "num_columns", "num_rows", "skipped")

    def __init__(self, slots: Tensor) -> None:
        if slots.dim() != 2 or slots.dtype != torch.int64:
            raise PoolArgumentError(f"slots, or blocks, must be a 2-D int64 tensor, got {slots.dim()}-D {slots.dtype}")
        self.ids = slots  # slots, or by block: block ids
        self.by_block = False
        self.num_rows, self.num_columns = slots.shape
        self.skipped = 0  # slots of a row's first block before its first column
        self._index: dict[tuple[int, int, torch.device], Tensor] = {}

    @classmethod
    def of_blocks(cls, block_ids: Tensor, num_columns: int, skipped: int = 0) -> "ReadSource":
        """Of each row's consecutive blocks, [R, N] int64: all slots but the first `skipped`, up to `num_columns`."""
        source = cls(block_ids)
        source.by_block, source.num_columns, source.skipped = True, num_columns, skipped
        return source

    def num_slots(self, block_size: int) -> int:
        """Slots of a row that are copied; by block, more than it has columns."""
        return self.ids.shape[1] * (block_size if self.by_block else 1)

    def index_for(self, num_heads: int, block_size: int, device: torch.device) -> Tensor:
        """[R * H * C] int64 on `device`: the vectors of a layer's tensor that are read, see `vectors_of`.

        By block [R * H * N]: the runs of block_size vectors.
        """
        found = self._index.get((num_heads, block_size, device))
        if found is None:
            ids, heads = self.ids.to(device)[:, None], torch.arange(num_heads, device=device)[:, None]
            index = ids * num_heads + heads if self.by_block else vectors_of(ids, heads, num_heads, block_size)
            found = self._index[num_heads, block_size, device] = index.flatten()
        return found


def read_source(rows: Sequence[RowLayout], start: int, stop: int, block_size: int) -> ReadSource:
    """The columns `[start, stop)` of each row; by block where blocks begin at the same columns in all rows."""
    offset = rows[0].pad % block_size
    if any(row.pad % block_size != offset for row in rows):
        return ReadSource(slot_matrix(rows, stop, block_size)[:, start:])
    first, end = (start - offset) // block_size, -((offset - stop) // block_size)  # counted from column `offset`
    blocks = [[*[0] * (1 + row.pad // block_size), *row.block_ids][first + 1 : end + 1] for row in rows]
    skipped = start - offset - first * block_size
    return ReadSource.of_blocks(torch.tensor(blocks, dtype=torch.int64), stop - start, skipped)


def vectors_of(slots: Tensor, heads: Tensor, num_heads: int, block_size: int) -> Tensor:
    """Where a slot's vector of a head lies in a layer's tensor [num_blocks * H * block_size, D]."""
    return (slots // block_size * num_heads + heads) * block_size + slots % block_size


def slot_matrix(rows: Sequence[RowLayout], stop: int, block_size: int) -> Tensor:
    """[R, stop] int64: the slot of each column of each row; padding reads the null block."""
    num_blocks = max(1, max(len(row.block_ids) for row in rows))
    blocks = torch.tensor([[*row.block_ids, *[0] * (num_blocks - len(row.block_ids))] for row in rows])
    positions = torch.arange(stop)[None, :] - torch.tensor([[row.pad] for row in rows])
    is_token = positions >= 0
    positions = positions.clamp_(min=0)
    slots = blocks.gather(1, positions // block_size) * block_size + positions % block_size
    return slots * is_token


def _start_of_run(slots: Sequence[int]) -> int | None:
    """The first slot if `slots` count up by one, else None."""
    if not slots or slots[-1] - slots[0] != len(slots) - 1:
        return None
    return slots[0] if all(slot == slots[0] + i for i, slot in enumerate(slots)) else None
