"""The buffers of a view, a tensor for keys and one for values in each layer, and the fast path that appends a decode step to them.

Columns are counted from the left, padding included.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_NUM_SLOTS = 16  # of a buffer that are cut at a time, for the steps to come


class Buffer:
    """One tensor of a layer, [row capacity, H, column capacity, D]; its first column is column `base` of the rows.

    columns of a row: [base, valid) a copy of the pool, but for held steps | [valid, ..) unspecified, finite

    On a host a forward is appended in place, to spare columns. On an accelerator it is joined by `torch.cat` into a new tensor,
    as a `DynamicCache` does: a copy costs nothing where a step waits for its launches. Kernels are chosen, and round, by strides,
    so without a window attention gives the same bits.

    Attributes:
        is_exact: it is joined, and has no spare columns.
    """

    __slots__ = ("base", "device", "dtype", "head_dim", "is_exact", "num_columns", "num_heads", "num_rows", "states")

    def __init__(self, states: Tensor, base: int) -> None:
        self.states = states
        self.base = base
        self.num_rows, self.num_heads, self.num_columns, self.head_dim = states.shape
        self.dtype, self.device, self.is_exact = states.dtype, states.device, is_exact_on(states.device)

    def has_room(self, num_columns: int) -> bool:
        """Whether that many columns may be in it."""
        return self.num_columns == num_columns if self.is_exact else self.num_columns >= num_columns

    def at(self, rows: slice, start: int, stop: int) -> Tensor:
        """Columns `[start, stop)` of some rows."""
        return self.states[rows, :, start - self.base : stop - self.base]

    def is_like(self, new: Tensor) -> bool:
        """Whether such states can be appended."""
        is_sized = new.dim() == 4 and new.shape[1::2] == (self.num_heads, self.head_dim)
        return is_sized and new.dtype == self.dtype and new.device == self.device

    def holds(self, start: int, stop: int) -> bool:
        """Whether the columns `[start, stop)` lie in it."""
        return self.base <= start and stop - self.base <= self.num_columns

    def move(self, rows: slice, base: int, stop: int) -> None:
        """Let the columns `[base, stop)` be the first ones.

        Interrupted, it may have overwritten columns at the front. Held steps are not among them: a step moves only a full
        buffer, and they are its last block.
        """
        self.states[rows, :, : stop - base] = self.at(rows, base, stop).clone()  # the two may overlap
        self.base = base


def is_exact_on(device: torch.device) -> bool:
    """Whether buffers there are exact."""
    return device.type != "cpu"


NO_BUFFER = Buffer(torch.empty(0, 0, 0, 0, device="cpu"), 0)


class Step(NamedTuple):
    """Where the layers of a group write and read a token of each row.

    Attributes:
        base: the column that their buffers begin with.
        room: columns that the buffers must have.
        column: of the buffers, that is written.
        first, length: of the columns of the buffers that are read.
    """

    base: int
    room: int
    column: int
    first: int
    length: int


class Steps(Protocol):
    """A group of layers.

    Attributes:
        step: the running forward, if it is a step that goes behind the columns held.
    """

    step: Step | None


class LayerSteps:
    """Appends decode steps to one layer's keys and values in few operations: a step's time is mostly launches.

    Args:
        layer_idx: the layer.
        group: says where the running step is written and read.
        keys, values: the layer's buffers.
        key, value: [R, H, T, D], of any forward: steps with the same R, H, D, dtype and device can be appended.
        release: is told of memory that is let go; see `BlockPool.release`.

    Attributes:
        writes: (layer index, name) of what it writes.
    """

    __slots__ = ("_group", "_key_shape", "_keys", "_kind", "_release", "_value_shape", "_values", "writes")

    def __init__(
        self,
        layer_idx: int,
        group: Steps,
        keys: Buffer,
        values: Buffer,
        key: Tensor,
        value: Tensor,
        release: Callable[[Iterable[Tensor]], None],
    ) -> None:
        self.writes = ((layer_idx, "key"), (layer_idx, "value"))
        self._group, self._keys, self._values, self._release = group, keys, values, release
        self._key_shape, self._value_shape = ((*new.shape[:2], 1, new.shape[3]) for new in (key, value))
        self._kind = key.dtype, value.dtype, key.device, value.device

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write a token of each row, and return what its attention reads. None, with nothing changed: `View.read` is to be asked.

        Shapes: [R, H, 1, D]; returns [R, H, columns, D].

        Raises:
            torch.OutOfMemoryError: there is none for what is joined; `View.read` may be asked.
        """
        step = self._group.step
        if step is None or key.shape != self._key_shape or value.shape != self._value_shape:
            return None
        if (key.dtype, value.dtype, key.device, value.device) != self._kind:
            return None
        return self._append(key, value, step)

    def _append(self, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor] | None:
        raise NotImplementedError


class StepsInPlace(LayerSteps):
    """Steps that are written to spare columns."""

    __slots__ = ("_key_slots", "_key_strides", "_slots_at", "_value_slots", "_value_strides")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        keys, values = self._keys, self._values
        self._key_strides, self._value_strides = keys.states.stride(), values.states.stride()
        self._key_slots = self._value_slots = tuple[Tensor, ...]()
        self._slots_at = 0  # the column of the first

    def _append(self, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor] | None:
        base, room, column, first, length = step
        keys, values = self._keys, self._values
        if keys.base != base or values.base != base or keys.num_columns < room or values.num_columns < room:
            return None
        slot = column - self._slots_at
        if not 0 <= slot < len(self._key_slots):
            self._cut(column)
            slot = 0
        self._key_slots[slot].copy_(key)
        self._value_slots[slot].copy_(value)
        # `narrow` takes twice the time
        rows, heads, _, size = self._key_shape
        strides = self._key_strides
        read_keys = keys.states.as_strided((rows, heads, length, size), strides, first * strides[2])
        rows, heads, _, size = self._value_shape
        strides = self._value_strides
        return read_keys, values.states.as_strided((rows, heads, length, size), strides, first * strides[2])

    def _cut(self, column: int) -> None:
        """Cut the columns from here on, some at a time: that takes a fifth of the time that each takes by itself."""
        buffers, num_rows = (self._keys, self._values), self._key_shape[0]
        num_slots = min(_NUM_SLOTS, *(buffer.num_columns - column for buffer in buffers))
        self._key_slots, self._value_slots = (
            buffer.states.narrow(0, 0, num_rows).narrow(2, column, num_slots).chunk(num_slots, 2) for buffer in buffers
        )
        self._slots_at = column


class JoinedSteps(LayerSteps):
    """Steps of exact buffers: what they hold, and the step, become one new tensor."""

    __slots__ = ()

    def _append(self, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor] | None:
        base, _, column, first, length = step
        num_rows, joined = key.shape[0], []
        for buffer, new in ((self._keys, key), (self._values, value)):
            states, before = buffer.states, base - buffer.base
            if before or buffer.num_columns != column or buffer.num_rows != num_rows:
                if before < 0 or buffer.num_columns < before + column or buffer.num_rows < num_rows:
                    return None
                states = states.narrow(0, 0, num_rows).narrow(2, before, column)
            joined.append(torch.cat((states, new), 2))
        for buffer, states in ((self._keys, joined[0]), (self._values, joined[1])):
            self._release((buffer.states,))
            buffer.states, buffer.base, buffer.num_rows, buffer.num_columns = states, base, num_rows, column + 1
        if first:
            return joined[0].narrow(2, first, length), joined[1].narrow(2, first, length)
        return joined[0], joined[1]
