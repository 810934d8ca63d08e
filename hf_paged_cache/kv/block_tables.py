"""Owns the block tables of running rows as tensors on the devices that read through them; each gets what is new.

A table has an entry for each block of a row, after those of its padding, which are the null block: entry
`1 + pad // block_size + i` is block `i`. So where blocks begin at the same columns in all rows, an entry is of the same
columns in all of them. Values are trusted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .recycled_memory import zeros
from .slot_mapping import ReadSource, RowLayout
from .transfers import Transfer, to_device

_MIN_SPARE_ENTRIES = 16  # of a tensor that is written: few steps have to make a larger one
_MAX_FILLED = 2  # new entries that go along with launches, so that a row alone needs no transfer


class _Tables(NamedTuple):
    """What a device has."""

    version: int
    entries: Tensor  # [R, entries]
    shifts: Tensor  # [R, 1]: slots of the entries' blocks before column 0
    are_written: bool  # else the entries lie in the memory of a transfer


class BlockTables:
    """The tables of rows that are read together.

    A device that was not asked for a version gets the next one as a whole. Interrupted, it must be dropped.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.drop()

    def drop(self) -> None:
        """Forget all tables."""
        self._pads: list[int] = []
        self._held: list[list[int]] = []  # row -> block ids
        self._num_entries = 0  # that a tensor has room for
        self._version = 0
        self._changes: list[tuple[int, int, int]] = []  # of the last `update`: row, entry, block id
        self._transfer = Transfer()  # of the last `update`
        self._sent: tuple[int, int] | None = None  # lists in it: entries and shifts, or places and block ids
        self._on: dict[torch.device, _Tables] = {}

    def update(self, rows: Sequence[RowLayout], transfer: Transfer) -> None:
        """These rows are read next.

        Cost: a look at each block id. With `transfer` goes what is new, which is little while rows only grow.
        """
        pads = [row.pad for row in rows]
        if pads != self._pads:
            self.drop()
            self._pads = pads
        self._transfer, self._sent, self._changes = transfer, None, []
        if not self._version:
            self._held = [list(row.block_ids) for row in rows]
            self._num_entries, self._version = self._num_needed(), 1
            self._sent = transfer.add(self._entries()), transfer.add(self._shifts())
            return
        changes = self._changes
        for number, (row, held) in enumerate(zip(rows, self._held, strict=True)):
            block_ids = row.block_ids
            if block_ids != held:
                at = next((i for i, (a, b) in enumerate(zip(block_ids, held, strict=False)) if a != b), len(held))
                changes += [(number, self._first(number) + i, block_ids[i]) for i in range(at, len(block_ids))]
                held[at:] = block_ids[at:]
        if not changes:
            return
        needed = self._num_needed()
        if needed > self._num_entries:
            self._num_entries = needed + max(_MIN_SPARE_ENTRIES, needed // 4)
        self._version += 1
        if len(changes) > _MAX_FILLED:
            places = transfer.add([row * self._num_entries + entry for row, entry, _ in changes])
            self._sent = places, transfer.add([block_id for *_, block_id in changes])

    def columns(self, start: int, stop: int) -> ReadSource:
        """The columns `[start, stop)` of each row; by block where blocks begin at the same ones. Until the next `update`."""
        size, pads = self._block_size, self._pads
        offset = pads[0] % size
        if any(pad % size != offset for pad in pads):
            return ReadSource(lambda device: self._slots(device, start, stop), len(pads), stop - start)
        first, end = (start - offset) // size, -((offset - stop) // size)  # counted from column `offset`
        return ReadSource(
            lambda device: self._current(device).entries[:, first + 1 : end + 1],
            len(pads),
            stop - start,
            num_blocks=end - first,
            skipped=start - offset - first * size,
        )

    def _slots(self, device: torch.device, start: int, stop: int) -> Tensor:
        """[R, stop - start] int64 on `device`: the slot of each column; padding reads the null block."""
        size, tables = self._block_size, self._current(device)
        places = torch.arange(start, stop, device=device) + tables.shifts
        return tables.entries.gather(1, places // size) * size + places % size

    def _current(self, device: torch.device) -> _Tables:
        held = self._on.get(device)
        if held is None or held.version != self._version:
            is_next = held is not None and held.version == self._version - 1 and self._changes
            self._on[device] = held = self._brought_up(held) if held is not None and is_next else self._whole(device)
        return held

    def _whole(self, device: torch.device) -> _Tables:
        if self._version == 1 and self._sent is not None:
            entries, shifts = (self._transfer.on(device, number) for number in self._sent)
        else:
            entries, shifts = to_device(self._entries(), device), to_device(self._shifts(), device)
        return _Tables(self._version, entries.view(len(self._pads), -1), shifts[:, None], are_written=False)

    def _brought_up(self, held: _Tables) -> _Tables:
        """A device's tables with the changes of the last `update`."""
        entries, num_rows = held.entries, len(self._pads)
        device = entries.device
        if not held.are_written or entries.shape[1] != self._num_entries:
            grown = zeros((num_rows, self._num_entries), torch.int64, device)
            grown[:, : entries.shape[1]] = entries
            entries = grown
        if self._sent is None:
            for row, entry, block_id in self._changes:
                entries[row, entry].fill_(block_id)
        else:
            places, block_ids = (self._transfer.on(device, number) for number in self._sent)
            entries.view(-1).index_copy_(0, places, block_ids)
        return _Tables(self._version, entries, held.shifts, are_written=True)

    def _first(self, number: int) -> int:
        """The entry of a row's first block."""
        return 1 + self._pads[number] // self._block_size

    def _shifts(self) -> list[int]:
        return [self._first(number) * self._block_size - pad for number, pad in enumerate(self._pads)]

    def _num_needed(self) -> int:
        return max(self._first(number) + max(1, len(block_ids)) for number, block_ids in enumerate(self._held))

    def _entries(self) -> list[int]:
        """Those of all rows, one row after the other."""
        entries: list[int] = []
        for number, block_ids in enumerate(self._held):
            first = self._first(number)
            entries += [0] * first
            entries += block_ids
            entries += [0] * (self._num_entries - first - len(block_ids))
        return entries


def read_source(
    rows: Sequence[RowLayout], start: int, stop: int, block_size: int, transfer: Transfer | None = None
) -> ReadSource:
    """The columns `[start, stop)` of each row; by block where blocks begin at the same columns in all rows.

    Args:
        transfer: that the block ids go with; None: one of their own.
    """
    tables = BlockTables(block_size)
    tables.update(rows, Transfer() if transfer is None else transfer)
    return tables.columns(start, stop)
