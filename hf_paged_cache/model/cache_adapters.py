"""Finds out how a model's forward wants its cache: under which name, and of which class.

Most models take any `Cache` as `past_key_values`. The others are told apart by structure: by the names of the forward's
arguments, and by a class in the model's own file that keeps states beside a `DynamicCache`'s layers.
"""

import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import DynamicCache


def cache_argument(model: Any) -> str:
    """Return the name under which the model's forward takes a cache: "cache_params", or as most "past_key_values"."""
    kind: Any = type(model)
    names = arguments_of(kind)
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


@lru_cache(maxsize=256)
def arguments_of(kind: Any) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class's forward, by name."""
    return inspect.signature(kind.forward).parameters


def present_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put a view of the cache into the arguments of a forward, where the model insists on a cache class of its own.

    Returns:
        the arguments with the view; the arguments as they are where the model takes any cache.
    """
    own, cache = _cache_class_in(type(model).__module__), arguments.get("past_key_values")
    if own is None or cache is None or isinstance(cache, own):
        return arguments
    return {**arguments, "past_key_values": _view_class(own)(cache)}


def take_back_cache(output: Any) -> Any:
    """Put the cache itself back into the output of a forward, where the output has a view of the cache."""
    if isinstance(output, tuple):
        return tuple(map(shown, output))
    if isinstance(getattr(output, "past_key_values", None), _View):
        output.past_key_values = shown(output.past_key_values)
    return output


def shown(cache: Any) -> Any:
    """Return the cache that a view shows; any other cache is returned as it is."""
    return cache.shown_cache if isinstance(cache, _View) else cache


def own_cache_class(model: nn.Module) -> type | None:
    """Return the cache class that the model's file has for states, as MiniMax's; None for most models."""
    return _cache_class_in(type(model).__module__)


@lru_cache(maxsize=256)
def _cache_class_in(module: str) -> type | None:
    things = vars(sys.modules[module]).values()
    caches = (thing for thing in things if isinstance(thing, type) and issubclass(thing, DynamicCache))
    return next((kind for kind in caches if hasattr(kind, "get_linear_cache")), None)


class _View:
    """`_View` answers like the cache that it shows; states go by the model's names for them."""

    def __init__(self, cache: Any) -> None:
        self.shown_cache = cache

    def __getattribute__(self, name: str) -> Any:
        if name in ("shown_cache", "get_linear_cache", "set_linear_cache", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(self.shown_cache, name)

    def __len__(self) -> int:
        return len(self.shown_cache)

    def get_linear_cache(self, layer_idx: int) -> Any:
        """Return the state of a layer, or None where the layer's rows have none yet."""
        return self.shown_cache.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, states: Any) -> None:
        """Keep what a forward leaves as a layer's state."""
        self.shown_cache.update_recurrent_state(states, layer_idx)
        self.shown_cache.layers[layer_idx].has_previous_state[0] = True  # otherwise only a convolution sets it


@lru_cache(maxsize=16)
def _view_class(own: type) -> Any:
    return type(f"{own.__name__}View", (_View, own), {})
