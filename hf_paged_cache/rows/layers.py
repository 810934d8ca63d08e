"""Implements a layer of a call's rows, as transformers sees it: columns are appended in place, and read where they lie.

A layer owns its place in the rows' memory, or memory of its own before the shapes of all layers are known.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from ..attention.lazy import as_dense
from ..errors import ForwardMismatchError
from ..kv.zeroed import zeros
from ..model.layers import put_streams
from .memory import Streams

SPARE = 64  # columns of room beyond those needed, where it is not known how many come


class RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """`RowsLayer` holds the keys and values of one layer, [R, H, columns, D].

    columns: [0, base) are shared by rows | [base, n) lie in `held`, from its first column on

    Args:
        owner: reference to the rows that the layer belongs to.
    """

    is_compileable = False
    is_sliding = False

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
        """Return what a forward writes, without gradients.

        Raises:
            ForwardMismatchError: the forward is of another number of rows.
        """
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
        keys = grown(old_keys, num_held, room, key_states, dtypes[0])
        values = grown(old_values, num_held, room, value_states, dtypes[1])
        self._hold(keys, values, self.base)
        self.is_own = True
        return keys, values

    def _hold(self, keys: Tensor, values: Tensor, base: int) -> None:
        """Lie in these tensors from here on; their first column is the column `base`."""
        self.held, self.base, self.room, self.is_own = (keys, values), base, keys.shape[2], False
        self.dtype, self.device = keys.dtype, keys.device

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int = 0) -> None:
        """Let the layer lie in these tensors, [R, H, room, D], by name: their first columns are the columns `[base,
        n)`.
        """
        self._hold(tensors["key"], tensors["value"], base)
        self.n = n

    def named(self) -> list[tuple[str, Tensor]]:
        return [] if self.held is None else [("key", self.held[0]), ("value", self.held[1])]

    def streams(self) -> list[Streams]:
        """Return the layer's tensors as streams that lie by themselves."""
        return [Streams(tensor.unsqueeze(0), ((self.layer_idx, name),)) for name, tensor in self.named()]

    def put_into(self, layer: Any) -> None:
        """Let a layer of transformers that holds nothing go on with these columns."""
        keys, values = self.columns()
        put_streams(layer, {"key": keys, "value": values}, self.n)

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

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all columns, where they lie."""
        if self.base and (owner := self._owner()) is not None:
            owner.make_dense()
        assert self.held is not None
        keys, values = self.held
        return keys.narrow(2, 0, self.n - self.base), values.narrow(2, 0, self.n - self.base)

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


def grown(held: Tensor | None, num_columns: int, room: int, new: Tensor, dtype: torch.dtype) -> Tensor:
    """Make room for the columns of a layer, [R, H, room, D], with those that are held, for `new` ones."""
    made = zeros((*new.shape[:2], room, new.shape[3]), dtype, new.device)
    if held is not None and num_columns:
        made[:, :, :num_columns] = held[:, :, :num_columns]
    return made


def room_for(num_columns: int, wanted: int) -> int:
    """Return the columns to make room for: those that will come, or where nobody knows, a quarter more than now."""
    return wanted if wanted >= num_columns else num_columns + num_columns // 4 + SPARE
