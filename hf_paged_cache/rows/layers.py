"""Implements the layers of a call's rows, as transformers sees them: columns are appended in place, and read there.

A layer owns its place in the rows' memory, or, until the forward has ended, memory of its own.

columns: [0, base) are shared by rows, or passed and gone | [base, n) lie in `held`, from its first column on
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from ..attention.lazy import as_dense
from ..blocks import Window
from ..errors import ForwardMismatchError
from ..kv.tensors import zeros
from ..model.layers import INDEX, put_streams
from .memory import Streams

SPARE = 64  # columns of room beyond those needed, where it is not known how many come
_LEAST_SPARE, _MOST_SPARE = (
    64,
    1024,
)  # room behind a window's columns; when it is full, they move to the front


class RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """`RowsLayer` holds the keys and values of one layer, [R, H, columns, D].

    Args:
        owner: reference to the rows that the layer belongs to.
    """

    is_compileable = False
    is_sliding = False
    window: Window | None = None

    def __init__(self, layer_idx: int, owner: Callable[[], Any]) -> None:
        self.layer_idx, self._owner = layer_idx, owner
        self.n = self.base = 0  # columns written, padding included
        self.filled = 0  # columns that were known before the first forward
        self.held: tuple[Tensor, Tensor] | None = None
        self.room = 0  # columns of `held`
        self.is_own = False  # `held` belongs to this layer alone, until the forward has ended

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
            key_states, value_states = self._checked(key_states, value_states)
            if held is None or not self._takes(held, key_states, value_states, stop):
                held = self._with_room(key_states, value_states, stop)
        keys, values = held
        keys.narrow(2, at, length).copy_(key_states)
        values.narrow(2, at, length).copy_(value_states)
        self.n = n + length
        read = keys.narrow(2, 0, stop), values.narrow(2, 0, stop)
        reads = self._owner().reads
        return read if reads is None else reads.read(self.layer_idx, *read)

    def _checked(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a forward writes, without gradients; raise ForwardMismatchError if it has other rows."""
        if self.held is not None and self.held[0].shape[0] != key_states.shape[0]:
            raise ForwardMismatchError(
                f"layer {self.layer_idx} holds {self.held[0].shape[0]} rows, and a forward writes "
                f"{key_states.shape[0]}; cache.reset() it for another batch"
            )
        if key_states.requires_grad or value_states.requires_grad:
            return key_states.detach(), value_states.detach()
        return key_states, value_states

    def _takes(self, held: tuple[Tensor, Tensor], key_states: Tensor, value_states: Tensor, stop: int) -> bool:
        """Return whether columns can be written to this memory as they are, up to its column `stop`."""
        keys, values = held
        is_alike = keys.dtype == key_states.dtype and values.dtype == value_states.dtype
        return is_alike and stop <= self.room and keys.device == key_states.device

    def _with_room(self, key_states: Tensor, value_states: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Return memory with room for `stop` columns: new memory of this layer alone, with a copy of what it holds."""
        num_held, old, dtypes = self.n - self.base, self.held, (key_states.dtype, value_states.dtype)
        if old is not None and self.n > self.filled:  # promote as concatenation does, unless all is filled
            dtypes = torch.promote_types(old[0].dtype, dtypes[0]), torch.promote_types(old[1].dtype, dtypes[1])
            if stop <= self.room and dtypes == (old[0].dtype, old[1].dtype) and old[0].device == key_states.device:
                return old
        room, (old_keys, old_values) = room_for(stop, self._owner().wanted - self.base), old or (None, None)
        keys = _grown(old_keys, num_held, room, key_states, dtypes[0])
        values = _grown(old_values, num_held, room, value_states, dtypes[1])
        self.lie_in({"key": keys, "value": values}, self.n, self.base)
        self.is_own = True
        return keys, values

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int) -> None:
        """Let the layer lie in these tensors, [R, H, room, D], by name: their first columns are those from `base` on.

        A layer that holds nothing yet then has the columns `[base, n)`.
        """
        if self.held is None:
            self.n = n
        keys = tensors["key"]
        self.held, self.base, self.room, self.is_own = (keys, tensors["value"]), base, keys.shape[2], False
        self.dtype, self.device = keys.dtype, keys.device

    def named(self) -> list[tuple[str, Tensor]]:
        return [] if self.held is None else [("key", self.held[0]), ("value", self.held[1])]

    def streams(self) -> list[Streams]:
        """Return the layer's tensors as streams that lie by themselves."""
        return [Streams(tensor.unsqueeze(0), ((self.layer_idx, name),)) for name, tensor in self.named()]

    def put_into(self, layer: Any) -> None:
        """Let a layer of transformers that holds nothing go on with these columns."""
        keys, values = self.columns()
        put_streams(layer, {"key": keys, "value": values}, self.n)

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all columns, where they lie."""
        if self.base and (owner := self._owner()) is not None:
            owner.make_dense()
        assert self.held is not None
        keys, values = self.held
        return keys.narrow(2, 0, self.n - self.base), values.narrow(2, 0, self.n - self.base)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.held is not None and self.n > 0

    @property
    def keys(self) -> Tensor | None:
        """Keys of all columns, [R, H, columns, D]: a view that may be written to, or a copy if rows share columns."""
        return self._seen("keys")

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._owner().give(self.layer_idx, "keys", states)

    @property
    def values(self) -> Tensor | None:
        return self._seen("values")

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._owner().give(self.layer_idx, "values", states)

    def _seen(self, name: str) -> Tensor | None:
        owner = self._owner()
        if owner is not None and owner.why_bypassed is not None:  # others have taken this layer's place
            of_other: Tensor | None = getattr(owner.layers[self.layer_idx], name)
            return of_other
        if self.held is None or not self.n:
            return None
        if owner is not None:
            owner.note_shown()
        return self.columns()[name == "values"]

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
        self.n = self.base = self.room = self.filled = 0


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
        """Append where there is no room: the last columns become the first ones; attention reads from `first` on."""
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
        self.lie_in({"key": made[0], "value": made[1]}, stop, stop - num_kept)
        self.n, self.is_own = stop, is_own
        return read[0], read[1]

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the columns that the next token sees, where they lie."""
        assert self.held is not None
        first = max(0, self.window.needed(self.n).start - self.base)
        keys, values = self.held
        return keys.narrow(2, first, self.n - self.base - first), values.narrow(2, first, self.n - self.base - first)

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
        at = self._num_indexed
        stop, held = at + new.shape[2], self._index
        if held is None or stop > held.shape[2] or held.dtype != new.dtype or held.device != new.device:
            self._index = held = _grown(held, at, room_for(stop, self._owner().wanted), new, new.dtype)
            self.indexer_dtype, self.indexer_device, self.is_own = new.dtype, new.device, True
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
            layer.update_indexer(self._index[:, 0, : self.n])
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
        self._owner().give(self.layer_idx, "indexer_keys", states)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all columns so far, [3, R, columns], as of plain tokens, by which one model weighs index keys.

        None without rows.
        """
        owner = self._owner()
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

    n = filled = 0
    held = keys = values = None
    is_own = is_sliding = is_initialized = False

    def get_seq_length(self) -> int:
        return 0


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _write_outside_graphs(layer: RowsLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Update a layer from inside a compiled forward, without being traced: the places change with each forward."""
    read_keys, read_values = layer.update(keys, values)
    return as_dense(read_keys), as_dense(read_values)


def _grown(held: Tensor | None, num_columns: int, room: int, new: Tensor, dtype: torch.dtype) -> Tensor:
    """Make room for the columns of a layer, [R, H, room, D], with those that are held, for `new` ones."""
    made = zeros((*new.shape[:2], room, new.shape[3]), dtype, new.device)
    if held is not None and num_columns:
        made[:, :, :num_columns] = held[:, :, :num_columns]
    return made


def room_for(num_columns: int, wanted: int) -> int:
    """Return the columns to make room for: those that will come, or where nobody knows, a quarter more than now."""
    return wanted if wanted >= num_columns else num_columns + num_columns // 4 + SPARE
