"""Owns a contiguous copy of the last columns of the running rows, for layers whose attention sees a window of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.block_tables import read_source
from ..kv.recycled_memory import zeros
from ..kv.slot_mapping import ReadSource, RowLayout
from ..kv.transfers import Transfer
from .copy_reader import CopyReader, expand_in_place, with_spare_columns
from .windows import Windows, first_column


class _Buffer:
    """One tensor, [row capacity, H, column capacity, D]; its first column is column `base` of the rows."""

    __slots__ = ("base", "states")

    def __init__(self, states: Tensor, base: int) -> None:
        self.states = states
        self.base = base

    def at(self, num_rows: int, start: int, stop: int) -> Tensor:
        """Columns `[start, stop)` of the first rows."""
        return self.states[:num_rows, :, start - self.base : stop - self.base]

    def move(self, num_rows: int, base: int, stop: int) -> None:
        """Let the columns `[base, stop)` be the first ones.

        Interrupted, it may have overwritten columns at the front. Held steps are not among them: a step moves only a full
        buffer, and they are its last block.
        """
        if base < stop and base != self.base:
            self.states[:num_rows, :, : stop - base] = self.at(num_rows, base, stop).clone()  # the two may overlap
        self.base = base


class WindowReader(CopyReader):
    """A contiguous copy of the columns that a window shows, and some before it; for all layers of this window.

    Buffers: layer index -> name -> `_Buffer`.
        columns of a row: [0, base) not held | [base, valid) a copy of the pool, but for held steps | [valid, ..) unspecified
    Where a buffer is full, its last columns move to its front: a copy for each block of steps, where `DynamicCache` makes one
    for each step. A forward of more columns than there is room for, such as a prompt, reads the window before it and its
    own states, and leaves its last columns. One block more than the window stays: of steps that the pool has not got yet,
    and drafts that may be taken back. Columns that are missing are gathered when a layer is read.
    """

    def __init__(self, pool: BlockPool, windows: Windows, window: int) -> None:
        super().__init__(pool, windows)
        self._window = window
        self._num_kept = window - 1 + pool.block_size  # columns before a forward that stay
        self._capacity = self._num_kept + pool.block_size
        self._buffers: dict[int, dict[str, _Buffer]] = {}
        self._first = 0  # first column that the forward's layers read
        self._base = 0  # of each buffer, once its layer is read
        self._valid = 0  # end of the columns that are in the buffers, for all rows
        self._missing: ReadSource | None = None  # to gather: the columns before the forward that its layers read

    def start_rows(self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float) -> None:
        super().start_rows(rows, num_columns, max_rows=max_rows, max_columns=max_columns)
        if any(
            held.states.shape[0] > 4 * self._max_rows for layer in self._buffers.values() for held in layer.values()
        ):
            self.drop()
        kept = self._kept[: len(rows)]
        are_held = len(kept) == len(rows) > 0
        self._valid = min(map(RowLayout.num_columns_in_common, kept, rows)) if are_held else 0
        self._num_rows, self._kept = len(rows), []

    def start_forward(
        self,
        rows: Callable[[], Sequence[RowLayout]],
        num_rows: int,
        start: int,
        stop: int,
        transfer: Transfer | None = None,
    ) -> None:
        self._num_rows, self._start, self._stop, self._layouts = num_rows, start, stop, rows
        if self._gathering is not None:
            self._gathering.start_forward(rows, num_rows, start, stop, transfer)
            return
        first, base = first_column(self._window, start), self._base
        self._missing = None
        if self._valid < start or base > first:  # rows new here, or cut
            base = first
            if start:
                self._missing = self._source(rows(), first, start, transfer)
        if stop - base > self._capacity:
            base = max(base, start - self._num_kept)
        if stop - base > self._capacity:  # more than there is room for
            base = stop - self._num_kept
        self._first, self._base, self._valid = first, base, stop

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._gathering is not None:
            return self._gathering.read(layer_idx, new)
        buffers = self._buffers.setdefault(layer_idx, {})
        past = self._gathered(layer_idx, buffers, new)
        return {name: self._read(buffers, name, states.detach(), past.get(name)) for name, states in new.items()}

    def _read(self, buffers: dict[str, _Buffer], name: str, new: Tensor, past: Tensor | None) -> Tensor:
        """What attention reads of one tensor; its buffer is left with the columns `[base, stop)`.

        Args:
            past: the columns before the forward, where they were gathered.
        """
        num_rows, first, base, start, stop = self._num_rows, self._first, self._base, self._start, self._stop
        if base <= first:
            held = self._with_room(buffers, name, new, keeps=past is None)
            if past is not None:
                held.at(num_rows, base, start).copy_(past)
            held.at(num_rows, start, stop).copy_(new)
            return held.at(num_rows, first, stop)
        if past is None and first < start:
            past = buffers[name].at(num_rows, first, start)
        whole = new.contiguous() if past is None else torch.cat((past.to(new.dtype), new), dim=2)
        self._with_room(buffers, name, new, keeps=False).at(num_rows, base, stop).copy_(whole[:, :, base - first :])
        return whole

    def read_pair(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        buffers = self._buffers.get(layer_idx)
        if buffers is None or self._missing is not None or self._base > self._first:
            return None
        keys, values = buffers.get("key"), buffers.get("value")
        if keys is None or values is None or not self._takes(keys, key) or not self._takes(values, value):
            return None
        return self._append(keys, key), self._append(values, value)

    def _takes(self, held: _Buffer, new: Tensor) -> bool:
        """Whether the forward's columns can be written into a buffer."""
        states, num_rows = held.states, self._num_rows
        max_rows, heads, columns, head_dim = states.shape
        return (
            max_rows >= num_rows
            and columns >= self._stop - self._base
            and held.base <= self._base
            and new.shape == (num_rows, heads, self._stop - self._start, head_dim)
            and new.dtype == states.dtype
            and new.device == states.device
        )

    def _append(self, held: _Buffer, new: Tensor) -> Tensor:
        """Write the forward's columns; returns what attention reads."""
        first, base, start, stop, num_rows = self._first, self._base, self._start, self._stop, self._num_rows
        if held.base != base:
            held.move(num_rows, base, start)
        states = held.states
        if states.shape[0] != num_rows:
            states = states.narrow(0, 0, num_rows)
        states.narrow(2, start - base, stop - start).copy_(new)
        return states.narrow(2, first - base, stop - first)

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for layer_idx, layer in self._buffers.items():
            states = {
                name: held.at(self._num_rows, start, stop)
                for name, held in layer.items()
                if held.base <= start
                and stop - held.base <= held.states.shape[2]
                and held.states.shape[0] >= self._num_rows
            }
            yield layer_idx, states

    def _expand(self, sources: Sequence[int]) -> None:
        for layer in self._buffers.values():
            for held in layer.values():
                columns = max(0, self._stop - held.base)
                if held.states.shape[0] < len(sources):
                    grown = zeros((len(sources), *held.states.shape[1:]), held.states.dtype, held.states.device)
                    grown[: held.states.shape[0], :, :columns] = held.states[:, :, :columns]
                    self._replace(held, grown)
                expand_in_place(held.states, sources, columns)
        self._num_rows = len(sources)

    def _spans(self, start: int, stop: int) -> Iterator[Tensor]:
        return (
            held.states[:, :, max(0, start - held.base) : stop - held.base]
            for layer in self._buffers.values()
            for held in layer.values()
            if held.base < stop
        )

    def crop(self, num_columns: int) -> None:
        self._stop, self._valid = min(self._stop, num_columns), min(self._valid, num_columns)

    def keep(self, rows: Sequence[RowLayout]) -> None:
        self._kept = [layout.cut(self._valid) for layout in rows[: self._num_rows]] if self._valid else []

    def drop(self) -> None:
        self._pool.release(held.states for layer in self._buffers.values() for held in layer.values())
        self._buffers, self._buffer_bytes, self._kept, self._missing = {}, 0, [], None
        self._valid = self._stop = self._first = self._base = 0
        self._layouts = list
        self.pause()

    def _gathered(self, layer_idx: int, buffers: dict[str, _Buffer], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """name -> the columns before the forward, from the pool; of tensors whose buffers have not all that are read."""
        if self._missing is not None:
            return self._pool.gather(layer_idx, self._missing, new)
        first, start = min(self._base, self._first), self._start
        lacking = [
            name
            for name, states in new.items()
            if name not in buffers or buffers[name].base > first or not self._fits(buffers[name], states)
        ]
        if not lacking or first == start:
            return {}
        return self._pool.gather(layer_idx, self._source(self._layouts(), first, start), lacking)

    def _source(
        self, rows: Sequence[RowLayout], first: int, start: int, transfer: Transfer | None = None
    ) -> ReadSource:
        """The columns `[first, start)` where the pool holds them for these layers."""
        placed = self._pool.rows_in(self._window, rows, first)
        return read_source(placed, first, start, self._pool.block_size, transfer)

    def _fits(self, held: _Buffer, new: Tensor) -> bool:
        """Whether a buffer holds such states of all rows. One of another dtype may have been rounded, the pool was not."""
        states = held.states
        return states.dtype == new.dtype and states.device == new.device and states.shape[0] >= self._num_rows

    def _with_room(self, buffers: dict[str, _Buffer], name: str, new: Tensor, *, keeps: bool) -> _Buffer:
        """The buffer for such states, with room for the columns `[base, stop)`.

        Args:
            keeps: those before the forward stay in it.
        """
        base, start, needed = self._base, self._start, self._stop - self._base
        held = buffers.get(name)
        if held is not None and self._fits(held, new) and held.states.shape[2] >= needed:
            if keeps:
                held.move(self._num_rows, base, start)
            held.base = base
            return held
        columns = with_spare_columns(needed, min(self._capacity, self._most_columns - base))
        num_rows = max(self._max_rows, self._num_rows)
        made = _Buffer(zeros((num_rows, new.shape[1], columns, new.shape[3]), new.dtype, new.device), base)
        if held is None:
            self._buffer_bytes += made.states.nbytes
        else:
            if keeps and base < start:
                made.at(self._num_rows, base, start).copy_(held.at(self._num_rows, base, start))
            self._replace(held, made.states)
        buffers[name] = made
        return made

    def _replace(self, held: _Buffer, made: Tensor) -> None:
        """Let `made` take the place of a buffer's tensor."""
        self._pool.release([held.states])
        self._buffer_bytes += made.nbytes - held.states.nbytes
        held.states = made
