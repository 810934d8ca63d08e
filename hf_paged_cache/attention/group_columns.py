"""What the layers of one group read in a forward: columns that are kept in buffers, or gathered from the pool, and the forward's own.

Columns that a layer lacks are gathered when it is read; which they are is the same for all layers of a group. Columns are
counted from the left, padding included; those of padding hold finite values, and are not attended to.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..blocks.sight import Sight
from ..kv.block_pool import BlockPool
from ..kv.block_tables import BlockTables, read_source
from ..kv.recycled_memory import RecycledMemory, zeros
from ..kv.slot_mapping import ReadSource, RowLayout
from ..kv.transfers import Transfer
from .buffers import NO_BUFFER, Buffer, JoinedSteps, LayerSteps, Step, StepsInPlace, is_exact_on

MIN_SPARE_COLUMNS = 128  # that a buffer has at least when it grows: few decode steps have to grow it


@dataclass(slots=True, eq=False)
class Forward:
    """A forward of the columns `[start, stop)` of the running rows.

    Args:
        rows: asked at most once, where the pool must have all columns before `start`: it has them from then on.
        own_transfer: that goes to the devices of this forward; None: nothing else does.

    Attributes:
        first_own: the first column that layers without a window read of each row by itself.
        keeps_columns: its columns are kept, and those before it read where they are kept.
        is_all: it computes all that its call ever reads, so nothing is kept of it.
        most_rows: that buffers which are made now get at least; 0: as many as run.
        most_columns: that they will have to hold; infinite where nobody knows.
    """

    rows: Callable[[], Sequence[RowLayout]]
    num_rows: int
    start: int
    stop: int
    own_transfer: Transfer | None = None
    first_own: int = field(init=False, default=0)
    keeps_columns: bool = field(init=False, default=False)
    is_all: bool = field(init=False, default=False)
    most_rows: int = field(init=False, default=0)
    most_columns: float = field(init=False, default=math.inf)
    _layouts: Sequence[RowLayout] = field(init=False, default=())

    def layouts(self) -> Sequence[RowLayout]:
        """What `rows` says."""
        if not self._layouts:
            self._layouts = self.rows()
        return self._layouts

    @property
    def transfer(self) -> Transfer:
        """What goes to the devices of this forward."""
        if self.own_transfer is None:
            self.own_transfer = Transfer()
        return self.own_transfer

    def again(self) -> "Forward":
        """The same forward, of which nothing is known yet."""
        return Forward(self.rows, self.num_rows, self.start, self.stop)


class GroupColumns:
    """The columns of the layers with one window, or of those without one.

    On a host a buffer has room for one block more than it keeps. When it is full, its last columns move to its front: one copy a
    block of steps, where `DynamicCache` makes one a step. An exact buffer drops old columns at each step. Both keep a block more
    than the window: steps that the pool has not got, and drafts that may be taken back. Without a window all are kept.

    Args:
        pool: what is gathered from.
        sight: what the layers see; None: all.
        memory: for what is gathered.

    Attributes:
        buffers: layer index -> name -> its buffer.
        step: where the running forward is appended, if it is one token that goes behind the columns held.
    """

    def __init__(self, pool: BlockPool, sight: Sight | None, memory: RecycledMemory) -> None:
        self._pool, self._sight, self._memory = pool, sight, memory
        # columns before a forward that stay
        self._num_kept = math.inf if sight is None else sight.size - 1 + pool.block_size
        self._capacity = self._num_kept + pool.block_size
        self._tables = BlockTables(pool.block_size)  # of rows that are gathered at each forward
        self.buffers: dict[int, dict[str, Buffer]] = {}
        self.drop()

    def drop(self) -> None:
        """Forget all columns."""
        self._pool.release(held.states for held in self._all_buffers())
        self.buffers = {}
        self.step: Step | None = None
        self._first = 0  # column that the forward's layers read first
        self._base = 0  # of the buffers, when a layer is read
        self._next_base = 0  # afterwards: where a forward is longer than there is room for, its last columns stay
        self._room = 0  # columns of a buffer that the forward needs
        self._is_anew = False  # nothing that the buffers hold before `start` is of these rows
        self.pause()

    def pause(self) -> None:
        """Forget what only the running forward needs."""
        self._forward = Forward(list, 0, 0, 0)
        self._tables.drop()
        # to gather: rows, their first column, and what is read up to `start`
        self._missing: list[tuple[slice, int, ReadSource]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(held.states.nbytes for held in self._all_buffers())

    def are_oversized(self, num_rows: int, num_columns: float) -> bool:
        """Whether some buffer is four times what so many rows and columns need."""
        most = 4 * num_rows * (min(num_columns, self._capacity) + MIN_SPARE_COLUMNS)
        for layer in self.buffers.values():  # loops: it runs for every call
            for held in layer.values():
                if held.num_rows * held.num_columns > most:
                    return True
        return False

    def start_forward(self, forward: Forward, held_until: Sequence[int]) -> None:
        """Say what the forward's layers read, and where it lies.

        Args:
            held_until: row -> end of the columns that buffers hold of it.
        """
        self._forward, start, stop = forward, forward.start, forward.stop
        if self._missing and forward.keeps_columns:
            self._memory.drop()
        self._missing, self._is_anew = [], False
        self._first = first = forward.first_own if self._sight is None else self._sight.handed_from(start)
        base = self._next_base
        if base > first or min(held_until[: forward.num_rows]) < start:  # rows new here, or cut
            base = first
            if start:
                self._miss(held_until)
        elif self._sight is not None and self._pool.accelerators:
            base = max(base, start - int(self._num_kept))  # exact buffers begin with the first column that is kept
        next_base, room = base, stop - base
        if room > self._capacity:
            base = next_base = max(base, start - int(self._num_kept))
            room = stop - base
        if room > self._capacity:
            next_base = stop - int(self._num_kept)
            room = max(start - base, stop - next_base)
        self._base, self._next_base, self._room, self.step = base, next_base, room, None
        if stop - start == 1 and next_base == base and not self._missing:
            self.step = Step(base, room, start - base, first - base, stop - first)

    def _miss(self, held_until: Sequence[int]) -> None:
        """Say which columns have to be gathered: of all tokens, each row by itself, so that no copy of all rows is made."""
        forward, first, start = self._forward, self._first, self._forward.start
        everyone = slice(0, forward.num_rows)
        placed = self._pool.rows_in(self._sight, forward.layouts(), first)
        self._is_anew = self._sight is not None or not any(held_until[everyone])
        if not forward.keeps_columns:
            # of a longer forward, the pool may have only what the next one sees in layers with a window
            end = forward.stop if self._sight is None or forward.stop - start == 1 else start
            self._tables.update(placed, forward.transfer)
            self._missing = [(everyone, first, self._tables.columns(first, end))] if first < end else []
        elif self._sight is not None:
            self._missing = [(everyone, first, self._source(placed, first))] if first < start else []
        else:
            held_until = [max(first, held) for held in held_until]
            self._missing = [
                (slice(row, row + 1), held, self._source([layout], held))
                for row, (layout, held) in enumerate(zip(placed, held_until, strict=False))
                if held < start  # 0 gathers the padding, too: what the buffer holds there may not be finite
            ]

    def _source(self, placed: Sequence[RowLayout], first: int) -> ReadSource:
        """Columns of rows up to the forward's, where the pool holds them for these layers."""
        forward = self._forward
        return read_source(placed, first, forward.start, self._pool.block_size, forward.transfer)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `View.read`; without what rows share."""
        forward, first, base = self._forward, self._first, self._base
        if not forward.keeps_columns or forward.is_all:
            return self._gathered(layer_idx, new)
        num_rows, start, stop = forward.num_rows, forward.start, forward.stop
        num_new, buffers, is_ready, read = stop - start, self.buffers.setdefault(layer_idx, {}), False, {}
        for name, states in new.items():
            held = buffers.get(name, NO_BUFFER)
            if not is_ready and (
                held.base != base
                or not held.has_room(self._room)
                or held.num_rows < num_rows
                or states.shape != (num_rows, held.num_heads, num_new, held.head_dim)
                or states.dtype != held.dtype
                or states.device != held.device
                or self._missing
            ):
                self._make_ready(layer_idx, buffers, new)
                held, is_ready = buffers[name], True
            buffer = held.states if held.num_rows == num_rows else held.states.narrow(0, 0, num_rows)
            if self._next_base == base:
                buffer.narrow(2, start - base, num_new).copy_(states.detach() if states.requires_grad else states)
                read[name] = buffer.narrow(2, first - base, stop - first)
            else:  # longer than there is room for: it leaves its last columns
                whole = read[name] = _joined(buffer.narrow(2, first - base, start - first), states)
                held.base = self._next_base
                held.at(slice(num_rows), held.base, stop).copy_(whole[:, :, held.base - first :])
        return read

    def steps(self, layer_idx: int, new: Mapping[str, Tensor]) -> LayerSteps | None:
        """What appends steps behind a layer that was read, given what it wrote; None where they must be read."""
        is_kept = self._forward.keeps_columns and not self._forward.is_all
        if not is_kept or self._next_base != self._base or new.keys() != {"key", "value"}:
            return None
        keys, values = self.buffers[layer_idx]["key"], self.buffers[layer_idx]["value"]
        kind = JoinedSteps if keys.is_exact else StepsInPlace
        return kind(layer_idx, self, keys, values, new["key"], new["value"], self._pool.release)

    def _gathered(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`read`, where no columns are kept."""
        if not self._missing:  # contiguous, as `DynamicCache` gives them
            return {name: states.detach().contiguous() for name, states in new.items()}
        forward, ((_, first, source),) = self._forward, self._missing
        gathered = self._pool.gather(layer_idx, source, new, self._memory)
        if first + source.num_columns == forward.stop:
            read = {name: gathered[name].to(states.dtype) for name, states in new.items()}
            if forward.stop - forward.start > 1:
                for name, states in new.items():  # computed again: read as it is now, and the pool has it as it was
                    read[name][:, :, forward.start - first :].copy_(states.detach())
            return read
        return {name: _joined(gathered[name], states) for name, states in new.items()}

    def _make_ready(self, layer_idx: int, buffers: dict[str, Buffer], new: Mapping[str, Tensor]) -> None:
        """Let a layer's buffers have room for `new`, and hold the columns before it, from the base on.

        What a buffer of another dtype holds may have been rounded, and what is new here is not held: the pool has it.
        """
        forward, base, start = self._forward, self._base, self._forward.start
        rows, not_held, source = slice(forward.num_rows), [], None
        for name, states in new.items():
            held = buffers.get(name, NO_BUFFER)
            is_like = held.is_like(states)
            has_past = is_like and not self._is_anew and held.holds(base, start)
            if not is_like:
                self._pool.tensor_for(layer_idx, name, states)
            if base < start and not has_past and not self._is_anew:
                not_held.append(name)
                if source is None:
                    source = self._source(self._pool.rows_in(self._sight, forward.layouts(), base), base)
            if not is_like or not held.has_room(self._room) or held.num_rows < forward.num_rows:
                made = self._made(states)
                if has_past:
                    common = slice(min(forward.num_rows, held.num_rows))
                    made.at(common, base, start).copy_(held.at(common, base, start))
                self._put(buffers, name, made)
            elif has_past and held.base != base:
                held.move(rows, base, start)
            else:
                held.base = base
        for chosen, first, missing in self._missing:
            gathered = self._pool.gather(layer_idx, missing, new, self._memory)
            for name, states in gathered.items():
                buffers[name].at(chosen, first, start).copy_(states)
        if source is not None:
            for name, states in self._pool.gather(layer_idx, source, not_held).items():
                buffers[name].at(rows, base, start).copy_(states)

    def _made(self, new: Tensor) -> Buffer:
        """A buffer with room for the forward's columns and some more, up to the most that the rows are known to get."""
        room, forward = self._room, self._forward
        most = min(self._capacity, forward.most_columns - self._next_base)  # they may resume after the call
        spare = 0 if is_exact_on(new.device) else max(MIN_SPARE_COLUMNS, room // 4)
        columns = max(room, int(min(room + spare, most)))
        shape = (max(forward.most_rows, forward.num_rows), new.shape[1], columns, new.shape[3])
        return Buffer(zeros(shape, new.dtype, new.device, huge_pages=True), self._base)

    def _put(self, buffers: dict[str, Buffer], name: str, made: Buffer) -> None:
        """Let `made` take the place of a layer's buffer."""
        self._pool.release([buffers.get(name, NO_BUFFER).states])
        buffers[name] = made

    # Between two forwards.

    def columns(self, num_rows: int, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """See `View.columns`."""
        for layer_idx, layer in self.buffers.items():
            states = {
                name: held.at(slice(num_rows), start, stop)
                for name, held in layer.items()
                if held.holds(start, stop) and held.num_rows >= num_rows
            }
            yield layer_idx, states

    def from_column(self, column: int, stop: int) -> Iterator[Tensor]:
        """Of each buffer [R, H, columns, D], what it holds of the columns `[column, stop)`."""
        for held in self._all_buffers():
            if held.base < stop:
                yield held.states[:, :, max(0, column - held.base) : stop - held.base]

    def grow(self, sources: Sequence[int], stop: int) -> None:
        """Row `i` continues as a copy of row `sources[i] <= i`, up to column `stop`.

        Raises:
            torch.OutOfMemoryError: some buffers have grown.
        """
        for layer in self.buffers.values():
            for name, held in list(layer.items()):
                columns = slice(max(0, stop - held.base))
                if held.num_rows < len(sources):
                    grown = zeros((len(sources), *held.states.shape[1:]), held.dtype, held.device, huge_pages=True)
                    grown[: held.num_rows, :, columns] = held.states[:, :, columns]
                    self._put(layer, name, Buffer(grown, held.base))
                states = layer[name].states
                for row in range(len(sources) - 1, -1, -1):  # a source is never right of its copy
                    if sources[row] != row:
                        states[row, :, columns] = states[sources[row], :, columns]

    def _all_buffers(self) -> Iterable[Buffer]:
        return (held for layer in self.buffers.values() for held in layer.values())


def _joined(past: Tensor, new: Tensor) -> Tensor:
    """Both one after the other, contiguous, in the dtype of `new`, and without a graph."""
    new = new.detach()
    return torch.cat((past.to(new.dtype), new), dim=2) if past.shape[2] else new.contiguous()
