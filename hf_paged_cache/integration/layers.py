"""Layers of a `PagedPrefixCache`, as transformers sees them: views of the pool, which hold nothing, and transformers' own where states lie.

States are written by the model; which rows they belong to, `kv.states.LiveStates` decides.
"""

from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..attention.lazy import as_dense
from ..attention.view import View
from ..call.rows import Rows
from ..errors import CacheArgumentError
from ..kv.states import LiveStates
from ..model.probing import input_device
from ..model.support import has_index, has_state, holds_nothing


def _refused(what: str, call: str) -> Any:
    """A method that is refused, since rows are the same in all layers."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise CacheArgumentError(f"{what}, not a layer: rows are the same in all layers; cache.{call}")

    return refuse


class OfAllLayers:
    """What a layer is told that concerns the rows: they are the same in all layers, so the cache is to be told."""

    def __init__(self, cache: Any) -> None:
        self._of = ref(cache)  # weak: a cache that nobody holds is collected at once, without a cycle to be found first

    @property
    def _cache(self) -> Any:
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

    def __init__(self, cache: Any, layer_idx: int) -> None:
        OfAllLayers.__init__(self, cache)
        self._layer_idx = layer_idx
        self._view: View = cache.view

    # Attributes of the base class, here read from the cache: a layer has no state that could disagree with it.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the rows have keys and values in this layer; models read False as "the first forward"."""
        return self._cache.call.num_columns > 0 and bool(self._in_pool)

    @property
    def is_sliding(self) -> bool:
        """Whether attention sees a window here, as the model's config said when the rows began."""
        return self._layer_idx in self._view.sight_of

    @property
    def sliding_window(self) -> int:
        """How many tokens attention sees here; a layer without a window has none."""
        if not self.is_sliding:
            raise AttributeError(f"layer {self._layer_idx} has no window")
        return self._view.sight_of[self._layer_idx].size

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
        num_columns: int = self._cache.get_seq_length(self._layer_idx)
        return num_columns

    def get_max_length(self) -> int:
        """The window, as `DynamicSlidingWindowLayer` says; else -1: there is no maximum but the pool's."""
        return self.sliding_window if self.is_sliding else -1

    @property
    def _in_pool(self) -> dict[str, Tensor]:
        """The tensors of this layer as the pool holds them, of all blocks; none before it has been written."""
        tensors: dict[str, Tensor] = self._cache.store.blocks.pool.layer(self._layer_idx)
        return tensors

    def _written(self, name: str) -> Tensor:
        if name not in self._in_pool:
            raise AttributeError(f"layer {self._layer_idx} has no dtype and no device yet: no {name} was written to it")
        return self._in_pool[name]

    def _seen(self, name: str) -> Tensor | None:
        """The columns of a tensor that the next token sees; as for `DynamicSlidingWindowLayer`, all others are left out."""
        states: Tensor | None = self._cache.call.read_layer(self._layer_idx).get(name)
        if states is None:
            return None
        num_columns = self._cache.get_seq_length()
        num_seen = num_columns - self._view.first_column(self._layer_idx, num_columns)
        return states[:, :, states.shape[2] - num_seen :]

    def _write(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Store new states and return those that attention reads."""
        write = _write_outside_graphs if torch.compiler.is_compiling() else _write
        written: dict[str, Tensor] = write(self._cache, self._layer_idx, states)
        return written


class PagedIndexedLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """A layer of sparse attention that chooses its keys by an index: it writes a third tensor, or another layer's is used."""

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether the rows have index keys in this layer."""
        return self.is_initialized and "indexer_key" in self._in_pool

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
        held = self._cache.call.read_layer(self._layer_idx).get("indexer_key")
        return None if held is None else held.squeeze(1)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all columns so far, [3, R, columns], by which one model weighs index keys. None without rows.

        Derived from the rows, which may have begun with what was known; where theirs are not those of plain tokens, what was set.
        """
        cache = self._cache
        return index_positions(cache.call.rows, cache.get_seq_length(), input_device(cache.store.model))

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        for number, row in enumerate(self._cache.call.rows.distinct):
            row.index_positions = None if positions is None else positions[:, number]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store new index keys, [R, T, D], and return those of all columns."""
        return self._write({"indexer_key": indexer_key_states.unsqueeze(1)})["indexer_key"].squeeze(1)


def index_positions(rows: Rows, num_columns: int, device: torch.device) -> Tensor | None:
    """Positions of the running rows' columns, [3, R, columns], by which one model weighs index keys. None without rows."""
    if not num_columns or not rows.distinct:
        return None
    columns = torch.arange(num_columns, device=device)
    positions = []
    for row in rows.distinct:
        given = row.index_positions
        if row.commit_end is None or given is None or given.shape[-1] < num_columns:
            if row.commit_end == 0:  # its tokens may stand anywhere
                return None
            positions.append(((columns - row.pad).clamp_(min=0) + row.first_position).expand(3, -1))
        else:
            positions.append(given[:, :num_columns])
    return torch.stack(positions, 1)


def _write(cache: Any, layer_idx: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
    if cache.call.forward is None:
        raise cache.why_unscheduled(layer_idx)
    written: dict[str, Tensor] = cache.call.write(layer_idx, states)
    return written


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _write_outside_graphs(cache: Any, layer_idx: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a compiled forward calls: blocks and locks are nothing to trace. Decorated, `_write` would cost every other one."""
    return {name: as_dense(read) for name, read in _write(cache, layer_idx, states).items()}


_OF_ALL_LAYERS = tuple(name for name in vars(OfAllLayers) if not name.startswith("_"))


class _PagedStateAndAttentionLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[no-untyped-call]
    """A layer that carries states, and has keys and values in the pool."""

    is_compileable = False
    is_croppable = LinearAttentionLayer.is_croppable
    device: Any = None  # written with states
    dtype: Any = None
    reset, reorder_cache, crop = OfAllLayers.reset, OfAllLayers.reorder_cache, OfAllLayers.crop
    activate_past_recording = OfAllLayers.activate_past_recording
    offload, prefetch = OfAllLayers.offload, OfAllLayers.prefetch

    def __init__(self, cache: Any, layer_idx: int, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        PagedLayer.__init__(self, cache, layer_idx)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of states; the pool takes its shapes from the first write."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class PagedStateAndFullAttentionLayer(_PagedStateAndAttentionLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call, override]
    """A layer that carries states, and whose attention sees all columns."""


class PagedStateAndWindowLayer(_PagedStateAndAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call, override]
    """A layer that carries states, and whose attention sees a window."""


def live_states(layers: Sequence[Any]) -> LiveStates:
    """What those of a cache's layers carry that carry states."""
    return LiveStates({index: layer for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionLayer)})


def make_layer(cache: Any, layer_idx: int, like: Any) -> Any:
    """A layer of ours in place of one of `DynamicCache`; that itself where it holds nothing."""
    if holds_nothing(like):
        return like
    if not has_state(like):
        return (PagedIndexedLayer if has_index(like) else PagedLayer)(cache, layer_idx)
    kinds: dict[type, Any] = {
        LinearAttentionAndFullAttentionLayer: PagedStateAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer: PagedStateAndWindowLayer,
    }
    kind = kinds.get(type(like))
    return _state_layer(cache, like.number_of_states) if kind is None else kind(cache, layer_idx, like.number_of_states)


def _state_layer(cache: Any, number_of_states: int) -> LinearAttentionLayer:
    """A layer that carries states alone: of transformers' very class, for its type is how callers tell it from the others.

    It has no keys and values, and leaves to the cache what concerns all layers.
    """
    layer, of_all_layers = LinearAttentionLayer(number_of_states), OfAllLayers(cache)
    vars(layer).update({name: getattr(of_all_layers, name) for name in _OF_ALL_LAYERS}, keys=None, values=None)
    return layer
