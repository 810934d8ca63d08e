"""Knows the layers that transformers' caches have: their kinds, and how what they hold is read and written."""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ..blocks import Window

# Exact types: a subclass may hold more. Older versions lack some of the types that carry a state.
_STATE_LAYERS = tuple(
    getattr(cache_utils, f"LinearAttention{kind}Layer", None)
    for kind in ("", "AndFullAttention", "AndSlidingWindowAttention")
)
_WINDOWED_LAYERS = (DynamicSlidingWindowLayer, _STATE_LAYERS[-1])
HELD_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *_STATE_LAYERS)
INDEX = "indexer_key"


def cache_layers(model: PreTrainedModel) -> Sequence[Any]:
    """Return the layers that `DynamicCache` has for the model, in order; none where it adds each at its first write."""
    return DynamicCache(config=model.config).layers


def windows_of(layers: Sequence[Any]) -> dict[int, Window]:
    """Return layer index -> window, for the layers that have one. Attention in chunks is held as a window, too."""
    return {
        index: Window(int(layer.sliding_window))
        for index, layer in enumerate(layers)
        if type(layer) in _WINDOWED_LAYERS
    }


def holds_nothing(layer: Any) -> bool:
    """Return whether a layer is a placeholder: its attention reads the keys and values of another layer."""
    return type(layer) is getattr(cache_utils, "DummyLayer", None)  # 5.17 has none


def has_keys(layer: Any) -> bool:
    """Return whether a layer holds keys and values, beside states or without any."""
    return isinstance(layer, CacheLayerMixin)


def has_index(layer: Any) -> bool:
    """Return whether a layer may hold index keys (sparse attention) beside keys and values."""
    return type(layer) is DynamicIndexedLayer


def sees_all(layer: Any) -> bool:
    """Return whether a layer holds keys and values of all tokens and nothing else, or is a placeholder."""
    return type(layer) is DynamicLayer or holds_nothing(layer)


def has_state(layer: Any) -> bool:
    """Return whether a layer carries a state, beside keys and values or in their place."""
    return type(layer) in _STATE_LAYERS


def states_of(layer: Any, *kinds: str) -> list[Tensor]:
    """Return the states that a layer of `DynamicCache` holds: "conv_states", "recurrent_states", or both."""
    kinds = kinds or ("conv_states", "recurrent_states")
    held = [state for kind in kinds for state in getattr(layer, kind, {}).values()]
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def streams_of(layer: Any) -> dict[str, Tensor]:
    """Return keys, values and index keys a layer holds, [R, H, columns, D] each, by name; an index has one head."""
    held = ((name, getattr(layer, f"{name}s", None)) for name in ("key", "value", INDEX))
    found = {name: tensor for name, tensor in held if isinstance(tensor, Tensor)}
    if INDEX in found:
        found[INDEX] = found[INDEX].unsqueeze(1)
    return found


def put_streams(layer: Any, held: Mapping[str, Tensor], num_columns: int) -> None:
    """Let a layer that holds nothing hold rows of so many columns: name -> [R, H, columns, D], the last of a window."""
    layer.update(held["key"], held["value"])
    if getattr(layer, "is_sliding", False):
        layer.cumulative_length = num_columns
    if INDEX in held:
        layer.update_indexer(held[INDEX].squeeze(1))


def own_cache_class(model: nn.Module) -> Any:
    """Return the cache class that the file of a model's class has for states; None for most models."""
    return _cache_class_in(type(model).__module__)


@lru_cache(maxsize=256)
def _cache_class_in(module: str) -> Any:
    things = vars(sys.modules[module]).values()
    caches = (thing for thing in things if isinstance(thing, type) and issubclass(thing, DynamicCache))
    return next((each for each in caches if hasattr(each, "get_linear_cache")), None)


def presented(model: nn.Module, cache: Any) -> Any:
    """Return the cache, which from here on says that it is of the class that the model insists on, if it does."""
    own = own_cache_class(model)
    if own is not None and not isinstance(cache, own):
        cache.__class__ = _posing(cache.__class__, own)
    return cache


@lru_cache(maxsize=16)
def _posing(kind: type, own: type) -> Any:
    return type(kind.__name__, (_LinearCache, kind), {"__class__": property(lambda _: own)})


class _LinearCache:
    """`_LinearCache` has the names that a model of MiniMax's kind calls the states of its layers by."""

    def get_linear_cache(self: Any, layer_idx: int) -> Any:
        """Return the state of a layer, or None where the layer's rows have none yet."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self: Any, layer_idx: int, states: Any) -> None:
        """Keep what a forward leaves as a layer's state."""
        self.update_recurrent_state(states, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True  # otherwise only a convolution sets it
