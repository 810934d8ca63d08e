"""What a model's code says, read without running it: names and strings in functions, and the source files of classes."""

import inspect
import sys
from collections.abc import Iterable
from types import CodeType, ModuleType
from typing import Any


def names_of(function: Any) -> set[str]:
    """Names and strings in a function's code, and in that of functions inside of it; none of what is no function."""
    names: set[str] = set()
    codes = [getattr(unwrapped_function(function), "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            names |= {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
            parts = [part for each in code.co_consts for part in (each if isinstance(each, tuple) else (each,))]
            names |= {part for part in parts if isinstance(part, str)}
            codes += parts
    return names


def unwrapped_function(function: Any) -> Any:
    """The function inside decorators, properties and methods."""
    for name in ("__func__", "fget", "func"):
        function = getattr(function, name, None) or function
    return inspect.unwrap(function)


def parents_of(classes: Iterable[type]) -> set[type]:
    """Classes, and those that they inherit from."""
    return {parent for kind in {*classes} for parent in kind.__mro__}


def sources_of(classes: Iterable[type]) -> set[ModuleType]:
    """The source files that define classes."""
    return {source for kind in classes if (source := sys.modules.get(kind.__module__)) is not None}
