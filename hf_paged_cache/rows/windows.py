"""Owns the columns of layers that see a window: the last ones of each row, as many as attention reads and some before them.

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

_LEAST_SPARE, _MOST_SPARE = 64, 1024  # columns beyond those that stay: each time that they are full the rest moves


class WindowLayer(RowsLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """Keys and values of a layer with a window, [R, H, columns, D].

    Args:
        sight: what the layer sees.
        margin: columns before those that the next token sees that stay as well: a block's end lies in them, and drafts are taken back.
    """

    is_sliding = True

    def __init__(self, layer_idx: int, owner: Callable[[], Owner | None], sight: Sight, margin: int) -> None:
        super().__init__(layer_idx, owner)
        self.sight, self.sliding_window, self.most_kept = sight, sight.size, sight.most_needed + margin

    def room_for(self, num_columns: int) -> int:
        """Columns to make room for where so many will come."""
        spare = min(max(_LEAST_SPARE, self.sight.size), _MOST_SPARE)
        return max(1, min(num_columns, self.most_kept + spare))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values, [R, H, T, D]; returns what attention reads, which later forwards write over."""
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
            first: the first column that attention reads.
        """
        n, stop, old = self.n, self.n + key_states.shape[2], self.held
        lowest = n if old is None else self.base
        room = self.room_for(max(self.wanted, stop + _LEAST_SPARE))
        num_kept = min(stop - lowest, room) if n == 0 or stop - lowest <= room else self.most_kept
        start = min(first, stop - num_kept)
        read, made = [], []
        for place, new in enumerate((key_states, value_states)):
            held = None if old is None else old[place]
            if held is not None and n > self.filled:  # as concatenation does; what was filled is in the forward's dtype
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
        """Columns written, those that the window has passed included."""
        return self.n

    def get_max_length(self) -> int:
        """The window, as `DynamicSlidingWindowLayer` says."""
        return self.sight.size

    def activate_past_recording(self) -> None:
        """Nothing: a margin before the window is held in any case."""

    is_alone = False  # `held` is this layer's alone; `is_own` says so of layers without a window

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int = 0) -> None:
        """See `RowsLayer`."""
        super().lie_in(tensors, n, base)
        self.is_alone = False

    def can_go_on_at(self, n: int) -> bool:
        """Whether all is there that the token after the first `n` columns sees."""
        return self.held is not None and self.sight.needed(n).start >= self.base and n <= self.n

    def columns(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the columns that the next token sees, where they lie."""
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
        """Columns that attention reads, and the first of them."""
        first = self.sight.handed_from(self.n)
        return self.n + query_length - first, first


class WindowColumns:
    """The columns that all rows of a call have in layers with windows.

    Args:
        layers: all of the rows; those without a window are left out.
    """

    def __init__(self, layers: Iterable[RowsLayer]) -> None:
        self._layers: dict[Sight, list[WindowLayer]] = {}
        for layer in layers:
            if isinstance(layer, WindowLayer):
                self._layers.setdefault(layer.sight, []).append(layer)
        self._together: dict[Sight, list[Streams]] = {}  # memory in which layers lie

    def __iter__(self) -> Iterator[WindowLayer]:
        return (layer for layers in self._layers.values() for layer in layers)

    @property
    def sights(self) -> list[Sight]:
        """What the layers see."""
        return [*self._layers]

    def of(self, sight: Sight) -> tuple[list[Streams], int]:
        """The memory of the layers that see this, and the column that lies first in it."""
        layers = [layer for layer in self._layers[sight] if layer.held is not None]
        if not layers:
            return [], 0
        if sight in self._together and not any(layer.is_alone for layer in layers):
            return self._together[sight], layers[0].base
        return [streams for layer in layers for streams in layer.streams()], layers[0].base

    def tensors(self) -> list[Tensor]:
        """In which the columns lie."""
        return [tensor for sight in self._layers for tensor, _ in self.of(sight)[0]]

    def num_bytes(self, n: int) -> int:
        """Bytes of the columns before column `n`."""
        return sum(memory.num_bytes(held, n - base) for held, base in map(self.of, self._layers))

    def lie_in(self, sight: Sight, held: list[Streams], n: int, base: int) -> None:
        """From here on the columns `[base, n)` of these layers are the first ones of this memory."""
        parts: dict[int, dict[str, Tensor]] = {}
        for tensor, names in held:
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                parts.setdefault(layer_idx, {})[name] = part
        for layer in self._layers[sight]:
            if layer.layer_idx in parts:
                layer.lie_in(parts[layer.layer_idx], n, base)
        self._together[sight] = held

    def make(self, sight: Sight, shapes: Sequence[Shape], num_rows: int, n: int, wanted: int) -> None:
        """Make room for rows that begin after `n` columns, of which those that are seen are to be filled."""
        one, base = self._layers[sight][0], sight.needed(n).start
        room = max(n - base, min(max(n, wanted) - base, one.room_for(wanted)))
        self.lie_in(sight, memory.make(shapes, num_rows, max(1, room)), n, base)

    def can_go_on_at(self, n: int) -> bool:
        """Whether all is there that the token after the first `n` columns sees."""
        return all(layer.can_go_on_at(n) for layer in self if layer.held is not None)

    def copy_row(self, row: int, shift: int, to: "WindowColumns", to_row: int, n: int) -> None:
        """Copy what is seen after the first `n` columns of other rows to one of these, from the columns `shift` further right here."""
        for sight in to._layers:
            held, base = self.of(sight)
            new, new_base = to.of(sight)
            start = max(new_base, base - shift, 0)
            if held and new and start < n:
                columns = memory.Columns(held, row, start + shift - base, n + shift - base)
                memory.copy_columns(columns, new, to_row, start - new_base)

    def select(self, index: Tensor, n: int, start: int = 0) -> None:
        """Row `i` continues as row `index[i]`; where there are as many, they have the columns before `start` in common."""
        for sight in self._layers:
            held, base = self.of(sight)
            if not held:
                continue
            if index.shape[0] == held[0].tensor.shape[1]:
                memory.change_places(held, index, max(0, start - base), n - base)
            else:
                self.lie_in(sight, memory.selected(held, index, n - base, held[0].tensor.shape[3]), n, base)

    def copy_to(self, other: "WindowColumns", index: Tensor, n: int) -> None:
        """Let row `i` of other rows have the columns of row `index[i]` in memory of its own."""
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
        """The rows are dropped, and their layers reset."""
        self._together.clear()
