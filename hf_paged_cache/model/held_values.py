"""Reads what hooks, replaced forwards and modules of others hold: numbers, texts and tensors that they may compute with.

Of a function that is what it can reach without a call: its defaults, what it closes over, globals that it names, the object that it is
bound to. Lists, dicts and objects of the function's own package are entered, a few levels deep. A tensor is told by how often it was
written.

What changes while a forward runs is the function's own work, a counter or what a recorder has seen. From then on it counts as it was.
"""

import hashlib
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import is_dataclass
from functools import partial
from itertools import islice
from numbers import Number
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH = 4
_MOST_ITEMS = 128  # of a container that are looked at
_MOST_VALUES = 1024  # of one holder
_MOST_BYTES = 2**20  # of an array whose values are read
_MOST_OWN = 2**16  # places that are remembered, also of holders that are gone
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_EVERY_MODULE = {*vars(nn.Module()), "_is_hf_initialized"} - {"training"}
_LENGTH = "length"
_NOTHING = object()

Values = list[tuple[str, object]]
"""Place and value, in the order of the places."""


class HeldTensor(NamedTuple):
    """A tensor, or a large array, that is told by its number in this process and by how often it was written."""

    number: int
    version: int


class HeldValues:
    """Looks at functions and modules again and again; whoever calls holds a lock.

    Args:
        number_of: gives each object a number that no other has.

    Examples:
        >>> strength, num_calls = {"mlp": 2.0}, [0]
        >>> def steer(module, args, output):
        ...     num_calls[0] += 1
        ...     return output * strength["mlp"]
        >>> held = HeldValues(number_of=id)
        >>> before = held.read({"hook": steer})
        >>> _ = steer(None, (), 1.0)
        >>> held.read({"hook": steer}, after_forward=True) == before
        True
        >>> strength["mlp"] = 3.0
        >>> held.read({"hook": steer}) == before
        False
    """

    def __init__(self, number_of: Callable[[Any], int]) -> None:
        self._number_of = number_of
        self._values: dict[str, object] = {}  # as of the last look
        self._own: dict[str, object] = {}  # place that changes while a forward runs -> what was there before
        self._lists = set[str]()  # with a dot: of what is in them, all that counts is in `_own`

    def read(
        self, holders: dict[str, Any], watched: Iterable[nn.Module] = (), *, after_forward: bool = False
    ) -> Values:
        """What is held now.

        Args:
            holders: a name, which no other holder ever has, and a function or a module.
            watched: modules that somebody else looks at, if they are held.
            after_forward: nothing but a forward has run since the last look.
        """
        values: dict[str, object] = {}
        ids = {id(module) for module in watched}
        for name, holder in holders.items():
            reader = _Reader(_package_of(holder), ids, self._number_of)
            values.update(islice(reader.read(holder, name), _MOST_VALUES))
        if after_forward:
            self._learn(values)
        self._values = values = self._as_before(values, holders)
        return sorted(values.items())

    def _learn(self, values: dict[str, object]) -> None:
        """Whatever is not as it was at the last look is a holder's own work. Of a list that has grown that is all of it."""
        before = self._values
        changed = {
            place
            for place in values.keys() | before.keys()
            if values.get(place, _NOTHING) != before.get(place, _NOTHING)
        }
        lists = tuple(place.removesuffix(_LENGTH) for place in changed if place.endswith(f".{_LENGTH}"))
        if lists:
            self._lists |= {*lists}
            changed |= {place for place in before if place.startswith(lists)}
        if len(self._own) > _MOST_OWN:
            self._own, self._lists = {}, set()
        for place in changed:
            self._own.setdefault(place, before.get(place, _NOTHING))

    def _as_before(self, values: dict[str, object], holders: Container[str]) -> dict[str, object]:
        """The values, but with what was there before in places that are a holder's own."""
        lists = tuple(self._lists)
        if lists:
            values = {place: value for place, value in values.items() if not place.startswith(lists)}
        for place, before in self._own.items():
            if before is _NOTHING:
                values.pop(place, None)
            elif place.partition(".")[0] in holders:
                values[place] = before
        return values


class _Reader:
    """Finds what one holder holds."""

    def __init__(self, package: str, watched: set[int], number_of: Callable[[Any], int]) -> None:
        self._package = package
        self._watched = watched  # ids of modules
        self._seen = set[int]()  # ids
        self._number_of = number_of

    def read(self, holder: Any, name: str) -> Iterator[tuple[str, object]]:
        """All that is held, what is near first."""
        level = [(name, holder)]
        for _ in range(_DEPTH + 1):
            things, level = level, []
            for place, thing in things:
                if (value := self._value_of(thing)) is not _NOTHING:
                    yield place, value
                elif id(thing) not in self._seen:
                    self._seen.add(id(thing))
                    level += [(f"{place}.{part}", held) for part, held in islice(self._parts_of(thing), _MOST_ITEMS)]

    def _value_of(self, thing: Any) -> object:
        if isinstance(thing, _PLAIN):
            return thing
        if isinstance(thing, Number):  # numpy's
            return repr(thing)
        if isinstance(thing, Tensor):
            return HeldTensor(self._number_of(thing), 0 if thing.is_inference() else thing._version)
        if isinstance(thing, np.ndarray):
            is_read = thing.nbytes <= _MOST_BYTES and not thing.dtype.hasobject
            return hashlib.sha256(thing.tobytes()).digest() if is_read else HeldTensor(self._number_of(thing), 0)
        return _NOTHING

    def _parts_of(self, thing: Any) -> Iterator[tuple[str, Any]]:
        """Names, and what may be held there; nothing of what is of another package."""
        if isinstance(thing, dict):
            yield from ((repr(key), value) for key, value in [*thing.items()] if isinstance(key, _PLAIN))
        elif isinstance(thing, list | tuple):
            if isinstance(thing, list):
                yield _LENGTH, len(thing)
            yield from ((str(number), value) for number, value in enumerate(thing))
        elif isinstance(thing, partial):
            yield from (("function", thing.func), ("arguments", thing.args), ("keywords", thing.keywords))
        elif isinstance(thing, MethodType):
            yield from (("function", thing.__func__), ("self", thing.__self__))
        elif isinstance(thing, FunctionType):
            if _package_of(thing) == self._package:
                yield from _reached_by(thing)
        elif isinstance(thing, nn.Module):
            if id(thing) not in self._watched:
                yield from thing.named_parameters()
                yield from thing.named_buffers()
            elif len(self._seen) > 1:  # the model's, held by a hook
                return
            yield from ((name, part) for name, part in vars(thing).items() if name not in _OF_EVERY_MODULE)
        elif not isinstance(thing, type) and (
            isinstance(thing, Namespace | SimpleNamespace) or is_dataclass(thing) or _package_of(thing) == self._package
        ):
            slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
            yield from ((name, getattr(thing, name, None)) for name in slots)
            yield from [*getattr(thing, "__dict__", {}).items()]


def _reached_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's code may read without a call."""
    yield from ((f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
    yield from [*(function.__kwdefaults__ or {}).items(), *function.__dict__.items()]  # `__wrapped__` among them
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    known = function.__globals__
    yield from ((f"global {name}", known[name]) for name in _names(function.__code__) if name in known)


def _names(code: CodeType) -> Iterator[str]:
    """All names in a function's code, and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _package_of(thing: Any) -> str:
    """The package, or the script, that a function or the class of an object is written in."""
    while isinstance(thing, partial | MethodType):
        thing = thing.func if isinstance(thing, partial) else thing.__func__
    module = thing.__globals__.get("__name__") if isinstance(thing, FunctionType) else type(thing).__module__
    return str(module).partition(".")[0]
