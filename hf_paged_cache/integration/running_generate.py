"""What runs on this thread's stack: a `generate` without a bracket, or another model than the cache's.

Python looks `generate` up before the cache is attached to the model where the cache is built in the call's own arguments,
`model.generate(..., past_key_values=PagedPrefixCache(model))`, with `type(model).generate(model, ...)`, and with a
`functools.partial` of before. A `generate` of the model's own has a bracket, and may call transformers' several times.
The frame of that `generate` has its arguments; its end is seen when the frame goes.
"""

import inspect
import sys
from collections import deque
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from ..call.call import Call
from ..call.running import Bracket
from ..errors import CacheArgumentError
from .generate_arguments import GenerateArguments, functions_of, read_generate
from .hooks import is_attached

_PLANTED = "hf_paged_cache_bracket"  # among a frame's own keyword arguments, which nobody reads any more


class RunningGenerate(NamedTuple):
    """One that is on this thread's stack.

    Attributes:
        given: its arguments.
        kept: a dictionary that lives as long as its frame.
    """

    given: GenerateArguments
    kept: dict[str, Any]


def running_generate(model: Any, call: Call, *, only_transformers: bool = False) -> RunningGenerate | None:
    """The innermost `generate` of the model on this thread's stack that was given the cache of this call.

    None: there is none, and the forward is a plain one, be it inside of a `generate` that has another cache.

    Args:
        only_transformers: those that a model's class has in place of transformers' own do not count.
    """
    # without the code of decorators
    functions = functions_of(model)[-1:] if only_transformers else functions_of(model)
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code in codes and (found := _read(model, call, frame)) is not None:
            return found
    return None


def _read(model: Any, call: Call, frame: FrameType) -> RunningGenerate | None:
    here, code = frame.f_locals, frame.f_code
    if here.get("self") is not model or not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    num_named = code.co_argcount + code.co_kwonlyargcount
    named, rest = code.co_varnames[:num_named], code.co_varnames[num_named + bool(code.co_flags & inspect.CO_VARARGS)]
    kept: dict[str, Any] = here[rest]
    given = {name: here[name] for name in named if name in here} | kept
    if not any(getattr(value, "call", None) is call for value in given.values()):
        return None
    return RunningGenerate(read_generate(model, (), given), kept)


class _Ended(NamedTuple):
    """What the store does of a `generate` whose frame has gone; nothing where the cache has gone with it."""

    session: ref[Any]
    bracket: ref[Bracket]

    def end(self) -> None:
        if (session := self.session()) is not None:
            session.close(self.bracket)


def plant_bracket(running: RunningGenerate, left_behind: deque[Any], session: Any) -> ref[Bracket]:
    """A bracket that goes when the frame does. That may be inside any line of ours, so the store tells the session later."""
    told = ref(session)

    def leave_behind(bracket: ref[Bracket]) -> None:
        left_behind.append(_Ended(told, bracket))

    bracket = running.kept[_PLANTED] = Bracket()
    return ref(bracket, leave_behind)


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
