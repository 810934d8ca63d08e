"""Implements the layers of a call's rows, as transformers sees them, and groups of layers that hold the same columns.

A layer appends in place, and reads there. It lies in the memory of its group, or, until a forward has ended, in memory
of its own.

columns: [0, base) are shared by rows, or passed and gone | [base, n) lie in `held`, from its first column on
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..attention.lazy import as_dense
from ..blocks import Window
from ..errors import ForwardMismatchError
from ..kv.tensors import zeros
from ..model.layers import INDEX, has_index, has_keys, has_state, holds_nothing, put_streams
from . import memory
from .memory import Columns, Shape, Streams

SPARE = 64  # columns of room beyond those needed, where it is not known how many come
_MOST_SPARE = 1024  # most columns of room behind those of a window; when it is full, they move to the front
_ANOTHER_KIND = "a forward wrote keys or values of another dtype or device than before, or with gradients"


def _stream(name: str, place: int) -> Any:
    """Make the property of a layer that shows its keys or values, [R, H, columns, D], or is given others."""

    def get(layer: "RowsLayer") -> Tensor | None:
        return layer.shown(name, place)

    def put(layer: "RowsLayer", states: Tensor | None) -> None:
        layer.owner().give(layer.layer_idx, name, states)

    return property(get, put)


class RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """`RowsLayer` holds the keys and values of one layer, [R, H, columns, D], of the rows that `owner` refers to."""

    is_compileable = False
    is_sliding = False
    window: Window | None = None
    keys, values = _stream("keys", 0), _stream("values", 1)

    def __init__(self, layer_idx: int, owner: Callable[[], Any]) -> None:
        self.layer_idx, self.owner = layer_idx, owner
        self.n = self.base = 0  # columns written, padding included
        self.held: tuple[Tensor, Tensor] | None = None
        self.room = 0  # columns of `held`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values, [R, H, T, D]; return what attention reads, which later forwards write over."""
        if torch.compiler.is_compiling():
            return _write_outside_graphs(self, key_states, value_states)  # type: ignore[no-any-return]
        held, n, length = self.held, self.n, key_states.shape[2]
        at, stop = n - self.base, n + length - self.base
        if (
            held is None
            or stop > self.room
            or held[0].shape[0] != key_states.shape[0]
            or held[0].dtype != key_states.dtype
            or held[1].dtype != value_states.dtype
            or held[0].device != key_states.device
            or key_states.requires_grad
            or value_states.requires_grad
        ):
            return self._update_elsewhere(key_states, value_states)
        keys, values = held
        keys.narrow(2, at, length).copy_(key_states)
        values.narrow(2, at, length).copy_(value_states)
        self.n = n + length
        if self.window is not None:
            first = self.window.handed_from(n) - self.base
            return keys.narrow(2, first, stop - first), values.narrow(2, first, stop - first)
        read = keys.narrow(2, 0, stop), values.narrow(2, 0, stop)
        reads = self.owner().reads
        return read if reads is None else reads.read(self.layer_idx, *read)

    def _update_elsewhere(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append where the memory is too small, or of another kind: rows that were only filled take on the new kind."""
        held, owner = self.held, self.owner()
        if held is not None and held[0].shape[0] != key_states.shape[0]:
            raise ForwardMismatchError(
                f"layer {self.layer_idx} holds {held[0].shape[0]} rows, and a forward writes "
                f"{key_states.shape[0]}; cache.reset() it for another batch"
            )
        is_alike = held is None or (
            held[0].dtype == key_states.dtype
            and held[1].dtype == value_states.dtype
            and held[0].device == key_states.device
        )
        if key_states.requires_grad or value_states.requires_grad or (not is_alike and self.n > owner.filled):
            owner.bypass(_ANOTHER_KIND)
            read: tuple[Tensor, Tensor] = owner.layers[self.layer_idx].update(key_states, value_states)
            return read
        return self._append_elsewhere(key_states, value_states, owner.wanted)

    def _append_elsewhere(self, key_states: Tensor, value_states: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """Append in larger memory of this layer alone, with a copy of what it holds."""
        at, (old_keys, old_values) = self.n - self.base, self.held or (None, None)
        stop = at + key_states.shape[2]
        room = room_for(stop, wanted - self.base)
        keys, values = _grown(old_keys, at, room, key_states), _grown(old_values, at, room, value_states)
        keys[:, :, at:stop], values[:, :, at:stop] = key_states, value_states
        self.lie_apart({"key": keys, "value": values}, self.base)
        self.n += key_states.shape[2]
        read, reads = (keys[:, :, :stop], values[:, :, :stop]), self.owner().reads
        return read if reads is None else reads.read(self.layer_idx, *read)

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int) -> None:
        """Let the layer lie in these tensors, [R, H, room, D], by name: their first columns are those from `base` on.

        A layer that holds nothing yet then has the columns `[base, n)`.
        """
        if self.held is None:
            self.n = n
        keys = tensors["key"]
        self.held, self.base, self.room = (keys, tensors["value"]), base, keys.shape[2]
        self.dtype, self.device = keys.dtype, keys.device

    def lie_apart(self, tensors: Mapping[str, Tensor], base: int) -> None:
        """Let the layer lie in tensors that it has made, until the forward has ended."""
        self.owner().apart.add(self.window)  # first: an interrupt may come in between
        self.lie_in(tensors, self.n, base)

    def named(self) -> list[tuple[str, Tensor]]:
        return [] if self.held is None else [("key", self.held[0]), ("value", self.held[1])]

    def put_into(self, layer: Any) -> None:
        """Let a layer of transformers that holds nothing go on with these columns."""
        keys, values = self.columns()
        put_streams(layer, {"key": keys, "value": values}, self.n)

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all columns, or of those that the next token sees, where they lie."""
        first = 0
        if self.window is not None:
            first = max(0, self.window.needed(self.n).start - self.base)
        elif self.base and (owner := self.owner()) is not None:
            owner.make_dense()
        assert self.held is not None
        keys, values = self.held
        return keys.narrow(2, first, self.n - self.base - first), values.narrow(2, first, self.n - self.base - first)

    def shown(self, name: str, place: int) -> Tensor | None:
        """Return all keys or values: a view that may be written to, or a copy if rows share columns."""
        owner = self.owner()
        if owner is not None and owner.why_bypassed is not None:  # others have taken this layer's place
            of_other: Tensor | None = getattr(owner.layers[self.layer_idx], name)
            return of_other
        if self.held is None or not self.n:
            return None
        if owner is not None:
            owner.note_shown()
        return self.columns()[place]

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.held is not None and self.n > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: memory is made when keys and values come, and what is held stays."""

    def get_seq_length(self) -> int:
        return self.n

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        self.n = max(0, self.n + min(0, tokens_to_remove))

    def reset(self) -> None:
        self.held = None
        self.n = self.base = self.room = 0


class WindowLayer(RowsLayer):  # type: ignore[no-untyped-call]
    """`WindowLayer` holds the last columns of a layer with a window: as many as attention reads, and some before them.

    Args:
        margin: number of columns that stay as well, before those that the next token sees. So a block's end lies among
            the columns that are held, and drafts can be taken back.
    """

    is_sliding = True
    window: Window

    def __init__(self, layer_idx: int, owner: Callable[[], Any], window: Window, margin: int) -> None:
        super().__init__(layer_idx, owner)
        self.window, self.sliding_window, self.most_kept = window, window.size, window.most_needed + margin

    def room_for(self, num_columns: int) -> int:
        """Return how many columns to make room for where `num_columns` will come."""
        spare = min(max(SPARE, self.window.size), _MOST_SPARE)
        return max(1, min(num_columns, self.most_kept + spare))

    def _append_elsewhere(self, key_states: Tensor, value_states: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """Append where there is no room: the last columns become the first ones."""
        n, stop, old, first = self.n, self.n + key_states.shape[2], self.held, self.window.handed_from(self.n)
        lowest, room = n if old is None else self.base, self.room_for(max(wanted, stop + SPARE))
        num_kept = min(stop - lowest, room) if n == 0 or stop - lowest <= room else self.most_kept
        start, read, moved = min(first, stop - num_kept), [], []
        for place, new in enumerate((key_states, value_states)):
            held, whole = None if old is None else old[place], new
            if held is not None and start < n:
                whole = torch.cat([held[:, :, start - self.base : n - self.base].to(new), new], dim=2)
            if held is None or held.shape[2] < room or held.dtype != new.dtype or held.device != new.device:
                held = zeros((*new.shape[:2], room, new.shape[3]), new.dtype, new.device)
            moved.append((held, whole[:, :, whole.shape[2] - num_kept :]))
            read.append(whole[:, :, first - start :])
        self.base = stop  # if moving is interrupted, nothing that lies here counts
        for held, last in moved:
            held[:, :, :num_kept] = last
        made = moved[0][0], moved[1][0]
        tensors = {"key": made[0], "value": made[1]}
        if old is not None and old[0] is made[0] and old[1] is made[1]:
            self.lie_in(tensors, stop, stop - num_kept)
        else:
            self.lie_apart(tensors, stop - num_kept)
        self.n = stop
        return read[0], read[1]

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.n

    def get_max_length(self) -> int:
        return self.window.size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.window.handed_from(self.n)
        return self.n + query_length - first, first

    def activate_past_recording(self) -> None:
        """Do nothing: a margin before the window is held in any case."""


class IndexedLayer(RowsLayer, DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """`IndexedLayer` holds index keys, too, [R, columns, D], by which sparse attention chooses its keys.

    A layer has none where it uses another layer's. In layers of this class, columns that rows share are never held
    once.
    """

    _index: Tensor | None = None  # [R, 1, room, D]
    _num_indexed = 0  # columns of `_index` that are written

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append new index keys, [R, T, D]; return the index keys of all columns."""
        new = indexer_key_states.detach().unsqueeze(1)
        at, owner = self._num_indexed, self.owner()
        stop, held = at + new.shape[2], self._index
        if held is None or stop > held.shape[2] or held.dtype != new.dtype or held.device != new.device:
            owner.apart.add(None)
            self._index = held = _grown(held, at, room_for(stop, owner.wanted), new)
            self.indexer_dtype, self.indexer_device = new.dtype, new.device
        held.narrow(2, at, new.shape[2]).copy_(new)
        self._num_indexed = stop
        return held.narrow(2, 0, stop).squeeze(1)

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int) -> None:
        super().lie_in(tensors, n, base)
        index = tensors.get(INDEX)
        if index is not None:
            self._index, self._num_indexed = index, self.n
            self.indexer_dtype, self.indexer_device = index.dtype, index.device

    def named(self) -> list[tuple[str, Tensor]]:
        return super().named() + ([] if self._index is None else [(INDEX, self._index)])

    def put_into(self, layer: Any) -> None:
        super().put_into(layer)
        if self._index is not None:
            layer.update_indexer(self._index[:, 0, : self._num_indexed])
            layer.indexer_position_ids = self.indexer_position_ids

    @property
    def is_indexer_initialized(self) -> bool:  # type: ignore[override]
        return self._index is not None and self.n > 0

    @property
    def indexer_keys(self) -> Tensor | None:
        """Index keys of all columns, [R, columns, D]; None where there are none."""
        return None if self._index is None or not self.n else self._index[:, 0, : self.n]

    @indexer_keys.setter
    def indexer_keys(self, states: Tensor | None) -> None:
        self.owner().give(self.layer_idx, "indexer_keys", states)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all columns so far, [3, R, columns], as of plain tokens, by which one model weighs index keys.

        None without rows.
        """
        owner = self.owner()
        if owner is None or self._index is None or not owner.n:
            return None
        columns = torch.arange(owner.n, device=self._index.device)
        rows = [(columns - row.pad).clamp_(min=0) + row.first_position for row in owner.prompts]
        return torch.stack(rows).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        """Ignore positions: they follow from the rows, which may have begun with what was known."""

    def lazy_initialization_indexer(self, indexer_key_states: Tensor) -> None:
        """Do nothing: memory is made when index keys come."""

    def crop(self, tokens_to_remove: int) -> None:
        RowsLayer.crop(self, tokens_to_remove)
        self._num_indexed = min(self._num_indexed, self.n)

    def reset(self) -> None:
        RowsLayer.reset(self)
        self._index, self._num_indexed = None, 0


class PlaceholderLayer(getattr(cache_utils, "DummyLayer", object)):  # type: ignore[misc]  # 5.17 has none
    """`PlaceholderLayer` stands for a layer that holds nothing."""

    n = 0
    held = keys = values = None
    is_sliding = is_initialized = False

    def get_seq_length(self) -> int:
        return 0


class _InitializesStates:
    is_compileable = False
    is_croppable = LinearAttentionLayer.is_croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:  # columns need no initialization
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]


class StatesAndColumnsLayer(_InitializesStates, RowsLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call, misc]
    """`StatesAndColumnsLayer` carries states, and its attention sees all columns."""

    def __init__(self, layer_idx: int, owner: Callable[[], Any], number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        RowsLayer.__init__(self, layer_idx, owner)


class StatesAndWindowLayer(_InitializesStates, WindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call, misc]
    """`StatesAndWindowLayer` carries states, and its attention sees a window."""

    def __init__(
        self, layer_idx: int, owner: Callable[[], Any], window: Window, margin: int, number_of_states: int
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        WindowLayer.__init__(self, layer_idx, owner, window, margin)

    def get_max_length(self) -> int:
        return -1  # as transformers' layer does: there is none


def _states_alone(num_states: int) -> LinearAttentionLayer:
    """Make a layer that carries states and has no columns.

    It is of transformers' very class, because callers tell it from other layers by its type.
    """
    layer = LinearAttentionLayer(num_states)
    vars(layer).update(n=0, held=None, keys=None, values=None, is_sliding=False, is_initialized=False)
    return layer


class LayerKinds(NamedTuple):
    """`LayerKinds` says of which kind each layer of a model is."""

    num_layers: int
    windows: Mapping[int, Window] = MappingProxyType({})  # layer index -> window, for the layers that have one
    margin: int = 0  # see `WindowLayer`
    num_states: Mapping[int, int] = MappingProxyType({})  # layer index -> number of states, where there are any
    without_columns: frozenset[int] = frozenset()  # layers that carry states alone
    indexed: frozenset[int] = frozenset()  # layers that choose keys by an index
    placeholders: frozenset[int] = frozenset()  # layers that hold nothing: they read what another holds, or nothing
    align: int = 1  # states are kept after multiples of so many tokens of a row
    most_inside: int = 0  # most of them that are recorded inside one forward; 0 unless convolutions alone carry states
    clamps_one_token: bool = False  # one token is computed otherwise than several

    def make(self, owner: Callable[[], Any]) -> list[Any]:
        """Make layers that hold nothing."""
        layers = list[Any]()
        for at in range(self.num_layers):
            window, num_states = self.windows.get(at), self.num_states.get(at)
            if at in self.placeholders:
                layers.append(PlaceholderLayer())
            elif at in self.indexed:
                layers.append(IndexedLayer(at, owner))
            elif num_states is None and window is None:
                layers.append(RowsLayer(at, owner))
            elif num_states is None:
                layers.append(WindowLayer(at, owner, self.windows[at], self.margin))
            elif at in self.without_columns:
                layers.append(_states_alone(num_states))
            elif window is None:
                layers.append(StatesAndColumnsLayer(at, owner, num_states))
            else:
                layers.append(StatesAndWindowLayer(at, owner, window, self.margin, num_states))
        return layers


def kinds_of(layers: Sequence[Any]) -> LayerKinds:
    """Return the kinds of the layers that a `DynamicCache` of the model has.

    What else there is to know of windows and states is left out.
    """
    carry = {layer_idx: layer for layer_idx, layer in enumerate(layers) if has_state(layer)}
    return LayerKinds(
        len(layers),
        num_states={layer_idx: layer.number_of_states for layer_idx, layer in carry.items()},
        without_columns=frozenset(layer_idx for layer_idx, layer in carry.items() if not has_keys(layer)),
        indexed=frozenset(layer_idx for layer_idx, layer in enumerate(layers) if has_index(layer)),
        placeholders=frozenset(layer_idx for layer_idx, layer in enumerate(layers) if holds_nothing(layer)),
    )


@dataclass(eq=False)
class Group:
    """`Group` has the columns of all rows in layers that hold the same of them: all columns, or one window."""

    owner: Callable[[], Any]  # the rows
    window: Window | None = None
    layers: dict[int, RowsLayer] = field(default_factory=dict)  # by layer index
    memory: list[Streams] = field(default_factory=list)  # where the columns lie
    room_end: float = math.inf  # column at which the shortest tensor of the memory ends

    @property
    def base(self) -> int:
        """First column that lies in the memory: rows share the columns before it, or these have passed the window."""
        for layer in self.layers.values():
            if layer.held is not None:
                return layer.base
        return 0

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """Let the layers lie in this memory from here on: its first columns are the columns `[base, n)`."""
        apart = self.owner().apart
        apart.add(self.window)  # until all layers lie there: an interrupt may come in between
        self.memory, self.room_end, of_layers = held, math.inf, dict[int, dict[str, Tensor]]()
        for tensor, names in held:
            self.room_end = min(self.room_end, base + tensor.shape[3])
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                of_layers.setdefault(layer_idx, {})[name] = part
        for layer_idx, tensors in of_layers.items():
            while layer_idx not in self.layers:  # the model's config names fewer
                owner = self.owner()
                owner.layers.append(owner.layer_class_to_replicate())
            self.layers[layer_idx].lie_in(tensors, n, base)
        apart.discard(self.window)

    def gather(self) -> None:
        """Let the memory be that in which the layers lie by themselves."""
        held = [
            Streams(tensor.unsqueeze(0), ((layer_idx, name),))
            for layer_idx, layer in self.layers.items()
            for name, tensor in layer.named()
        ]
        self.take(held, 0, self.base)

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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _write_outside_graphs(layer: RowsLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Update a layer from inside a compiled forward, without being traced: the places change with each forward."""
    read_keys, read_values = layer.update(keys, values)
    return as_dense(read_keys), as_dense(read_values)


def _grown(held: Tensor | None, num_columns: int, room: int, new: Tensor) -> Tensor:
    """Make room for the columns of a layer, [R, H, room, D], with those that are held, for `new` ones."""
    made = zeros((*new.shape[:2], room, new.shape[3]), new.dtype, new.device)
    if held is not None and num_columns:
        made[:, :, :num_columns] = held[:, :, :num_columns]
    return made


def room_for(num_columns: int, wanted: int) -> int:
    """Return the columns to make room for: those that will come, or where nobody knows, a quarter more than now."""
    return wanted if wanted >= num_columns else num_columns + num_columns // 4 + SPARE
