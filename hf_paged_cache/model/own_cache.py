"""Shows rows to a model that takes only a cache of a class of its own, in which states lie beside keys and values.

MiniMax is such a model. It is told apart by structure: by that class in the model's own file.
"""

import sys
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import DynamicCache


def own_cache_class(model: nn.Module) -> Any:
    """Return the cache class that the file of a model's class has for states; None for most models."""
    return _cache_class_in(type(model).__module__)


@lru_cache(maxsize=256)
def _cache_class_in(module: str) -> Any:
    things = vars(sys.modules[module]).values()
    caches = (thing for thing in things if isinstance(thing, type) and issubclass(thing, DynamicCache))
    return next((each for each in caches if hasattr(each, "get_linear_cache")), None)


def presented(model: nn.Module, cache: Any) -> Any:
    """Return the cache as the model takes it: a view, where it insists on a class of its own."""
    own = own_cache_class(model)
    return cache if own is None or cache is None or isinstance(cache, own) else _view_class(own)(cache)


def present_before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put a view of a cache of ours into the arguments of a forward: a forward pre-hook."""
    cache = kwargs.get("past_key_values")
    if not getattr(cache, "is_paged_prefix_cache", False):
        return None
    return args, {**kwargs, "past_key_values": presented(model, cache)}


def take_back_after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Put the cache itself back into the output of a forward: a forward hook."""
    if isinstance(output, tuple):
        return tuple(map(_shown, output))
    if isinstance(getattr(output, "past_key_values", None), _View):
        output.past_key_values = _shown(output.past_key_values)
    return output


def _shown(cache: Any) -> Any:
    return cache.shown_cache if isinstance(cache, _View) else cache


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
