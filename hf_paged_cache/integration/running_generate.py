"""A `generate` that runs without a bracket: Python had looked it up before the cache was attached to the model.

So it is where the cache is built in the call's own arguments, `model.generate(..., past_key_values=PagedPrefixCache(model))`,
with `type(model).generate(model, ...)`, and with a `functools.partial` of before. The frame of that `generate` has its arguments;
its end is seen when the frame goes.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, Protocol
from weakref import ref

from ..call.call import Call
from ..call.running import Bracket
from ..store.block_store import BlockStore
from .generate_arguments import GenerateArguments, read_generate
from .layers import CacheOfLayers

_PLANTED = "hf_paged_cache_bracket"  # among a frame's own keyword arguments, which nobody reads any more


@dataclass(frozen=True, slots=True)
class RunningGenerate:
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
    codes = {*_codes_of(model)}
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code in codes and (found := _read(model, call, frame)) is not None:
            return found
    return None


def _codes_of(model: Any) -> Iterator[CodeType]:
    """Of each `generate` that its class has or inherits, the function's own, without that of decorators."""
    for owner in type(model).__mro__:
        function = inspect.unwrap(vars(owner).get("generate", _codes_of))
        if function is not _codes_of and (code := getattr(function, "__code__", None)) is not None:
            yield code


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


class Unclosed(Protocol):
    """Who is told of the end."""

    def close_found(self, bracket: ref[Bracket]) -> None: ...


class _FrameEnd:
    """Goes with the frame that it is planted in. That may be inside any line of ours, so the store does the rest later."""

    def __init__(self, store: BlockStore, session: ref[Unclosed]) -> None:
        self.bracket = Bracket()
        self._store, self._end = store, _End(session, ref(self.bracket))

    def __del__(self) -> None:
        self._store.left_behind.append(self._end)


class _End:
    """What the store does of a `generate` whose frame has gone; nothing where the cache has gone with it."""

    def __init__(self, session: ref[Unclosed], bracket: ref[Bracket]) -> None:
        self._session, self._bracket = session, bracket

    def end(self) -> None:
        if (session := self._session()) is not None:
            session.close_found(self._bracket)


def plant_bracket(running: RunningGenerate, store: BlockStore, session: Unclosed) -> ref[Bracket]:
    """A bracket that goes when the frame does; then the store tells the session."""
    end = _FrameEnd(store, ref(session))
    running.kept[_PLANTED] = end
    return ref(end.bracket)
