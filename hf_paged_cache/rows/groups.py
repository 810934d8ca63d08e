"""Owns the columns of a call's rows in the layers that see the same of them: all columns, or one window."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import Window
from . import memory
from .layers import RowsLayer, WindowLayer, room_for
from .memory import Columns, Shape, Streams


class Group:
    """`Group` has the columns of all rows in some layers. It knows no tokens and no forwards.

    Args:
        owner: reference to the rows that the layers belong to.
        window: window of the layers; None: they see all columns.

    Attributes:
        layers: layer index -> layer.
        memory: where the columns lie; streams of one shape lie in one tensor.
        room_end: column at which the shortest tensor of the memory ends.
    """

    def __init__(self, owner: Callable[[], Any], window: Window | None = None) -> None:
        self._owner, self.window = owner, window
        self.layers: dict[int, RowsLayer] = {}
        self.memory: list[Streams] = []
        self.room_end = math.inf

    @property
    def base(self) -> int:
        """First column that lies in the memory: rows share the columns before it, or these have passed the window."""
        for layer in self.layers.values():
            if layer.held is not None:
                return layer.base
        return 0

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """Let the layers lie in this memory from here on: its first columns are the columns `[base, n)`."""
        self.memory, self.room_end, of_layers = held, math.inf, dict[int, dict[str, Tensor]]()
        for tensor, names in held:
            self.room_end = min(self.room_end, base + tensor.shape[3])
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                of_layers.setdefault(layer_idx, {})[name] = part
        for layer_idx, tensors in of_layers.items():
            if layer_idx not in self.layers:
                self._owner().add_layers(1 + layer_idx)
            self.layers[layer_idx].lie_in(tensors, n, base)

    def gather(self) -> None:
        """Let layers that got memory of their own in a forward lie in the rows' memory, without a copy."""
        layers = [layer for layer in self.layers.values() if layer.held is not None]
        if any(layer.is_own for layer in layers):
            self.take([streams for layer in layers for streams in layer.streams()], 0, self.base)

    def make_room(self, num_columns: int, n: int, wanted: int) -> None:
        """Make room for `num_columns` columns, of which there are `n`; `wanted` will come, if that is not 0."""
        index = torch.arange(self.memory[0].tensor.shape[1], device="cpu")
        self.take(self.selected(index, n, room_for(num_columns, wanted) - self.base), n, self.base)

    def make_window(self, shapes: Sequence[Shape], num_rows: int, n: int, wanted: int) -> None:
        """Make memory for rows that begin after `n` columns; what the next token sees is still to be filled."""
        layer = next(iter(self.layers.values()))
        assert isinstance(layer, WindowLayer)
        base = layer.window.needed(n).start
        room = max(n - base, min(max(n, wanted) - base, layer.room_for(wanted)))
        self.take(memory.make(shapes, num_rows, max(1, room)), n, base)

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the layers, which have a window, hold all that the token after the first `n` columns sees.

        They do not where only some have moved their columns, because a forward died.
        """
        assert self.window is not None
        first, layers = self.window.needed(n).start, [layer for layer in self.layers.values() if layer.held is not None]
        is_alike = len({layer.base for layer in layers}) < 2
        return is_alike and all(layer.base <= first and n <= layer.n for layer in layers)

    def selected(self, index: Tensor, n: int, room: int | None = None) -> list[Streams]:
        """Make memory, with the room that there is or another, in which row `i` has the columns of row `index[i]`."""
        if room is None:
            room = max((tensor.shape[3] for tensor, _ in self.memory), default=0)
        return memory.selected(self.memory, index, n - self.base, room)

    def select(self, index: Tensor, n: int, start: int) -> None:
        """Let row `i` continue as row `index[i]`; where rows change places, their columns before `start` are alike."""
        if start and self.memory and index.shape[0] == self.memory[0].tensor.shape[1]:
            memory.change_places(self.memory, index, max(0, start - self.base), n - self.base)
        else:
            self.take(self.selected(index, n), n, self.base)

    def copy_row(self, row: int, shift: int, to: "Group", to_row: int, n: int) -> None:
        """Copy what a row of another group holds of its `n` columns from a row of this one.

        A token lies `shift` columns further right here than there.
        """
        base, start = self.base, max(to.base, self.base - shift, 0)
        if start < n:
            columns = Columns(self.memory, row, start + shift - base, n + shift - base)
            memory.copy_columns(columns, to.memory, to_row, start - to.base)
