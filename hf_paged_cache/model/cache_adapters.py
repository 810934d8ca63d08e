"""How a model's forward wants its cache: under which name, and of which class.

Most take any `Cache` as `past_key_values`. The others are told apart by structure: by the names of the forward's arguments,
and by a class in the model's own file that keeps states beside a `DynamicCache`'s layers.
"""

import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import DynamicCache


def cache_argument(model: Any) -> str:
    """The name under which the model's forward takes a cache: "cache_params", or as most "past_key_values"."""
    kind: Any = type(model)
    names = arguments_of(kind)
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


@lru_cache(maxsize=256)
def arguments_of(kind: Any) -> Mapping[str, inspect.Parameter]:
    """The arguments of a class's forward, by name."""
    return inspect.signature(kind.forward).parameters


def present_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a forward with a view of their cache in its place, where the model insists on a class of its own."""
    own, cache = _cache_class_in(type(model).__module__), arguments.get("past_key_values")
    if own is None or cache is None or isinstance(cache, own):
        return arguments
    return {**arguments, "past_key_values": _view_class(own)(cache)}


def take_back_cache(output: Any) -> Any:
    """The output of a forward with the cache itself where that has a view of it."""
    if isinstance(output, tuple):
        return tuple(map(shown, output))
    if isinstance(getattr(output, "past_key_values", None), _View):
        output.past_key_values = shown(output.past_key_values)
    return output


def shown(cache: Any) -> Any:
    """The cache that a view shows; any other as it is."""
    return cache.shown_cache if isinstance(cache, _View) else cache


def own_cache_class(model: nn.Module) -> type | None:
    """The class of caches that the model's file has for states, as MiniMax's; None for most models."""
    return _cache_class_in(type(model).__module__)


@lru_cache(maxsize=256)
def _cache_class_in(module: str) -> type | None:
    things = vars(sys.modules[module]).values()
    caches = (thing for thing in things if isinstance(thing, type) and issubclass(thing, DynamicCache))
    return next((kind for kind in caches if hasattr(kind, "get_linear_cache")), None)


class _View:
    """All that is asked of it, the cache that it shows answers; states go by its names for them."""

    def __init__(self, cache: Any) -> None:
        self.shown_cache = cache

    def __getattribute__(self, name: str) -> Any:
        if name in ("shown_cache", "get_linear_cache", "set_linear_cache", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(self.shown_cache, name)

    def __len__(self) -> int:
        return len(self.shown_cache)

    def get_linear_cache(self, layer_idx: int) -> Any:
        """The state of a layer, or None where its rows have none yet."""
        return self.shown_cache.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, states: Any) -> None:
        """Keep what a forward leaves as a layer's state."""
        self.shown_cache.update_recurrent_state(states, layer_idx)
        self.shown_cache.layers[layer_idx].has_previous_state[0] = True  # else only a convolution says so


@lru_cache(maxsize=16)
def _view_class(own: type) -> Any:
    return type(f"{own.__name__}View", (_View, own), {})
