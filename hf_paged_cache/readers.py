"""What attention reads of the pool: a contiguous view of the running rows, or a gather for the moment of use.

A reader owns copies that may be dropped at any time and made again from the pool; it owns no truth. It knows rows as
`RowLayout`s and columns: column `pad + i` of a row holds its token `i`. Columns left of a row's padding are never
attended to; they hold finite values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .pool import BlockPool, zeros
from .spans import Span, spans_of
from .tokens import TokenIds, common_prefix_length

_MIN_SPARE_COLUMNS = 128  # room a grown view has at least, so that few decode steps have to grow it


_MAX_SPANS_A_ROW = 8  # above, copies of slices cost more than reading slot by slot


class RowLayout(NamedTuple):
    """What a reader must know of one running row."""

    root: bytes
    pad: int  # columns of left padding
    token_ids: TokenIds  # of all tokens, those of the announced forward included
    block_ids: Sequence[int]  # logical block index -> block id


class Reader(Protocol):
    """Between the pool and attention. Columns are counted from the left, padding included."""

    def start_rows(
        self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: int | None
    ) -> None:
        """Other rows run from here on: `num_columns` for now, at most `max_rows` and (None: unknown) `max_columns`."""

    def start_forward(self, rows: Callable[[], Sequence[RowLayout]], num_rows: int, start: int, stop: int) -> None:
        """A forward of columns `[start, stop)` begins; `rows` tells of the `num_rows` rows, where that is needed."""

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """name -> [R, H, stop, D]: the columns `[0, start)` of the rows, then `new`, which is in the pool already."""

    def expand_rows(self, sources: Sequence[int]) -> None:
        """Row `i` goes on as a copy of row `sources[i] <= i`."""

    def reorder_rows(self, sources: Sequence[int], shared_columns: int) -> None:
        """Row `i` goes on as a copy of row `sources[i]`; both are equal in the first `shared_columns` columns."""

    def crop(self, num_columns: int) -> None:
        """Columns from `num_columns` on are taken back."""

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """The rows end. The columns of the tokens named here may be used again by rows that start the same."""

    def drop(self) -> None:
        """Forget all copies."""

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the pool."""


class GatherReader:
    """Gathers each layer's rows for the moment of its attention: memory is the blocks alone."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._slots: Tensor | None = None  # [R, stop] of the forward, on the host
        self._slots_on: dict[torch.device, Tensor] = {}
        self._spans: list[Span] | None = None  # instead, where few slices hold all of it
        self._start = self._stop = self._num_rows = 0

    def start_rows(
        self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: int | None
    ) -> None:
        """See Reader."""

    def start_forward(self, rows: Callable[[], Sequence[RowLayout]], num_rows: int, start: int, stop: int) -> None:
        """See Reader."""
        self._start, self._stop, self._num_rows = start, stop, num_rows
        self._slots, self._slots_on, self._spans = None, {}, None
        if start > 0:
            layouts, block_size = rows(), self._pool.block_size
            if not torch.is_grad_enabled():  # a backward pass keeps what it was given, and the pool is written again
                placed = [(layout.pad, layout.block_ids) for layout in layouts]
                self._spans = spans_of(placed, stop, block_size, _MAX_SPANS_A_ROW * num_rows)
            if self._spans is None:
                self._slots = slot_matrix(layouts, stop, block_size)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Reader."""
        if self._spans is not None:
            gathered = self._pool.gather_spans(layer_idx, self._spans, self._num_rows, self._stop, new)
            return {name: gathered[name].to(states.dtype) for name, states in new.items()}
        if self._slots is None:
            return dict(new)
        device = self._pool.device_of(layer_idx)
        slots = self._slots_on.get(device)
        if slots is None:
            slots = self._slots_on[device] = self._slots.to(device)
        if any(states.requires_grad for states in new.values()):
            past = self._pool.gather(layer_idx, slots[:, : self._start], new)
            return {name: torch.cat((past[name].to(states.dtype), states), dim=2) for name, states in new.items()}
        gathered = self._pool.gather(layer_idx, slots, new)
        return {name: gathered[name].to(states.dtype) for name, states in new.items()}

    def expand_rows(self, sources: Sequence[int]) -> None:
        """See Reader."""

    def reorder_rows(self, sources: Sequence[int], shared_columns: int) -> None:
        """See Reader."""

    def crop(self, num_columns: int) -> None:
        """See Reader."""

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """See Reader."""
        self.drop()

    def drop(self) -> None:
        """See Reader."""
        self._slots, self._slots_on, self._spans = None, {}, None

    @property
    def num_bytes(self) -> int:
        """See Reader."""
        return 0


class ViewReader:
    """A contiguous copy of the rows' columns, appended to in place; columns that the next rows share are kept.

    Buffers: layer index -> name -> [row capacity, H, column capacity, D].
        [0, valid) hold the row's tokens | [valid, capacity) unspecified, finite
    A layer's missing columns are gathered when the layer is read, once for all layers of a forward.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._kept: list[RowLayout] = []  # row -> what it holds, as of the last `keep`
        self._num_rows = 0
        self._max_rows = 0
        self._max_columns: int | None = None
        self._start = self._stop = 0
        self._missing: list[tuple[int, int, int, Tensor]] = []  # (row, first column, end, slots [1, n]) to gather
        self._missing_on: dict[torch.device, list[Tensor]] = {}
        self._valid: list[int] = []  # row -> columns that are in the buffers
        self._layouts: Callable[[], Sequence[RowLayout]] = list  # of the rows of the forward

    def start_rows(
        self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: int | None
    ) -> None:
        """See Reader."""
        self._max_rows, self._max_columns = max(max_rows, len(rows)), max_columns
        if self._oversized(num_columns):
            self.drop()
        self._valid = [self._num_columns_kept(row, layout) for row, layout in enumerate(rows)]
        self._kept = []

    def start_forward(self, rows: Callable[[], Sequence[RowLayout]], num_rows: int, start: int, stop: int) -> None:
        """See Reader."""
        self._num_rows, self._start, self._stop, self._layouts = num_rows, start, stop, rows
        self._valid += [0] * (num_rows - len(self._valid))  # rows that were taken over, or multiplied
        if self._missing:
            self._missing, self._missing_on = [], {}
        valid = self._valid
        if min(valid[:num_rows]) < start:
            for row, layout in enumerate(rows()):
                first = max(valid[row], layout.pad)
                if first < start:
                    span = RowLayout(layout.root, 0, layout.token_ids, layout.block_ids)
                    slots = slot_matrix([span], start - layout.pad, self._pool.block_size)
                    self._missing.append((row, first, start, slots[:, first - layout.pad :]))
        valid[:num_rows] = [stop] * num_rows

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Reader."""
        buffers = self._buffers.get(layer_idx)
        if buffers is None:
            buffers = self._buffers[layer_idx] = {}
        start, stop, num_rows = self._start, self._stop, self._num_rows
        recast = []
        for name, states in new.items():
            held = buffers.get(name)
            if held is not None and held.dtype != states.dtype:
                recast.append(name)
                held = None
            if held is None or held.shape[2] < stop or held.shape[0] < num_rows or held.device != states.device:
                buffers[name] = self._grown(held, states)
        if self._missing:
            self._fill(layer_idx, {name: buffers[name] for name in new})
        if recast and start:  # the buffers may have been rounded, the pool was not
            slots = slot_matrix(self._layouts(), start, self._pool.block_size).to(self._pool.device_of(layer_idx))
            gathered = self._pool.gather(layer_idx, slots, recast)
            for name in recast:
                buffers[name][:num_rows, :, :start].copy_(gathered[name])
        result = {}
        for name, states in new.items():
            held = buffers[name]
            held[:num_rows, :, start:stop].copy_(states.detach())
            if states.requires_grad:
                past = held[:num_rows, :, :start]
                result[name] = torch.cat((past, states), dim=2) if start else states
            else:
                result[name] = held[:num_rows, :, :stop]
        return result

    def expand_rows(self, sources: Sequence[int]) -> None:
        """See Reader."""
        columns = self._stop
        self._num_rows = len(sources)
        self._valid = [self._valid[source] for source in sources] if self._buffers else [0] * len(sources)
        for layer in self._buffers.values():
            for name, held in layer.items():
                if held.shape[0] < len(sources):
                    rows = zeros((len(sources), *held.shape[1:]), held.dtype, held.device)
                    rows[: held.shape[0], :, :columns] = held[:, :, :columns]
                    layer[name] = held = rows
                for row in range(len(sources) - 1, -1, -1):  # a source is never right of its copy
                    if sources[row] != row:
                        held[row, :, :columns] = held[sources[row], :, :columns]

    def reorder_rows(self, sources: Sequence[int], shared_columns: int) -> None:
        """See Reader."""
        columns = self._stop
        moved = [row for row, source in enumerate(sources) if source != row]
        if not moved or shared_columns >= columns:
            return
        index: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for layer in self._buffers.values():
            for held in layer.values():
                if held.device not in index:
                    index[held.device] = (
                        torch.tensor(moved, device=held.device),
                        torch.tensor([sources[row] for row in moved], device=held.device),
                    )
                rows, origin = index[held.device]
                span = held[:, :, shared_columns:columns]
                span.index_copy_(0, rows, span.index_select(0, origin))

    def crop(self, num_columns: int) -> None:
        """See Reader."""
        self._stop = min(self._stop, num_columns)
        self._valid = [min(valid, num_columns) for valid in self._valid]

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """See Reader."""
        self._kept = [  # of what was dropped, nothing
            layout._replace(token_ids=layout.token_ids[: max(0, valid - layout.pad)], block_ids=())
            for layout, valid in zip(rows, self._valid, strict=False)
        ]

    def drop(self) -> None:
        """See Reader."""
        self._buffers, self._kept, self._missing, self._missing_on = {}, [], [], {}
        self._valid, self._stop, self._layouts = [], 0, list

    @property
    def num_bytes(self) -> int:
        """See Reader."""
        return sum(held.nbytes for layer in self._buffers.values() for held in layer.values())

    def _num_columns_kept(self, row: int, layout: RowLayout) -> int:
        """How many of a new row's columns its buffers hold; what is left of its padding need not be known."""
        if row >= len(self._kept):
            return layout.pad
        kept = self._kept[row]
        if kept.root != layout.root or kept.pad != layout.pad:
            return layout.pad
        return layout.pad + common_prefix_length(kept.token_ids, layout.token_ids)

    def _oversized(self, num_columns: int) -> bool:
        """Whether the buffers are so much larger than what comes that they should go."""
        needed = 4 * self._max_rows * (max(num_columns, self._max_columns or 0) + _MIN_SPARE_COLUMNS)
        return any(
            held.shape[0] * held.shape[2] > needed for layer in self._buffers.values() for held in layer.values()
        )

    def _grown(self, held: Tensor | None, states: Tensor) -> Tensor:
        """A buffer with room for the forward's columns and some more, holding what `held` held."""
        stop = self._stop
        columns = stop + max(_MIN_SPARE_COLUMNS, stop // 4)
        if self._max_columns is not None:
            columns = max(stop, min(columns, self._max_columns))
        num_rows = max(self._max_rows, self._num_rows)
        grown = zeros((num_rows, states.shape[1], columns, states.shape[3]), states.dtype, states.device)
        if held is not None:
            rows, past = min(num_rows, held.shape[0]), min(held.shape[2], self._start)
            grown[:rows, :, :past] = held[:rows, :, :past]
        return grown

    def _fill(self, layer_idx: int, buffers: dict[str, Tensor]) -> None:
        """Gather the columns that these buffers of a layer lack."""
        device = self._pool.device_of(layer_idx)
        on_device = self._missing_on.get(device)
        if on_device is None:
            on_device = self._missing_on[device] = [slots.to(device) for *_, slots in self._missing]
        for (row, first, end, _), slots in zip(self._missing, on_device, strict=True):
            for name, states in self._pool.gather(layer_idx, slots, buffers).items():
                buffers[name][row, :, first:end].copy_(states[0])


def slot_matrix(rows: Sequence[RowLayout], stop: int, block_size: int) -> Tensor:
    """[R, stop] int64: the slot of each column of each row; a row's padding reads the null block."""
    num_blocks = max(1, max(len(row.block_ids) for row in rows))
    blocks = torch.tensor([[*row.block_ids, *[0] * (num_blocks - len(row.block_ids))] for row in rows])
    positions = torch.arange(stop)[None, :] - torch.tensor([[row.pad] for row in rows])
    is_token = positions >= 0
    positions = positions.clamp_(min=0)
    slots = blocks.gather(1, (positions // block_size).clamp_(max=num_blocks - 1)) * block_size + positions % block_size
    return slots * is_token
