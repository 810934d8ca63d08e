"""Owns a contiguous copy of the running rows' columns, which each forward appends to in place."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.block_tables import read_source
from ..kv.recycled_memory import RecycledMemory, zeros
from ..kv.slot_mapping import ReadSource, RowLayout
from ..kv.transfers import Transfer
from .copy_reader import MIN_SPARE_COLUMNS, CopyReader, expand_in_place, with_spare_columns


class ContiguousReader(CopyReader):
    """A contiguous copy of all columns of the rows. Those that the next rows have in common are kept.

    Buffers: layer index -> name -> [row capacity, H, column capacity, D].
        columns of a row: [0, valid) a copy of the pool, but for held steps | [valid, capacity) unspecified, finite
    Columns that are missing are gathered when a layer is read; which they are is the same for all layers of a forward.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._memory = RecycledMemory()  # for what is gathered into the buffers
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._missing: list[tuple[int, int, int, ReadSource]] = []  # to gather: (row, first column, end, source)
        self._valid: list[int] = []  # row -> columns that are in the buffers

    def start_rows(self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float) -> None:
        super().start_rows(rows, num_columns, max_rows=max_rows, max_columns=max_columns)
        if self._oversized(num_columns):
            self.drop()
        self._valid = [self._num_columns_kept(row, layout) for row, layout in enumerate(rows)]
        self._kept = []

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
        self._valid += [0] * (num_rows - len(self._valid))  # rows taken over from another cache, or multiplied
        if self._missing:
            self._missing = []
            self._memory.drop()
        valid = self._valid
        if min(valid[:num_rows]) < start:
            transfer = Transfer() if transfer is None else transfer
            for row, layout in enumerate(rows()):
                first = valid[row]  # 0 gathers the padding, too: what the buffer holds there may not be finite
                if first < start:
                    source = read_source([layout], first, start, self._pool.block_size, transfer)
                    self._missing.append((row, first, start, source))
        valid[:num_rows] = [stop] * num_rows

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._gathering is not None:
            return self._gathering.read(layer_idx, new)
        buffers = self._buffers.setdefault(layer_idx, {})
        start, stop, num_rows = self._start, self._stop, self._num_rows
        recast = []
        for name, states in new.items():
            held = buffers.get(name)
            if held is not None and held.dtype != states.dtype:
                recast.append(name)
                held = None
            if held is None or held.shape[2] < stop or held.shape[0] < num_rows or held.device != states.device:
                self._put(buffers, name, self._grown(held, states))
        for row, first, end, source in self._missing:
            for name, states in self._pool.gather(layer_idx, source, new, self._memory).items():
                buffers[name][row, :, first:end].copy_(states[0])
        if recast and start:  # the buffers may have been rounded, the pool was not
            past = read_source(self._layouts(), 0, start, self._pool.block_size)
            gathered = self._pool.gather(layer_idx, past, recast)
            for name in recast:
                buffers[name][:num_rows, :, :start].copy_(gathered[name])
        result = {}
        for name, states in new.items():
            held = buffers[name].narrow(0, 0, num_rows)
            held.narrow(2, start, stop - start).copy_(states.detach())
            result[name] = held.narrow(2, 0, stop)
        return result

    def read_pair(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        buffers = self._buffers.get(layer_idx)
        if buffers is None or self._missing:
            return None
        keys, values = buffers.get("key"), buffers.get("value")
        if keys is None or values is None or keys.dtype != key.dtype or values.dtype != value.dtype:
            return None
        start, stop, num_rows = self._start, self._stop, self._num_rows
        (max_rows, heads, columns, key_dim), (max_values, value_heads, value_columns, value_dim) = (
            keys.shape,
            values.shape,
        )
        if max_rows < num_rows or max_values < num_rows or columns < stop or value_columns < stop:
            return None
        num_new = stop - start
        if key.shape != (num_rows, heads, num_new, key_dim) or value.shape != (
            num_rows,
            value_heads,
            num_new,
            value_dim,
        ):
            return None
        if keys.device != key.device or values.device != value.device:
            return None
        if max_rows != num_rows or max_values != num_rows:
            keys, values = keys.narrow(0, 0, num_rows), values.narrow(0, 0, num_rows)
        keys.narrow(2, start, num_new).copy_(key)
        values.narrow(2, start, num_new).copy_(value)
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        num_rows, num_columns = self._num_rows, stop - start
        for layer_idx, layer in self._buffers.items():
            states = {
                name: held.narrow(0, 0, num_rows).narrow(2, start, num_columns)
                for name, held in layer.items()
                if held.shape[2] >= stop and held.shape[0] >= num_rows
            }
            yield layer_idx, states

    def _expand(self, sources: Sequence[int]) -> None:
        columns = self._stop
        self._num_rows = len(sources)
        self._valid = [self._valid[source] for source in sources] if self._buffers else [0] * len(sources)
        for layer in self._buffers.values():
            for name, held in layer.items():
                if held.shape[0] < len(sources):
                    rows = zeros((len(sources), *held.shape[1:]), held.dtype, held.device, huge_pages=True)
                    rows[: held.shape[0], :, :columns] = held[:, :, :columns]
                    self._put(layer, name, rows)
                    held = rows
                expand_in_place(held, sources, columns)

    def _spans(self, start: int, stop: int) -> Iterator[Tensor]:
        return (held[:, :, start:stop] for layer in self._buffers.values() for held in layer.values())

    def crop(self, num_columns: int) -> None:
        self._stop = min(self._stop, num_columns)
        self._valid = [min(valid, num_columns) for valid in self._valid]

    def keep(self, rows: Sequence[RowLayout]) -> None:
        self._kept = [  # no more than is valid: nothing of what was dropped
            layout.cut(valid) for layout, valid in zip(rows, self._valid, strict=False)
        ]

    def pause(self) -> None:
        self._memory.drop()
        super().pause()

    def drop(self) -> None:
        self._pool.release(held for layer in self._buffers.values() for held in layer.values())
        self._buffers, self._buffer_bytes, self._kept, self._missing = {}, 0, [], []
        self._valid, self._stop, self._layouts = [], 0, list
        self.pause()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._memory.num_bytes

    def _num_columns_kept(self, row: int, layout: RowLayout) -> int:
        """How many columns of a new row the buffers hold, padding included."""
        return self._kept[row].num_columns_in_common(layout) if row < len(self._kept) else 0

    def _oversized(self, num_columns: int) -> bool:
        """Whether the buffers are more than 4 times as large as what comes may need."""
        most = num_columns if math.isinf(self._max_columns) else max(num_columns, self._max_columns)
        needed = 4 * self._max_rows * (most + MIN_SPARE_COLUMNS)
        return any(
            held.shape[0] * held.shape[2] > needed for layer in self._buffers.values() for held in layer.values()
        )

    def _grown(self, held: Tensor | None, states: Tensor) -> Tensor:
        """A buffer with room for the forward's columns and some more; `held` is copied into it."""
        columns = with_spare_columns(self._stop, self._most_columns)
        num_rows = max(self._max_rows, self._num_rows)
        grown = zeros(
            (num_rows, states.shape[1], columns, states.shape[3]), states.dtype, states.device, huge_pages=True
        )
        if held is not None:
            rows, past = min(num_rows, held.shape[0]), min(held.shape[2], self._start)
            grown[:rows, :, :past] = held[:rows, :, :past]
        return grown

    def _put(self, buffers: dict[str, Tensor], name: str, made: Tensor) -> None:
        """Let `made` take the place of a layer's buffer."""
        replaced = buffers.get(name)
        if replaced is not None:
            self._pool.release([replaced])
        self._buffer_bytes += made.nbytes - (0 if replaced is None else replaced.nbytes)
        buffers[name] = made
