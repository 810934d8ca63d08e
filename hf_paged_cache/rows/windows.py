"""Owns the columns of layers with a window: the last columns of each row.

These are as many as attention reads, and some before them.

columns of a row: [0, base) passed and gone | [base, n) lie in `held`, from its first column on
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks.window import Window
from ..kv.zeroed import zeros
from . import memory
from .layers import RowsLayer
from .memory import Shape, Streams

_LEAST_SPARE, _MOST_SPARE = 64, 1024  # room behind the columns that stay; when it is full, these move to the front


class WindowLayer(RowsLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """`WindowLayer` holds the keys and values of a layer with a window, [R, H, columns, D].

    Args:
        window: window of the layer.
        margin: number of columns that stay as well, before those that the next token sees. So a block's end lies among
            the columns that are held, and drafts can be taken back.
    """

    is_sliding = True

    def __init__(self, layer_idx: int, owner: Callable[[], Any], window: Window, margin: int) -> None:
        super().__init__(layer_idx, owner)
        self.window, self.sliding_window, self.most_kept = window, window.size, window.most_needed + margin

    def room_for(self, num_columns: int) -> int:
        """Return how many columns to make room for where `num_columns` will come."""
        spare = min(max(_LEAST_SPARE, self.window.size), _MOST_SPARE)
        return max(1, min(num_columns, self.most_kept + spare))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values, [R, H, T, D]; return what attention reads, which later forwards write over."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states)
        key_states, value_states = self._checked(key_states, value_states)
        n, length, held = self.n, key_states.shape[2], self.held
        first, at, stop = self.window.handed_from(n), n - self.base, n + length - self.base
        if held is None or not self._takes(held, key_states, value_states, stop):
            return self._move(key_states, value_states, first)
        keys, values = held
        keys.narrow(2, at, length).copy_(key_states)
        values.narrow(2, at, length).copy_(value_states)
        self.n, first = n + length, first - self.base
        return keys.narrow(2, first, stop - first), values.narrow(2, first, stop - first)

    def _move(self, key_states: Tensor, value_states: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Append where there is no room behind what is held: the last columns become the first ones of the memory.

        Attention reads from column `first` on.
        """
        n, stop, old = self.n, self.n + key_states.shape[2], self.held
        lowest = n if old is None else self.base
        room = self.room_for(max(self._owner().wanted, stop + _LEAST_SPARE))
        num_kept = min(stop - lowest, room) if n == 0 or stop - lowest <= room else self.most_kept
        start = min(first, stop - num_kept)
        is_own, read, made = self.is_own, [], []
        for place, new in enumerate((key_states, value_states)):
            held = None if old is None else old[place]
            if held is not None and n > self.filled:  # promote as concatenation does, unless all is filled
                new = new.to(torch.promote_types(held.dtype, new.dtype))
            whole = new
            if held is not None and start < n:
                whole = torch.cat([held[:, :, start - self.base : n - self.base].to(new), new], dim=2)
            if held is None or held.shape[2] < room or held.dtype != new.dtype or held.device != new.device:
                held, is_own = zeros((*new.shape[:2], room, new.shape[3]), new.dtype, new.device), True
            held[:, :, :num_kept] = whole[:, :, whole.shape[2] - num_kept :]
            made.append(held)
            read.append(whole[:, :, first - start :])
        self._hold(made[0], made[1], stop - num_kept)
        self.n, self.is_own = stop, is_own
        return read[0], read[1]

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.n

    def get_max_length(self) -> int:
        return self.window.size

    def activate_past_recording(self) -> None:
        """Do nothing: a margin before the window is held in any case."""

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the layer holds all that the token after the first `n` columns sees."""
        return self.held is not None and self.window.needed(n).start >= self.base and n <= self.n

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the columns that the next token sees, where they lie."""
        assert self.held is not None
        first = max(0, self.window.needed(self.n).start - self.base)
        keys, values = self.held
        return keys.narrow(2, first, self.n - self.base - first), values.narrow(2, first, self.n - self.base - first)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.window.handed_from(self.n)
        return self.n + query_length - first, first


class WindowColumns:
    """`WindowColumns` has the columns of all rows of a call in those of the layers that have windows."""

    def __init__(self, layers: Iterable[RowsLayer]) -> None:
        self._layers: dict[Window, list[WindowLayer]] = {}
        for layer in layers:
            if isinstance(layer, WindowLayer):
                self._layers.setdefault(layer.window, []).append(layer)
        self._memory: dict[Window, list[Streams]] = {}

    @property
    def kinds(self) -> list[Window]:
        return [*self._layers]

    def of(self, window: Window) -> tuple[list[Streams], int]:
        """Return the memory of the layers with this window, and the column of the rows that lies first in it."""
        layers = [layer for layer in self._layers[window] if layer.held is not None]
        if any(layer.is_own for layer in layers):
            self._memory[window] = [streams for layer in layers for streams in layer.streams()]
            for layer in layers:
                layer.is_own = False
        return (self._memory.get(window, []), layers[0].base) if layers else ([], 0)

    def tensors(self) -> list[Tensor]:
        return [tensor for window in self._layers for tensor, _ in self.of(window)[0]]

    def num_bytes(self, n: int) -> int:
        """Return the bytes of the columns that are held of those before column `n`."""
        return sum(memory.num_bytes(held, n - base) for held, base in map(self.of, self._layers))

    def lie_in(self, window: Window, held: list[Streams], n: int, base: int) -> None:
        """Let the layers with this window lie in this memory: its first columns are the columns `[base, n)`."""
        parts = memory.by_layer(held)
        for layer in self._layers[window]:
            if layer.layer_idx in parts:
                layer.lie_in(parts[layer.layer_idx], n, base)
        self._memory[window] = held

    def make(self, window: Window, shapes: Sequence[Shape], num_rows: int, n: int, wanted: int) -> None:
        """Make memory for rows that begin after `n` columns; what the next token sees is still to be filled."""
        one, base = self._layers[window][0], window.needed(n).start
        room = max(n - base, min(max(n, wanted) - base, one.room_for(wanted)))
        self.lie_in(window, memory.make(shapes, num_rows, max(1, room)), n, base)

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the layers hold all that the token after the first `n` columns sees.

        They do not where only some have moved their columns, because a forward died.
        """
        for layers in self._layers.values():
            held = [layer for layer in layers if layer.held is not None]
            if len({layer.base for layer in held}) > 1 or not all(layer.can_go_on_at(n) for layer in held):
                return False
        return True

    def copy_row(self, row: int, shift: int, to: "WindowColumns", to_row: int, n: int) -> None:
        """Copy what the next token of one of these rows sees to a row of other rows, which have `n` columns.

        A token lies `shift` columns further right in these rows than in the others.
        """
        for window in to._layers:
            held, base = self.of(window)
            new, new_base = to.of(window)
            start = max(new_base, base - shift, 0)
            if held and new and start < n:
                columns = memory.Columns(held, row, start + shift - base, n + shift - base)
                memory.copy_columns(columns, new, to_row, start - new_base)

    def select(self, index: Tensor, n: int, start: int = 0, source: "WindowColumns | None" = None) -> None:
        """Let row `i` continue as row `index[i]`, of these rows or of others; of these, columns before `start` are
        alike.
        """
        for window in self._layers:
            held, base = (source or self).of(window)
            if held and source is None and index.shape[0] == held[0].tensor.shape[1]:
                memory.change_places(held, index, max(0, start - base), n - base)
            elif held:
                self.lie_in(window, memory.selected(held, index, n - base, held[0].tensor.shape[3]), n, base)

    def take_over(self, other: "WindowColumns", n: int) -> None:
        """Go on in the memory of other rows, after their first `n` columns."""
        for window in self._layers:
            held, base = other.of(window)
            if held:
                self.lie_in(window, held, n, base)
