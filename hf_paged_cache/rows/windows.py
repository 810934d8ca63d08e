"""Owns the columns of layers with a window: the last columns of each row.

These are as many as attention reads, and some before them.

columns of a row: [0, base) passed and gone | [base, n) lie in `held`, from its first column on
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks.sight import Sight
from ..errors import ForwardMismatchError
from ..kv.zeroed import zeros
from . import memory
from .layers import Owner, RowsLayer
from .memory import Shape, Streams

_LEAST_SPARE, _MOST_SPARE = 64, 1024  # room behind the columns that stay; when it is full, these move to the front


class WindowLayer(RowsLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """`WindowLayer` holds the keys and values of a layer with a window, [R, H, columns, D].

    Args:
        sight: window of the layer.
        margin: number of columns that stay as well, before those that the next token sees. So a block's end lies among
            the columns that are held, and drafts can be taken back.
    """

    is_sliding = True

    def __init__(self, layer_idx: int, owner: Callable[[], Owner | None], sight: Sight, margin: int) -> None:
        super().__init__(layer_idx, owner)
        self.sight, self.sliding_window, self.most_kept = sight, sight.size, sight.most_needed + margin

    def room_for(self, num_columns: int) -> int:
        """Return how many columns to make room for where `num_columns` will come."""
        spare = min(max(_LEAST_SPARE, self.sight.size), _MOST_SPARE)
        return max(1, min(num_columns, self.most_kept + spare))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values, [R, H, T, D]; return what attention reads, which later forwards write over."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states)
        n, length, held = self.n, key_states.shape[2], self.held
        first, at, stop = self.sight.handed_from(n), n - self.base, n + length - self.base
        if held is not None and held[0].shape[0] != key_states.shape[0]:
            raise ForwardMismatchError(
                f"layer {self.layer_idx} holds {held[0].shape[0]} rows, and a forward writes {key_states.shape[0]}; "
                "cache.reset() it for another batch"
            )
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        if (
            held is None
            or stop > self.room
            or held[0].dtype != key_states.dtype
            or held[1].dtype != value_states.dtype
            or held[0].device != key_states.device
        ):
            return self._move(key_states, value_states, first)
        keys, values = held
        keys.narrow(2, at, length).copy_(key_states)
        values.narrow(2, at, length).copy_(value_states)
        self.n, first = n + length, first - self.base
        return keys.narrow(2, first, stop - first), values.narrow(2, first, stop - first)

    def _move(self, key_states: Tensor, value_states: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Append where there is no room behind what is held: the last columns become the first ones of the memory.

        Args:
            first: first column that attention reads.
        """
        n, stop, old = self.n, self.n + key_states.shape[2], self.held
        lowest = n if old is None else self.base
        room = self.room_for(max(self.wanted, stop + _LEAST_SPARE))
        num_kept = min(stop - lowest, room) if n == 0 or stop - lowest <= room else self.most_kept
        start = min(first, stop - num_kept)
        read, made = [], []
        for place, new in enumerate((key_states, value_states)):
            held = None if old is None else old[place]
            if held is not None and n > self.filled:  # promote as concatenation does, unless all is filled
                new = new.to(torch.promote_types(held.dtype, new.dtype))
            whole = new
            if held is not None and start < n:
                whole = torch.cat([held[:, :, start - self.base : n - self.base].to(new), new], dim=2)
            if held is None or held.shape[2] < room or held.dtype != new.dtype or held.device != new.device:
                held, self.is_alone = zeros((*new.shape[:2], room, new.shape[3]), new.dtype, new.device), True
            held[:, :, :num_kept] = whole[:, :, whole.shape[2] - num_kept :]
            made.append(held)
            read.append(whole[:, :, first - start :])
        self.dtype, self.device = made[0].dtype, key_states.device
        self.held, self.base, self.n, self.room = (made[0], made[1]), stop - num_kept, stop, made[0].shape[2]
        return read[0], read[1]

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        """Number of columns written, those that the window has passed included."""
        return self.n

    def get_max_length(self) -> int:
        """Return the size of the window, as `DynamicSlidingWindowLayer` does."""
        return self.sight.size

    def activate_past_recording(self) -> None:
        """Do nothing: a margin before the window is held in any case."""

    is_alone = False  # True if `held` belongs to this layer alone; `is_own` says so of layers without a window

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int = 0) -> None:
        """Let the layer lie in these tensors from here on; see `RowsLayer`."""
        super().lie_in(tensors, n, base)
        self.is_alone = False

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the layer holds all that the token after the first `n` columns sees."""
        return self.held is not None and self.sight.needed(n).start >= self.base and n <= self.n

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the columns that the next token sees, where they lie."""
        assert self.held is not None
        first = max(0, self.sight.needed(self.n).start - self.base)
        keys, values = self.held
        return keys.narrow(2, first, self.n - self.base - first), values.narrow(2, first, self.n - self.base - first)

    def _take(self, place: int, states: Tensor | None) -> None:
        n = self.n
        super()._take(place, states)
        self.is_alone, self.is_own = True, False
        if states is not None and n > states.shape[2]:
            self.n, self.base = n, n - states.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns attention reads, and the first of these columns."""
        first = self.sight.handed_from(self.n)
        return self.n + query_length - first, first


class WindowColumns:
    """`WindowColumns` has the columns of all rows of a call in the layers with windows.

    Args:
        layers: all layers of the rows; layers without a window are left out.
    """

    def __init__(self, layers: Iterable[RowsLayer]) -> None:
        self._layers: dict[Sight, list[WindowLayer]] = {}
        for layer in layers:
            if isinstance(layer, WindowLayer):
                self._layers.setdefault(layer.sight, []).append(layer)
        self._together: dict[Sight, list[Streams]] = {}  # window -> memory in which its layers lie together

    def __iter__(self) -> Iterator[WindowLayer]:
        return (layer for layers in self._layers.values() for layer in layers)

    @property
    def sights(self) -> list[Sight]:
        """All windows that layers have."""
        return [*self._layers]

    def of(self, sight: Sight) -> tuple[list[Streams], int]:
        """Return the memory of the layers with this window, and the column of the rows that lies first in it."""
        layers = [layer for layer in self._layers[sight] if layer.held is not None]
        if not layers:
            return [], 0
        if sight in self._together and not any(layer.is_alone for layer in layers):
            return self._together[sight], layers[0].base
        return [streams for layer in layers for streams in layer.streams()], layers[0].base

    def tensors(self) -> list[Tensor]:
        """Return all tensors in which the columns lie."""
        return [tensor for sight in self._layers for tensor, _ in self.of(sight)[0]]

    def num_bytes(self, n: int) -> int:
        """Return the bytes of the columns that are held of those before column `n`."""
        return sum(memory.num_bytes(held, n - base) for held, base in map(self.of, self._layers))

    def lie_in(self, sight: Sight, held: list[Streams], n: int, base: int) -> None:
        """Let the layers with this window lie in this memory: its first columns are the columns `[base, n)`."""
        parts: dict[int, dict[str, Tensor]] = {}
        for tensor, names in held:
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                parts.setdefault(layer_idx, {})[name] = part
        for layer in self._layers[sight]:
            if layer.layer_idx in parts:
                layer.lie_in(parts[layer.layer_idx], n, base)
        self._together[sight] = held

    def make(self, sight: Sight, shapes: Sequence[Shape], num_rows: int, n: int, wanted: int) -> None:
        """Make memory for rows that begin after `n` columns.

        The columns that the next token sees are still to be filled.
        """
        one, base = self._layers[sight][0], sight.needed(n).start
        room = max(n - base, min(max(n, wanted) - base, one.room_for(wanted)))
        self.lie_in(sight, memory.make(shapes, num_rows, max(1, room)), n, base)

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the layers hold all that the token after the first `n` columns sees."""
        return all(layer.can_go_on_at(n) for layer in self if layer.held is not None)

    def copy_row(self, row: int, shift: int, to: "WindowColumns", to_row: int, n: int) -> None:
        """Copy what the next token of one of these rows sees to a row of other rows.

        Args:
            row: row to copy.
            shift: number of columns by which a token lies further right in these rows than in the others.
            to: columns of the other rows.
            to_row: row of them that is written.
            n: number of columns of the other rows.
        """
        for sight in to._layers:
            held, base = self.of(sight)
            new, new_base = to.of(sight)
            start = max(new_base, base - shift, 0)
            if held and new and start < n:
                columns = memory.Columns(held, row, start + shift - base, n + shift - base)
                memory.copy_columns(columns, new, to_row, start - new_base)

    def select(self, index: Tensor, n: int, start: int = 0) -> None:
        """Let row `i` continue as row `index[i]`.

        Args:
            start: where the number of rows stays the same, the columns before this one are alike, and are not moved.
        """
        for sight in self._layers:
            held, base = self.of(sight)
            if not held:
                continue
            if index.shape[0] == held[0].tensor.shape[1]:
                memory.change_places(held, index, max(0, start - base), n - base)
            else:
                self.lie_in(sight, memory.selected(held, index, n - base, held[0].tensor.shape[3]), n, base)

    def copy_to(self, other: "WindowColumns", index: Tensor, n: int) -> None:
        """Give row `i` of other rows the columns of row `index[i]`, in memory of its own."""
        for sight in self._layers:
            held, base = self.of(sight)
            if held:
                other.lie_in(sight, memory.selected(held, index, n - base, held[0].tensor.shape[3]), n, base)

    def take_over(self, other: "WindowColumns", n: int) -> None:
        """Go on in the memory of other rows, after their first `n` columns."""
        for sight in self._layers:
            held, base = other.of(sight)
            if held:
                self.lie_in(sight, held, n, base)

    def forget(self) -> None:
        """Forget the memory of rows that are dropped, and whose layers are reset."""
        self._together.clear()
