"""Owns what attention reads of the running rows: for each group of layers, the columns that they see.

Layers with the same window are a group; those without one are a group, too. A view keeps a copy of the columns that a group
sees, and adds each forward's (see `buffers`). Or it keeps none, and gathers each layer's columns from the pool: with
`attention="gather"`, where memory ran out, in a forward behind which rows are multiplied, and for beams with long tails. Either
way layers without a window have once what rows share (see
`shared_reads`), and of each row what follows. `start_forward` says what a forward reads, and where it comes from.

Copies may be dropped between any two forwards, and are made again; but for the columns of held steps, see
`call/held_steps.py`, which must have been written to the pool first. Columns are counted from the left, padding included;
those of padding hold finite values, and are not attended to.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool, reorder_rows
from ..kv.block_tables import BlockTables, read_source
from ..kv.recycled_memory import RecycledMemory, zeros
from ..kv.slot_mapping import ReadSource, RowLayout
from ..kv.transfers import Transfer
from .buffers import NO_BUFFER, Buffer, JoinedSteps, LayerSteps, Step, StepsInPlace, is_exact_on
from .causal import CausalSquare
from .shared_reads import LazySteps, ReadOnce, SharedReads

# Tokens of tails, to one that their rows share, of which a view keeps copies where rows change places: 128 beams behind 528 tokens
# were 3 per cent quicker with their tails of 5 tokens kept.
_MOST_TAILS = 1.25
MIN_SPARE_COLUMNS = 128  # that a buffer has at least when it grows: few decode steps have to grow it


class _Group:
    """The layers with one window, or with none: what they read in the running forward.

    On a host a buffer has room for one block more than it keeps. When it is full, its last columns move to its front: one copy a
    block of steps, where `DynamicCache` makes one a step. An exact buffer drops old columns at each step. Both keep a block more
    than the window: steps that the pool has not got, and drafts that may be taken back. Without a window all are kept.
    """

    def __init__(self, window: int | None, block_size: int) -> None:
        self.window = window
        self.num_kept = math.inf if window is None else window - 1 + block_size  # columns before a forward that stay
        self.capacity = self.num_kept + block_size
        self.tables = BlockTables(block_size)  # of rows that are gathered at each forward
        self.reset()

    def reset(self) -> None:
        """No rows."""
        self.tables.drop()
        self.first = 0  # column that the forward's layers read first
        self.base = 0  # of the buffers, when a layer is read
        self.next_base = 0  # afterwards: where a forward is longer than there is room for, its last columns stay
        self.room = 0  # columns of a buffer that the forward needs
        self.missing: list[tuple[slice, int, ReadSource]] = []  # to gather: rows, their first column, and up to `start`
        self.step: Step | None = None  # the forward, if it is one that goes behind the columns held
        self.is_anew = False  # nothing that the buffers hold before `start` is of these rows


class View:
    """What attention reads of the rows that run.

    Buffers: layer index -> name -> `Buffer`. Columns that are missing are gathered when a layer is read; which they are is
    the same for all layers of a group. Columns that the next rows have in common with these are kept.

    Args:
        pool: what is gathered from.
        window_of: layer index -> its window, in tokens: a query sees itself and the `window - 1` columns before it.
        keeps_copies: whether copies are kept beside the pool.

    Attributes:
        window_of: as it is now; whoever asks how far a layer sees, asks here.
        most_copies: 1 if a copy of the rows' columns may be kept, else 0; the store's budget counts it.
        keeps_columns: the running forward's columns are kept here, so the pool may get a step's later.
        steps: layer index -> what a step may be appended with, in place of `read`, where `may_append`.
    """

    def __init__(self, pool: BlockPool, window_of: Mapping[int, int], *, keeps_copies: bool = True) -> None:
        self.most_copies = int(keeps_copies)
        self._may_keep = keeps_copies  # not where memory has run out
        self._multiply_at = 0  # the column behind which the rows are multiplied
        self._change_places = False  # rows do, at each step
        self.keeps_columns = keeps_copies
        self._pool = pool
        self._memory = RecycledMemory()  # for what is gathered
        self._buffers: dict[int, dict[str, Buffer]] = {}
        self.steps: dict[int, LayerSteps | LazySteps] = {}
        self._shared = SharedReads(pool)
        self._square: CausalSquare | None = None  # the forward, if it is attended as one
        self._kept: list[RowLayout] = []  # row -> what the buffers hold of it, as of the last `keep`
        self._valid: list[int] = []  # row -> end of the columns that the buffers hold of it
        self._max_rows, self._max_columns = 0, math.inf
        self._num_rows = self._start = self._stop = 0  # of the forward
        self._layouts: Callable[[], Sequence[RowLayout]] = list
        self._is_all = False  # the forward computes all that its call ever reads: nothing is kept of it
        self._may_change = bool(window_of)
        self._group(window_of)

    def _group(self, window_of: Mapping[int, int]) -> None:
        size = self._pool.block_size
        self._all = _Group(None, size)  # layers without a window, also those that no config names
        of_window = {window: _Group(window, size) for window in sorted({*window_of.values()})}
        self._groups = [self._all, *of_window.values()]
        self._group_of = {layer_idx: of_window[window] for layer_idx, window in window_of.items()}
        self.window_of = window_of  # last: interrupted above, the next rows group them again

    def follow(self, window_of: Mapping[int, int]) -> None:
        """Rows begin, with these windows.

        A view whose layers had none when it was made keeps reading all columns; the mask hides what a window does not show.
        """
        if self._may_change and window_of != self.window_of:
            self.drop()
            self._group(window_of)

    def follow_attention(self, implementation: str | None) -> None:
        """Rows begin, with this attention of transformers: all but "sdpa" are given dense tensors."""
        self._shared.is_sdpa = implementation == "sdpa"

    def first_column(self, layer_idx: int, start: int) -> int:
        """The first column that the layer reads in a forward from column `start` on.

        Examples:
            >>> view = View(BlockPool(4), {1: 8})
            >>> view.first_column(0, 20), view.first_column(1, 20)
            (0, 13)
        """
        window = self.window_of.get(layer_idx)
        return 0 if window is None else max(0, start - window + 1)

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the pool."""
        held = sum(buffer.states.nbytes for layer in self._buffers.values() for buffer in layer.values())
        return held + self._memory.num_bytes + self._shared.num_bytes

    @property
    def backend(self) -> str:
        """What computes attention over what rows share."""
        return self._shared.backend

    @property
    def read_once(self) -> ReadOnce:
        """Of the running call, or of the last one."""
        return self._shared.read_once

    def start_call(self) -> None:
        """Another call is counted from here on."""
        self._shared.read_once = ReadOnce()

    def read_once_whatever_it_costs(self) -> None:
        """Share reads, and attend causal squares, also where that does not pay: for trials of models."""
        self._shared.weighs_launches = False

    # A forward.

    def start_rows(
        self,
        rows: Sequence[RowLayout],
        num_columns: int,
        *,
        max_rows: int,
        max_columns: float,
        in_chunks: bool = False,
    ) -> None:
        """Other rows run from here on.

        Args:
            num_columns: where their first forward stops.
            max_rows, max_columns: the most there will be, as far as the call says; else infinite.
            in_chunks: their prompt is computed in chunks, for the same bits. So whatever they share, each is read by itself:
                parts that are merged round otherwise.
        """
        self._max_rows, self._max_columns = max(max_rows, len(rows)), max_columns
        self.keeps_columns = self._may_keep = self.most_copies > 0
        self._change_places = False
        self._shared.start_rows(in_chunks=in_chunks)
        are_multiplied = len(rows) < max_rows < math.inf and not in_chunks and self._shared.may_be_lazy
        self._multiply_at = num_columns if are_multiplied else 0
        most = num_columns if math.isinf(max_columns) else max(num_columns, max_columns)
        if self._hold_much_more_than(most):
            self.drop()
        kept = [was.num_columns_in_common(row) for was, row in zip(self._kept, rows, strict=False)]
        self._valid, self._kept = kept + [0] * (len(rows) - len(kept)), []

    def _hold_much_more_than(self, num_columns: float) -> bool:
        """Whether the copies of some layer are four times what these rows will need."""
        for layer_idx, layer in self._buffers.items():
            needed = min(num_columns, self._group_of.get(layer_idx, self._all).capacity) + MIN_SPARE_COLUMNS
            for held in layer.values():
                if held.num_rows * held.num_columns > 4 * self._max_rows * needed:
                    return True
        return False

    def start_forward(
        self,
        rows: Callable[[], Sequence[RowLayout]],
        num_rows: int,
        start: int,
        stop: int,
        transfer: Transfer | None = None,
    ) -> None:
        """A forward of columns `[start, stop)` of `num_rows` rows begins.

        Args:
            rows: asked only where columns are gathered; then the pool has all of them before `start`.
            transfer: that goes to the devices of this forward; None: nothing else does.
        """
        self._num_rows, self._start, self._stop = num_rows, start, stop
        first_own, layouts = 0, None
        if num_rows > 1 or self._shared.plan is not None:
            if not self.keeps_columns:
                layouts = rows()
                self._shared.require_of(layouts)
            if self._shared.must_plan(num_rows, start, stop):
                layouts = rows() if layouts is None else layouts
                transfer = Transfer() if transfer is None else transfer
                self._follow(layouts, start, transfer)
            first_own = self._shared.start_forward(start, stop)
        keeps_columns = self._may_keep and self._multiply_at < stop <= self._end_of_kept(num_rows)
        if self.keeps_columns != keeps_columns:
            rows()  # the pool has all of them from here on
            self._leave_buffers()
            self.keeps_columns = keeps_columns
        self._square = None
        if start and stop - start > 1 and self._shared.plan is None and self._shared.may_be_lazy:
            if CausalSquare.pays(start, stop) or not self._shared.weighs_launches:
                self._square = CausalSquare(start, stop, self._shared.look)
        self._is_all = not start and stop >= self._max_columns
        self._layouts, valid = rows, self._valid
        valid += [0] * (num_rows - len(valid))  # rows taken over from another cache, or multiplied
        lacks_columns = min(valid[:num_rows]) < start
        for group in self._groups:
            if group.missing and self.keeps_columns:
                self._memory.drop()
            group.missing, group.is_anew = [], False
            window, base = group.window, group.next_base
            first = first_own if window is None else max(0, start - window + 1)
            group.first = first
            if lacks_columns or base > first:  # rows new here, or cut
                base = first
                if start:
                    layouts = rows() if layouts is None else layouts
                    transfer = Transfer() if transfer is None else transfer
                    self._miss(group, layouts, transfer)
            elif window is not None and self._pool.accelerators:
                # exact buffers begin with the first column that is kept
                base = max(base, start - int(group.num_kept))
            next_base, room = base, stop - base
            if room > group.capacity:
                base = next_base = max(base, start - int(group.num_kept))
                room = stop - base
            if room > group.capacity:
                next_base = stop - int(group.num_kept)
                room = max(start - base, stop - next_base)
            group.base, group.next_base, group.room = base, next_base, room
            group.step = None
            if stop - start == 1 and next_base == base and not group.missing:
                group.step = Step(base, room, start - base, first - base, stop - first)
        if self.keeps_columns:
            valid[:num_rows] = [0 if self._is_all else stop] * num_rows

    def _end_of_kept(self, num_rows: int) -> float:
        """The last column up to which tails are kept: all together have at most `_MOST_TAILS` times the tokens that the rows share.

        Infinite where rows stay in their places.
        """
        plan = self._shared.plan
        if plan is None or not self._change_places:
            return math.inf
        return plan.first_own + (_MOST_TAILS * plan.first_own) // num_rows

    def change_places(self) -> None:
        """Rows fork and change places at each step. Long tails are then read from the pool: a copy would be reordered at each step."""
        self._change_places = True

    def _follow(self, layouts: Sequence[RowLayout], start: int, transfer: Transfer) -> None:
        """Let the forward's rows read once what they share. The pool has all of them before its first column."""
        plan = self._shared.find(layouts, start)
        if not self._shared.may_stay(plan, start):
            self.drop()
            self._shared.follow(plan, start, transfer)

    def _miss(self, group: _Group, layouts: Sequence[RowLayout], transfer: Transfer) -> None:
        """Say what a group's layers have to gather: of all columns each row by itself, so that no copy of all of them is made."""
        window, first, start = group.window, group.first, self._start
        placed, everyone = self._pool.rows_in(window, layouts, first), slice(0, self._num_rows)
        group.is_anew = window is not None or not any(self._valid[everyone])
        if not self.keeps_columns:
            # of a longer forward, the pool may have only what the next one sees in layers with a window
            end = self._stop if window is None or self._stop - start == 1 else start
            group.tables.update(placed, transfer)
            group.missing = [(everyone, first, group.tables.columns(first, end))] if first < end else []
        elif window is not None:
            group.missing = [(everyone, first, self._source(placed, first, transfer))] if first < start else []
        else:
            held_until = [max(first, valid) for valid in self._valid]
            group.missing = [
                (slice(row, row + 1), held, self._source([layout], held, transfer))
                for row, (layout, held) in enumerate(zip(placed, held_until, strict=False))
                if held < start  # 0 gathers the padding, too: what the buffer holds there may not be finite
            ]

    def _source(self, placed: Sequence[RowLayout], first: int, transfer: Transfer | None = None) -> ReadSource:
        """Columns of rows up to the forward's, where the pool holds them for the layers of a group."""
        return read_source(placed, first, self._start, self._pool.block_size, transfer)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What attention reads of a layer that writes `new`; where columns are kept, `new` is appended to them.

        Shapes: R rows, H heads, T columns of the forward, D head size.

        Args:
            new: name -> [R, H, T, D]. Where columns are not kept, it is in the pool already.

        Returns:
            name -> [R, H, stop - first, D]: the columns `[first, start)` of the rows, then `new`. The first one is 0, or that
            of the layer's window. Valid until the next forward, and read only: it may be the view's own memory. Without a
            graph: `GradientPath.join` puts `new` itself there.

        Raises:
            PoolArgumentError: the layer was made with other heads or head size.
            torch.OutOfMemoryError: `do_without_copies` may help.
        """
        group = self._group_of.get(layer_idx, self._all)
        is_lazy = group is self._all and (self._square is not None or self._shared.plan is not None)
        if not self.keeps_columns or self._is_all:
            read = self._gathered(group, layer_idx, new)
            return self._lazily(layer_idx, new, read) if is_lazy else read
        num_rows, start, stop = self._num_rows, self._start, self._stop
        first, base, room, num_new = group.first, group.base, group.room, stop - start
        buffers, is_ready, read = self._buffers.setdefault(layer_idx, {}), False, {}
        for name, states in new.items():
            held = buffers.get(name, NO_BUFFER)
            if not is_ready and (
                held.base != base
                or not held.has_room(room)
                or held.num_rows < num_rows
                or states.shape != (num_rows, held.num_heads, num_new, held.head_dim)
                or states.dtype != held.dtype
                or states.device != held.device
                or group.missing
            ):
                self._make_ready(group, layer_idx, buffers, new)
                held, is_ready = buffers[name], True
            buffer = held.states if held.num_rows == num_rows else held.states.narrow(0, 0, num_rows)
            if group.next_base == base:
                buffer.narrow(2, start - base, num_new).copy_(states.detach() if states.requires_grad else states)
                read[name] = buffer.narrow(2, first - base, stop - first)
            else:  # longer than there is room for: it leaves its last columns
                whole = read[name] = _joined(buffer.narrow(2, first - base, start - first), states)
                held.base = group.next_base
                held.at(slice(num_rows), held.base, stop).copy_(whole[:, :, held.base - first :])
        if group.next_base == base and read.keys() == {"key", "value"} and self._square is None:
            keys, values = buffers["key"], buffers["value"]
            kind = JoinedSteps if keys.is_exact else StepsInPlace
            steps = kind(layer_idx, group, keys, values, new["key"], new["value"], self._pool.release)
            self.steps[layer_idx] = LazySteps(layer_idx, self._shared, steps) if is_lazy else steps
        return self._lazily(layer_idx, new, read) if is_lazy else read

    def _lazily(self, layer_idx: int, new: Mapping[str, Tensor], read: dict[str, Tensor]) -> dict[str, Tensor]:
        """What attention reads of a layer, where more is known of it than a mask says."""
        if self._square is not None:
            return self._square.read(read)
        return self._shared.read(layer_idx, new, read, None if self._may_keep else self._memory)

    def _gathered(self, group: _Group, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`read`, where no columns are kept."""
        if not group.missing:  # contiguous, as `DynamicCache` gives them
            return {name: states.detach().contiguous() for name, states in new.items()}
        ((_, first, source),) = group.missing
        gathered = self._pool.gather(layer_idx, source, new, self._memory)
        if first + source.num_columns == self._stop:
            read = {name: gathered[name].to(states.dtype) for name, states in new.items()}
            if self._stop - self._start > 1:
                for name, states in new.items():  # computed again: read as it is now, and the pool has it as it was
                    read[name][:, :, self._start - first :].copy_(states.detach())
            return read
        return {name: _joined(gathered[name], states) for name, states in new.items()}

    def _make_ready(self, group: _Group, layer_idx: int, buffers: dict[str, Buffer], new: Mapping[str, Tensor]) -> None:
        """Let a layer's buffers have room for `new`, and hold the columns before it, from the group's base on.

        What a buffer of another dtype holds may have been rounded, and what is new here is not held: the pool has it.
        """
        base, start, rows = group.base, self._start, slice(self._num_rows)
        not_held, source = [], None
        for name, states in new.items():
            held = buffers.get(name, NO_BUFFER)
            is_like = held.is_like(states)
            has_past = is_like and not group.is_anew and held.holds(base, start)
            if not is_like:
                self._pool.tensor_for(layer_idx, name, states)
            if base < start and not has_past and not group.is_anew:
                not_held.append(name)
                if source is None:
                    source = self._source(self._pool.rows_in(group.window, self._layouts(), base), base)
            if not is_like or not held.has_room(group.room) or held.num_rows < self._num_rows:
                made = self._made(group, states)
                if has_past:
                    common = slice(min(self._num_rows, held.num_rows))
                    made.at(common, base, start).copy_(held.at(common, base, start))
                self._put(layer_idx, name, made)
            elif has_past and held.base != base:
                held.move(rows, base, start)
            else:
                held.base = base
        for chosen, first, missing in group.missing:
            gathered = self._pool.gather(layer_idx, missing, new, self._memory)
            for name, states in gathered.items():
                buffers[name].at(chosen, first, start).copy_(states)
        if source is not None:
            for name, states in self._pool.gather(layer_idx, source, not_held).items():
                buffers[name].at(rows, base, start).copy_(states)

    def _made(self, group: _Group, new: Tensor) -> Buffer:
        """A buffer with room for the forward's columns and some more, up to the most that the rows are known to get."""
        room, most = group.room, self._max_columns if self._stop <= self._max_columns else math.inf
        most = min(most, self._end_of_kept(self._num_rows))
        most = min(group.capacity, most - group.next_base)  # they may resume after the call
        spare = 0 if is_exact_on(new.device) else max(MIN_SPARE_COLUMNS, room // 4)
        columns = max(room, int(min(room + spare, most)))
        num_rows = self._num_rows
        if self._shared.model_looks:  # else rows that are multiplied are made anew
            num_rows = max(self._max_rows, num_rows)
        shape = (num_rows, new.shape[1], columns, new.shape[3])
        return Buffer(zeros(shape, new.dtype, new.device, huge_pages=True), group.base)

    def _put(self, layer_idx: int, name: str, made: Buffer) -> None:
        """Let `made` take the place of a layer's buffer."""
        self.steps.pop(layer_idx, None)
        buffers = self._buffers[layer_idx]
        replaced = buffers.get(name, NO_BUFFER).states
        self._pool.release([replaced])
        buffers[name] = made

    def do_without_copies(self) -> None:
        """Memory has run out: forget all copies, also in the middle of a forward, and keep none until other rows start."""
        layouts, num_rows, start, stop = self._layouts, self._num_rows, self._start, self._stop
        self._go_without()
        self.start_forward(layouts, num_rows, start, stop)

    def _go_without(self) -> None:
        self.drop()
        self.keeps_columns = self._may_keep = False

    # Between two forwards.

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Of each layer name -> [R, H, stop - start, D], columns as they were written here, where they are kept."""
        for layer_idx, layer in self._buffers.items():
            states = {
                name: held.at(slice(self._num_rows), start, stop)
                for name, held in layer.items()
                if held.holds(start, stop) and held.num_rows >= self._num_rows
            }
            yield layer_idx, states

    def would_keep(self, sources: Sequence[int]) -> bool:
        """Whether all that is held of the rows goes with them, if these are selected."""
        return self.keeps_columns and len(sources) == len(self._valid) and self._shared.fits(sources)

    def select(self, sources: Sequence[int], shared_columns: int = 0, index: Tensor | None = None) -> None:
        """See `Follower`. Where there are fewer rows than before, or some change places and others are new, copies are dropped."""
        stop, num_rows = max(self._valid, default=0), len(sources)
        is_growing = num_rows > len(self._valid) and all(source <= row for row, source in enumerate(sources))
        if not stop:
            self._valid = []
        elif not is_growing and num_rows != len(self._valid):
            self.drop()
        elif is_growing and self._shared.model_looks:
            self._grow(sources, stop)
        elif is_growing:
            self.drop()  # more rows share more: what they read is made anew
        elif not self._shared.fits(sources):
            self.drop()
        elif list(sources) != list(range(num_rows)) and shared_columns < stop:
            held = (held for layer in self._buffers.values() for held in layer.values() if held.base < stop)
            columns = (each.states[:, :, max(0, shared_columns - each.base) : stop - each.base] for each in held)
            try:
                if not reorder_rows(columns, sources, index):
                    self._may_keep = False  # from the next forward on, which first writes them to the pool
            except torch.OutOfMemoryError:
                self._go_without()

    def _grow(self, sources: Sequence[int], stop: int) -> None:
        """Row `i` continues as a copy of row `sources[i] <= i`."""
        self._num_rows = len(sources)
        try:
            for layer_idx, layer in self._buffers.items():
                for name, held in list(layer.items()):
                    columns = slice(max(0, stop - held.base))
                    if held.num_rows < len(sources):
                        grown = zeros((len(sources), *held.states.shape[1:]), held.dtype, held.device, huge_pages=True)
                        grown[: held.num_rows, :, columns] = held.states[:, :, columns]
                        self._put(layer_idx, name, Buffer(grown, held.base))
                    states = layer[name].states
                    for row in range(len(sources) - 1, -1, -1):  # a source is never right of its copy
                        if sources[row] != row:
                            states[row, :, columns] = states[sources[row], :, columns]
        except torch.OutOfMemoryError:
            self._go_without()
        self._valid = [self._valid[source] for source in sources] if self._buffers else [0] * len(sources)

    def crop(self, start: int, stop: int) -> None:
        """See `Follower`."""
        self._valid = [min(valid, start) for valid in self._valid]

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """The rows end. Rows that start with the same tokens may use the columns of those named here, as far as they are held."""
        if self.keeps_columns and self._shared.plan is None:
            self._kept = [row.cut(valid) for row, valid in zip(rows, self._valid, strict=False)]
        else:
            self.drop()

    def let_go(self) -> None:
        """The pool's memory is about to be replaced: hold none of it, or it would be there twice."""
        self._shared.let_go()

    def pause(self) -> None:
        """A call has ended; its rows may resume. Gives back memory that only a running forward needs."""
        self._square = None
        self._shared.let_go()
        self._memory.drop()
        for group in self._groups:
            group.missing = []
            group.tables.drop()

    def drop(self) -> None:
        """Forget all copies."""
        self._leave_buffers()
        self._shared.drop()

    def _leave_buffers(self) -> None:
        """Forget all copies but those of what rows share."""
        self._pool.release(held.states for layer in self._buffers.values() for held in layer.values())
        self._buffers, self.steps = {}, {}
        self._kept, self._valid, self._layouts = [], [], list
        for group in self._groups:
            group.reset()
        self._memory.drop()


def _joined(past: Tensor, new: Tensor) -> Tensor:
    """Both one after the other, contiguous, in the dtype of `new`, and without a graph."""
    new = new.detach()
    return torch.cat((past.to(new.dtype), new), dim=2) if past.shape[2] else new.contiguous()
