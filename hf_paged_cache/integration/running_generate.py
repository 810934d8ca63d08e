"""A `generate` that runs without a bracket: Python had looked it up before the cache was attached to the model.

So it is where the cache is built in the call's own arguments, `model.generate(..., past_key_values=PagedPrefixCache(model))`,
with `type(model).generate(model, ...)`, and with a `functools.partial` of before. The frame of that `generate` has its arguments;
its end is seen when the frame goes.
"""

import inspect
import sys
from collections import deque
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple, Protocol
from weakref import ref

from ..call.call import Call
from ..call.running import Bracket
from .generate_arguments import GenerateArguments, read_generate
from .layers import CacheOfLayers

_PLANTED = "hf_paged_cache_bracket"  # among a frame's own keyword arguments, which nobody reads any more


class RunningGenerate(NamedTuple):
    """One that is on this thread's stack.

    Attributes:
        given: its arguments.
        kept: a dictionary that lives as long as its frame.
    """

    given: GenerateArguments
    kept: dict[str, Any]


def running_generate(model: Any, call: Call) -> RunningGenerate | None:
    """The innermost `generate` of the model on this thread's stack that was given the cache of this call.

    None: there is none, and the forward is a plain one, be it inside of a `generate` that has another cache.
    """
    # of each `generate` that its class has or inherits, the function's own code, without that of decorators
    functions = [vars(owner)["generate"] for owner in type(model).__mro__ if "generate" in vars(owner)]
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
    if not any(isinstance(value, CacheOfLayers) and value.call is call for value in given.values()):
        return None
    return RunningGenerate(read_generate(model, (), given), kept)


class Closing(Protocol):
    """Who is told of the end; `Session` says what this does."""

    def close(self, bracket: ref[Bracket]) -> None: ...


class _Ended(NamedTuple):
    """What the store does of a `generate` whose frame has gone; nothing where the cache has gone with it."""

    session: ref[Closing]
    bracket: ref[Bracket]

    def end(self) -> None:
        if (session := self.session()) is not None:
            session.close(self.bracket)


def plant_bracket(running: RunningGenerate, left_behind: deque[Any], session: Closing) -> ref[Bracket]:
    """A bracket that goes when the frame does. That may be inside any line of ours, so the store tells the session later."""
    told = ref(session)

    def leave_behind(bracket: ref[Bracket]) -> None:
        left_behind.append(_Ended(told, bracket))

    bracket = running.kept[_PLANTED] = Bracket()
    return ref(bracket, leave_behind)
