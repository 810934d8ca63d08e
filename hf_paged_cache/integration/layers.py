"""Layers of a `PagedPrefixCache`, as transformers sees them. Own nothing; know the cache by protocol."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..attention.lazy import as_dense
from ..attention.view import View
from ..call.call import Call
from ..errors import CacheArgumentError
from ..model.probing import input_device


class LayeredCache(Protocol):
    """What a layer asks of its cache; `PagedPrefixCache` says what each does."""

    view: View
    call: Call

    @property
    def store(self) -> Any: ...
    def get_seq_length(self, layer_idx: int = 0) -> int: ...
    def holds_layer(self, layer_idx: int) -> bool: ...
    def write_layer(self, layer_idx: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def read_layer(self, layer_idx: int) -> dict[str, Tensor]: ...
    def reset(self) -> None: ...


def _refused(what: str, call: str) -> Any:
    """A method that is refused, since rows are the same in all layers."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise CacheArgumentError(f"{what}, not a layer: rows are the same in all layers; cache.{call}")

    return refuse


class OfAllLayers:
    """What a layer is told that concerns the rows: they are the same in all layers, so the cache is to be told."""

    def __init__(self, cache: LayeredCache) -> None:
        self._of = ref(cache)  # weak: a cache that nobody holds is collected at once, without a cycle to be found first

    @property
    def _cache(self) -> LayeredCache:
        cache = self._of()
        if cache is None:
            raise ReferenceError("the cache of this layer was collected; hold the cache, not its layers")
        return cache

    def reset(self) -> None:
        """Drop the rows of the whole cache."""
        self._cache.reset()

    reorder_cache = _refused("reorder the cache", "reorder_cache(beam_idx)")
    crop = _refused("crop the cache", "crop(tokens_to_remove)")
    batch_repeat_interleave = _refused("repeat the rows of the cache", "batch_repeat_interleave(repeats)")
    batch_select_indices = _refused("select rows of the cache", "batch_select_indices(indices)")
    activate_past_recording = _refused("let the cache record the past", "activate_past_recording()")

    def offload(self) -> None:
        """Nothing: what is held stays where it is."""

    prefetch = offload


class PagedLayer(OfAllLayers, CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """One layer of a `PagedPrefixCache`, as transformers sees it. Holds nothing: the pool does.

    A layer without a window has no `sliding_window` and no `cumulative_length`, and none has a `dtype` and a `device` before it
    has been written: as a `DynamicCache`'s.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LayeredCache, layer_idx: int) -> None:
        OfAllLayers.__init__(self, cache)
        self._layer_idx = layer_idx
        self._view = cache.view

    # Attributes of the base class, here read from the cache: a layer has no state that could disagree with it.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the rows have keys and values in this layer; models read False as "the first forward"."""
        return self._cache.holds_layer(self._layer_idx)

    @property
    def is_sliding(self) -> bool:
        """Whether attention sees a window here, as the model's config said when the rows began."""
        return self._layer_idx in self._view.window_of

    @property
    def sliding_window(self) -> int:
        """How many tokens attention sees here; a layer without a window has none."""
        if not self.is_sliding:
            raise AttributeError(f"layer {self._layer_idx} has no window")
        return self._view.window_of[self._layer_idx]

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        """Columns of the rows, those that the window has passed included; a layer without a window has none."""
        return self.get_seq_length() if self.sliding_window else 0

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, once there have been any."""
        return self._written("key").dtype

    @property
    def device(self) -> torch.device:
        """Of keys and values, once there have been any."""
        return self._written("key").device

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The rows' keys, [R, H, columns, D], as far back as the next token sees: a copy. None without rows."""
        return self._seen("key")

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The rows' values, [R, H, columns, D], as far back as the next token sees: a copy. None without rows."""
        return self._seen("value")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pool takes its shapes from the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values, [R, H, T, D], and return those that attention reads; for compiled forwards and direct callers.

        `PagedPrefixCache.update` does without it.
        """
        states = self._write({"key": key_states, "value": value_states})
        return states["key"], states["value"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention reads, and the first of them."""
        num_columns = self._cache.get_seq_length()
        first = self._view.first_column(self._layer_idx, num_columns)
        return num_columns - first + query_length, first

    def get_seq_length(self) -> int:
        """Columns of the rows, padding included; 0 where the layer holds none, unless it is the first."""
        return self._cache.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        """The window, as `DynamicSlidingWindowLayer` says; else -1: there is no maximum but the pool's."""
        return self._view.window_of.get(self._layer_idx, -1)

    def _in_pool(self, name: str) -> Tensor | None:
        """A tensor of this layer as the pool holds it, of all blocks; None before it has been written."""
        tensor: Tensor | None = self._cache.store.blocks.pool.layer(self._layer_idx).get(name)
        return tensor

    def _written(self, name: str) -> Tensor:
        tensor = self._in_pool(name)
        if tensor is None:
            raise AttributeError(f"layer {self._layer_idx} has no dtype and no device yet: no {name} was written to it")
        return tensor

    def _seen(self, name: str) -> Tensor | None:
        """The columns of a tensor that the next token sees; as for `DynamicSlidingWindowLayer`, all others are left out."""
        states = self._cache.read_layer(self._layer_idx).get(name)
        if states is None:
            return None
        num_columns = self._cache.get_seq_length()
        num_seen = num_columns - self._view.first_column(self._layer_idx, num_columns)
        return states[:, :, states.shape[2] - num_seen :]

    def _write(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Store new states and return those that attention reads."""
        if torch.compiler.is_compiling():
            written: dict[str, Tensor] = _write_outside_graphs(self._cache, self._layer_idx, states)
            return written
        return self._cache.write_layer(self._layer_idx, states)


class PagedIndexedLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """A layer of sparse attention that chooses its keys by an index: it writes a third tensor, or another layer's is used."""

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether the rows have index keys in this layer."""
        return self.is_initialized and self._in_pool("indexer_key") is not None

    @property
    def indexer_dtype(self) -> torch.dtype:
        """Of index keys, once there have been any."""
        return self._written("indexer_key").dtype

    @property
    def indexer_device(self) -> torch.device:
        """Of index keys, once there have been any."""
        return self._written("indexer_key").device

    def lazy_initialization_indexer(self, indexer_key_states: Tensor) -> None:
        """Nothing: the pool takes its shapes from the first write."""

    @property
    def indexer_keys(self) -> Tensor | None:
        """The rows' index keys, [R, columns, D]: a copy. None without rows, or where the layer has no index."""
        held = self._cache.read_layer(self._layer_idx).get("indexer_key")
        return None if held is None else held.squeeze(1)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all columns so far, [3, R, columns], by which one model weighs index keys. None without rows.

        Derived from the rows, which may have begun with what was known; where theirs are not those of plain tokens, what was set.
        """
        num_columns = self._cache.get_seq_length()
        return index_positions(self._cache.call, self._layer_idx, num_columns, input_device(self._cache.store.model))

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self._cache.call.index_positions[self._layer_idx] = positions

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store new index keys, [R, T, D], and return those of all columns."""
        return self._write({"indexer_key": indexer_key_states.unsqueeze(1)})["indexer_key"].squeeze(1)


def index_positions(call: Call, layer_idx: int, num_columns: int, device: torch.device) -> Tensor | None:
    """Positions of the running rows' columns, [3, R, columns], by which one model weighs index keys. None without rows."""
    rows = call.rows.distinct
    if not num_columns:
        return None
    if not rows or any(row.commit_end == 0 for row in rows):
        given = call.index_positions.get(layer_idx)
        return None if given is None else given[..., :num_columns]
    columns = torch.arange(num_columns, device=device)
    positions = [(columns - row.pad).clamp_(min=0) + row.first_position for row in rows]
    return torch.stack(positions).expand(3, -1, -1)


class CacheOfLayers(Cache):
    """What a cache answers, or does, for one layer: as `DynamicCache` does, whoever holds the layer's rows."""

    call: Call

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Each layer's keys and values, copies of those that the next token sees, and its window, if any; of states alone, None."""
        layers: list[Any] = self.layers
        for layer in layers:
            window = torch.tensor(layer.sliding_window) if getattr(layer, "is_sliding", False) else None
            yield getattr(layer, "keys", None), getattr(layer, "values", None), window

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers does; and what is wanted of the convolution's inputs is kept."""
        inputs: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self.call.states.live.record(layer_idx, state_idx, inputs)
        return inputs

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer keeps what its window or its state has passed until `crop`, for drafts are verified."""
        layer = self.layers[layer_idx]
        if hasattr(layer, "record_past"):
            return bool(layer.record_past)
        return self.call.keeps_past and getattr(layer, "is_sliding", False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _write_outside_graphs(cache: LayeredCache, layer_idx: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a compiled forward calls: blocks and locks are nothing to trace. Decorated, it would cost every other one."""
    return {name: as_dense(read) for name, read in cache.write_layer(layer_idx, states).items()}
