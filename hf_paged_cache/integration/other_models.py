"""Errors where something else runs than the model that a cache was built for, by the modules that are on the stack."""

import sys
from traceback import walk_stack
from typing import Any

from torch import nn

from ..errors import CacheArgumentError
from .hooks import is_attached


def running_elsewhere(model: nn.Module) -> nn.Module | None:
    """The outermost module whose method runs here, if it has nothing in common with the model."""
    running = None
    for frame, _ in walk_stack(sys._getframe()):
        if isinstance(owner := frame.f_locals.get("self"), nn.Module):
            running = owner  # in the end the outermost
    modules = set(model.modules())
    is_other = running is not None and running not in modules and modules.isdisjoint(running.modules())
    return running if is_other else None


def how_to_run(model: nn.Module) -> str:
    """What to do so that a forward is scheduled."""
    if not is_attached(model):
        return "this cache is detached from its model; enter `with cache:`, or build another cache, to attach it again"
    return "run the model that the cache was built for through its own __call__, not model.model(...)"


def another_model(own: Any, other: Any) -> CacheArgumentError:
    """The error of a cache that another model was given."""
    return CacheArgumentError(
        f"this cache was built for another model ({type(own).__name__} elsewhere in memory); build "
        f"one for this {type(other).__name__}: PagedPrefixCache(model)"
    )
