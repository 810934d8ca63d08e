"""Layers of a `PagedPrefixCache` that carry states, as transformers sees them: its own layers, but for what concerns all rows.

The states lie here, written by the model; which rows they belong to, `kv.states.LiveStates` decides.
"""

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..kv.states import LiveStates
from ..model.support import has_index, has_state, holds_nothing
from .layers import LayeredCache, OfAllLayers, PagedIndexedLayer, PagedLayer

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

    def __init__(self, cache: LayeredCache, layer_idx: int, number_of_states: int) -> None:
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


def make_layer(cache: LayeredCache, layer_idx: int, like: Any) -> Any:
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


def _state_layer(cache: LayeredCache, number_of_states: int) -> LinearAttentionLayer:
    """A layer that carries states alone: of transformers' very class, for its type is how callers tell it from the others.

    It has no keys and values, and leaves to the cache what concerns all layers.
    """
    layer, of_all_layers = LinearAttentionLayer(number_of_states), OfAllLayers(cache)
    vars(layer).update({name: getattr(of_all_layers, name) for name in _OF_ALL_LAYERS}, keys=None, values=None)
    return layer
