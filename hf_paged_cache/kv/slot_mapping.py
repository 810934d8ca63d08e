"""Owns where in the pool the tokens of a forward lie: slots that are written; slots, or whole blocks, that are read.

slot = block_id * block_size + offset in the block. Columns are counted from the left, padding included: column `pad + i`
of a row holds its token `i`. Values are trusted.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.tokens import TokenIds, common_prefix_length
from ..blocks.window_blocks import WindowBlocks
from .transfers import Transfer


class RowLayout(NamedTuple):
    """What a view must know of one running row."""

    root: bytes
    pad: int  # columns of left padding
    token_ids: TokenIds  # all of the row, the scheduled forward's included
    block_ids: Sequence[int]  # logical block index -> block id

    def cut(self, num_columns: int) -> "RowLayout":
        """What is in its first columns, wherever it lies in the pool."""
        return self._replace(token_ids=self.token_ids[: max(0, num_columns - self.pad)], block_ids=())

    def num_columns_in_common(self, other: "RowLayout") -> int:
        """How many leading columns have the same keys and values in both, padding included."""
        if (self.root, self.pad) != (other.root, other.pad):
            return 0
        return self.pad + common_prefix_length(self.token_ids, other.token_ids)


class SlotMapping:
    """The slots that a forward writes: `slots[i]` takes its token `sources[i]`.

    Tokens are counted row by row, `row * num_new_columns + column`; `sources` None: all of them, in order. A token that
    is not among the sources is not written: left padding, and what a row computes again because another row needs it.
    Index tensors are made once for each device and number of heads, and used by every such layer.

    Args:
        transfer: that the slots go with, where their index is needed; None: one of their own.
    """

    def __init__(
        self, slots: Sequence[int], sources: Sequence[int] | None = None, transfer: Transfer | None = None
    ) -> None:
        self.slots = slots
        self.sources = sources
        self.num_slots = len(slots)
        self._index: dict[tuple[int, int, torch.device], Tensor] = {}  # see `index_for`
        self._placed: dict[int | str, SlotMapping] = {}  # name of a group -> see `of_group`
        self._transfer = transfer
        self._added: tuple[int, int] | None = None  # lists in the transfer: slots, and sources
        if transfer is not None and (sources is not None or self.first_slot is None):  # else it may take no index
            self._added = self._add(transfer)

    @cached_property
    def end_slot(self) -> int:
        """One above the highest slot."""
        return 1 + max(self.slots, default=-1)

    @cached_property
    def first_slot(self) -> int | None:
        """The first slot if they count up by one, else None."""
        slots = self.slots
        if not slots or slots[-1] - slots[0] != len(slots) - 1:
            return None
        return slots[0] if [*slots] == [*range(slots[0], slots[0] + len(slots))] else None

    @property
    def is_run(self) -> bool:
        """Whether all tokens are written, into slots side by side."""
        return self.sources is None and self.first_slot is not None

    def of_group(self, placing: WindowBlocks, block_size: int) -> "SlotMapping":
        """What layers with a window write: the tokens in blocks that have window blocks, into these."""
        mapping = self._placed.get(placing.name)
        if mapping is None:
            places, slots = placing.places, self.slots
            sources = range(len(slots)) if self.sources is None else self.sources
            placed = [
                (places[slot // block_size] * block_size + slot % block_size, source)
                for slot, source in zip(slots, sources, strict=True)
                if slot // block_size in places
            ]
            is_whole = self.sources is None and len(placed) == len(slots)
            written = None if is_whole else [source for _, source in placed]
            mapping = SlotMapping([slot for slot, _ in placed], written, self._transfer)
            self._placed[placing.name] = mapping
        return mapping

    def index_for(self, num_heads: int, num_slots: int, device: torch.device) -> Tensor:
        """[slots written * H] int64 on `device`: where they are in a tensor of H heads with `num_slots` slots each."""
        found = self._index.get((num_heads, num_slots, device))
        if found is None:
            heads = torch.arange(num_heads, device=device)
            found = self._index[num_heads, num_slots, device] = (
                self._on(device, 0)[:, None] + heads * num_slots
            ).flatten()
        return found

    def sources_on(self, device: torch.device) -> Tensor | None:
        """`sources` as an int64 tensor on `device`."""
        return None if self.sources is None else self._on(device, 1)

    def _on(self, device: torch.device, which: int) -> Tensor:
        if self._transfer is None:
            self._transfer = Transfer()
        if self._added is None:
            self._added = self._add(self._transfer)
        return self._transfer.on(device, self._added[which])

    def _add(self, transfer: Transfer) -> tuple[int, int]:
        slots = transfer.add(self.slots)
        return slots, slots if self.sources is None else transfer.add(self.sources)


class ReadSource:
    """What a read takes: C columns of each of R rows, slot by slot or, given `num_blocks`, in whole blocks.

    Args:
        ids_on: asked, with a device that reads, for [R, C] int64 slots there, or for [R, `num_blocks`] ids of blocks.
        skipped: slots of a row's first block before its first column.
    """

    __slots__ = ("_ids_on", "_index", "_num_ids", "by_block", "num_columns", "num_rows", "skipped")

    def __init__(
        self,
        ids_on: Callable[[torch.device], Tensor],
        num_rows: int,
        num_columns: int,
        *,
        num_blocks: int | None = None,
        skipped: int = 0,
    ) -> None:
        self._ids_on = ids_on
        self._num_ids = num_columns if num_blocks is None else num_blocks  # of a row
        self.by_block = num_blocks is not None
        self.num_rows, self.num_columns, self.skipped = num_rows, num_columns, skipped
        self._index: dict[tuple[int, int, torch.device], Tensor] = {}

    def num_slots(self, block_size: int) -> int:
        """Slots of a row that are copied; by block, more than it has columns."""
        return self._num_ids * (block_size if self.by_block else 1)

    def index_for(self, num_heads: int, num_units: int, device: torch.device) -> Tensor:
        """[R * H * C] int64 on `device`: where what is read is in a tensor of H heads with `num_units` slots each.

        By block [R * H * N]: with so many blocks each.
        """
        found = self._index.get((num_heads, num_units, device))
        if found is None:
            heads = torch.arange(num_heads, device=device)[:, None]
            index = self._ids_on(device)[:, None] + heads * num_units
            found = self._index[num_heads, num_units, device] = index.flatten()
        return found
