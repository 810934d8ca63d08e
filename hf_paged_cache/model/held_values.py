"""Reads what hooks, replaced forwards and modules of others hold: numbers, texts and tensors that they may compute with.

Of a function that is its code and what that can reach without a call: its defaults, what it closes over, globals that it names, the
object that it is bound to. Of an object of the function's own package that is its attributes, and its class: other attributes, and the code
that runs where it is called. Lists, dicts, sets and such objects are entered, a few levels deep. A tensor is told by how often it was
written. What raises when it is looked at holds nothing.

What changes while a forward runs is the function's own work, a counter or what a recorder has seen. From then on it counts as it was.
"""

import contextlib
import hashlib
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import islice
from numbers import Number
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH = 4
_MOST_ITEMS = 128  # of a container that are looked at
_MOST_VALUES = 1024  # of one holder
_MOST_BYTES = 2**20  # of an array whose values are read
_MOST_WRAPPERS = 16  # of a function
_MOST_OWN = 2**12  # places of one holder that are remembered
_MOST_HOLDERS = 2**10  # that are remembered, those that are gone among them
_PLAIN = (bool, int, str, bytes, type(None))
_NAMED = (Number, range, torch.dtype, torch.device)  # numpy's numbers are among them
_OF_EVERY_MODULE = {*vars(nn.Module()), "_is_hf_initialized"} - {"training"}
_CALLED = ("__call__", "forward")  # what runs where an object is called
_LENGTH = "len()"  # no attribute's name
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
        self._values: dict[int, dict[str, object]] = {}  # number of a holder -> place -> value, as of the last look
        self._own: dict[int, _Own] = {}  # number of a holder -> its own; those read last are last

    def read(
        self, holders: dict[str, Any], watched: Iterable[nn.Module] = (), *, after_forward: bool = False
    ) -> Values:
        """What is held now.

        Args:
            holders: a name, and a function or a module.
            watched: modules that somebody else looks at, if they are held.
            after_forward: nothing but forwards has run since the last look.
        """
        found: Values = []
        ids = {id(module) for module in watched}
        classes: dict[str, Any] = {}
        last, self._values = self._values, {}
        things = [*holders.items()]
        for name, holder in things:  # and classes, as they are met
            number = self._number_of(holder)
            own = self._own[number] = self._own.pop(number, _Own({}, set()))
            reader, num_classes = _Reader(_package_of(holder), ids, own.lists, classes, self._number_of), len(classes)
            values = dict(islice(reader.read(holder), _MOST_VALUES))
            things += islice(classes.items(), num_classes, None)
            if after_forward and number in last:  # else it has come meanwhile, with all that it holds
                own.learn(last[number], values)
            self._values[number] = values = own.as_before(values)
            found += [(name + place, value) for place, value in values.items()]
        for number in [*islice(self._own, max(0, len(self._own) - _MOST_HOLDERS))]:
            del self._own[number]
        return sorted(found, key=itemgetter(0))


@dataclass
class _Own:
    """What one holder does by itself.

    Attributes:
        before: place that changes while a forward runs -> what was there before.
        lists: places of lists that have grown meanwhile: nothing in them counts.
    """

    before: dict[str, object]
    lists: set[str]

    def learn(self, before: dict[str, object], now: dict[str, object]) -> None:
        """Whatever is not as it was at the last look is the holder's own work. Of a list that has grown that is all of it."""
        if len(self.before) > _MOST_OWN:
            self.before, self.lists = {}, set()
        changed = {
            place for place in now.keys() | before.keys() if now.get(place, _NOTHING) != before.get(place, _NOTHING)
        }
        self.lists |= {place.removesuffix(f".{_LENGTH}") for place in changed if place.endswith(f".{_LENGTH}")}
        inside = self._inside()
        for place in changed | {place for place in before if place.startswith(inside)}:
            self.before.setdefault(place, before.get(place, _NOTHING))

    def as_before(self, values: dict[str, object]) -> dict[str, object]:
        """The values, but with what was there before in places that are the holder's own."""
        inside = self._inside()
        values = {place: value for place, value in values.items() if not place.startswith(inside)} | self.before
        return {place: value for place, value in values.items() if value is not _NOTHING}

    def _inside(self) -> tuple[str, ...]:
        return tuple(f"{place}." for place in self.lists)


class _Reader:
    """Finds what one holder holds.

    Args:
        skipped: places that are not entered.
        classes: name -> class of the holder's package that was met; more are put there.
    """

    def __init__(
        self,
        package: str,
        watched: set[int],
        skipped: set[str],
        classes: dict[str, Any],
        number_of: Callable[[Any], int],
    ) -> None:
        self._package = package
        self._watched = watched  # ids of modules
        self._seen = set[int]()  # ids
        self._skipped = skipped
        self._classes = classes
        self._number_of = number_of

    def read(self, holder: Any) -> Iterator[tuple[str, object]]:
        """All that is held, what is near first."""
        level = [("", holder)]
        for depth in range(_DEPTH + 1):
            things, level = level, []
            for place, thing in things:
                try:
                    value = self._value_of(thing) if depth else _NOTHING
                    if value is _NOTHING and id(thing) not in self._seen and place not in self._skipped:
                        self._seen.add(id(thing))
                        parts = islice(self._parts_of(thing), _MOST_ITEMS)
                        level += [(f"{place}.{part}", held) for part, held in parts]
                except Exception:  # noqa: BLE001 - a proxy of nothing, a property that fails
                    continue
                if value is not _NOTHING:
                    yield place, value

    def _value_of(self, thing: Any) -> object:
        if type(thing) in _PLAIN and not (type(thing) is int and thing.bit_length() > 64):
            return thing
        if isinstance(thing, int):  # without end
            return hex(thing)
        if isinstance(thing, (*_PLAIN, *_NAMED)):
            return repr(thing)
        if isinstance(thing, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return HeldTensor(self._number_of(thing), 0 if thing.is_inference() else thing._version)
        if isinstance(thing, np.ndarray):
            is_read = thing.nbytes <= _MOST_BYTES and not thing.dtype.hasobject
            return hashlib.sha256(thing.tobytes()).digest() if is_read else HeldTensor(self._number_of(thing), 0)
        if isinstance(thing, type) and self._is_own(thing):
            name = f"class {thing.__module__}.{thing.__qualname__}"
            while self._classes.setdefault(name, thing) is not thing:
                name += "'"
        if isinstance(thing, type | BuiltinFunctionType) or (
            isinstance(thing, FunctionType) and not self._is_own(thing)
        ):
            return f"{thing.__module__}.{thing.__qualname__}"
        return _code_as_text(thing) if isinstance(thing, CodeType) else _NOTHING

    def _is_own(self, thing: Any) -> bool:
        return _package_of(thing) == self._package

    def _parts_of(self, thing: Any) -> Iterator[tuple[str, Any]]:
        """Names, and what may be held there; nothing of what is of another package."""
        if isinstance(thing, dict):
            for number, (key, value) in enumerate([*islice(thing.items(), _MOST_ITEMS)]):
                yield repr(key) if isinstance(key, (*_PLAIN, *_NAMED)) else f"item {number}", value
        elif isinstance(thing, set | frozenset):
            yield from (
                (repr(item), item) for item in [*islice(thing, _MOST_ITEMS)] if isinstance(item, (*_PLAIN, *_NAMED))
            )
        elif isinstance(thing, list | tuple | deque):
            if not isinstance(thing, tuple):
                yield _LENGTH, len(thing)
            yield from ((str(number), value) for number, value in enumerate([*islice(thing, _MOST_ITEMS)]))
        elif isinstance(thing, partial):
            yield from (("function", thing.func), ("arguments", thing.args), ("keywords", thing.keywords))
        elif isinstance(thing, MethodType | staticmethod | classmethod):
            yield from (("function", thing.__func__), ("self", getattr(thing, "__self__", None)))
        elif isinstance(thing, FunctionType):
            if self._is_own(thing):
                yield from _reached_by(thing)
        elif isinstance(thing, type):
            for name, part in [*vars(thing).items()]:
                if name in _CALLED or not (name.startswith("__") or isinstance(part, FunctionType)):
                    yield name, part
            yield from (("base", base) for base in thing.__bases__ if self._is_own(base))
        elif isinstance(thing, nn.Module):
            if len(self._seen) > 1 and id(thing) in self._watched:  # the model's, held by a hook
                return
            yield from self._class_of(thing)
            yield from [(name, part) for name, part in vars(thing).items() if name not in _OF_EVERY_MODULE]
            if id(thing) not in self._watched:
                yield from thing.named_parameters()
                yield from thing.named_buffers()
        elif isinstance(thing, SimpleNamespace | Namespace) or is_dataclass(thing) or self._is_own(thing):
            yield from self._class_of(thing)
            for kind in type(thing).__mro__:
                for name, slot in vars(kind).items():
                    if isinstance(slot, MemberDescriptorType) and hasattr(thing, slot.__name__):
                        yield name, slot.__get__(thing)
            yield from [*getattr(thing, "__dict__", {}).items()]

    def _class_of(self, thing: Any) -> Iterator[tuple[str, Any]]:
        if self._is_own(type(thing)):
            yield "class", type(thing)


def _reached_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """A function's code, and what it may read without a call."""
    code, known = function.__code__, function.__globals__
    yield "code", code
    yield from ((f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
    yield from [*(function.__kwdefaults__ or {}).items(), *function.__dict__.items()]  # `__wrapped__` among them
    names = dict.fromkeys(_names(code))
    reached = [(f"global {name}", known[name]) for name in names if name in known]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            reached.append((name, cell.cell_contents))
    for name, held in reached:
        yield name, held
        if isinstance(held, ModuleType):
            yield from ((f"{name}.{part}", vars(held)[part]) for part in names if part in vars(held))


def _names(code: CodeType) -> Iterator[str]:
    """All names in a function's code, and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _code_as_text(code: CodeType) -> str:
    """What a function does with what it reaches: the same in another process that runs the same Python."""
    constants = [_code_as_text(part) if isinstance(part, CodeType) else repr(part) for part in code.co_consts]
    told = f"{code.co_code!r}{code.co_names}{constants}"
    return hashlib.sha256(told.encode()).hexdigest()


def _package_of(thing: Any) -> str:
    """The package, or the script, that a class, a function inside its decorators or the class of an object is written in."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(thing, partial):
            thing = thing.func
        elif isinstance(thing, MethodType):
            thing = thing.__func__
        elif isinstance(thing, FunctionType):
            thing = thing.__dict__.get("__wrapped__", thing)
    if isinstance(thing, FunctionType):
        return str(thing.__globals__.get("__name__")).partition(".")[0]
    return str((thing if isinstance(thing, type) else type(thing)).__module__).partition(".")[0]
