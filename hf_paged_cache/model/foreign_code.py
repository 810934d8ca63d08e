"""Finds functions that compute a model's forward, and says whose they are: transformers', a library's, or others'."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, repeat
from operator import attrgetter
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as everywhere

from .weights import REPLACED, Listing

# Hooks and replaced forwards of these packages do not change what a layer computes: they move tensors or record. From
# accelerate only hooks count, since its mixed precision replaces a forward, too. What PEFT's hooks carry is read apart.
_NEUTRAL_PACKAGES = ("accelerate.hooks.", "hf_paged_cache.", "peft.", "torch._dynamo.", "transformers.")
# Hooks and replaced forwards of these packages change what a layer computes, but for every token alike, and nobody
# reads what they have seen.
_UNIFORM_PACKAGES = (
    *_NEUTRAL_PACKAGES,
    *("accelerate.", "deepspeed.", "liger_kernel.", "kernels.", "optimum.", "torch.", "trl."),
    *("apex.", "causal_conv1d.", "einops.", "fla.", "flash_attn.", "mamba_ssm.", "timm."),
    *("torchaudio.", "torchvision.", "xformers."),
    *("awq.", "bitsandbytes.", "compressed_tensors.", "gptqmodel.", "hqq.", "torchao."),
)
_REPLACED = sorted(REPLACED)
_FORWARD = attrgetter("forward")
# A function that may change what a module computes: number of the module, name of the module's class, and the function.
# Hooks of all modules have number -2. The forward of a class has number -1, and "" for a name.
Function = tuple[int, str, Any]


def functions_of(listing: Listing) -> list[Function]:
    """List every function that may change what a module computes: functions on modules, then each class's forward."""
    modules, found = listing.modules, list[Function]()
    for number in listing.with_functions():
        module = modules[number]
        attributes = module.__dict__
        hooks = *attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values()
        for each in (*hooks, *map(attributes.get, _REPLACED)):
            if each is not None and not _is_from(_NEUTRAL_PACKAGES, each, module):
                found.append((number, type(module).__name__, each))  # most modules have none
    of_all = *everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()
    found.extend(zip(repeat(-2), repeat(type(modules[0]).__name__), of_all))
    found.extend(zip(repeat(-1), repeat(""), map(_FORWARD, dict.fromkeys(map(type, modules)))))
    return found


def foreign_function(modules: list[nn.Module], functions: Iterable[Function]) -> str | None:
    """Name the first function on a module whose package is not known to treat all tokens alike; None: there is none."""
    for number, where, function in functions:
        if where and not _is_from(_UNIFORM_PACKAGES, function, modules[max(number, 0)]):
            return f"{name_of(function)} ({module_name(function)}) hooks or replaces the forward of a {where}"
    return None


def own_forward(functions: Iterable[Function]) -> str | None:
    """Name the first forward of a class that no library known here has written; None: there is none."""
    for _, where, function in functions:
        if not where and not f"{module_name(function)}.".startswith(_UNIFORM_PACKAGES):
            return f"{name_of(function)} ({module_name(function)})"
    return None


def foreign_layer(modules: list[nn.Module]) -> str | None:
    """Name the first layer of somebody else that may compute with what nobody watches; None: there is none.

    Such a layer is round other layers, or has no weight.
    """
    own = f"{type(modules[0]).__module__.partition('.')[0]}."
    for module in modules:
        package = f"{type(module).__module__}."
        has_weight = not module._modules and (hasattr(module, "weight") or hasattr(module, "qweight"))
        if not has_weight and not package.startswith((*_UNIFORM_PACKAGES, own)):
            where = "round a layer" if module._modules else "among the layers"
            return f"a {type(module).__qualname__} ({type(module).__module__}) is {where}"
    return None


def peft_hooks(modules: Iterable[nn.Module]) -> list[tuple[str, dict[str, Any]]]:
    """List PEFT's hooks on modules: the module that defines each, and the arguments of a call that it passes on."""
    if "peft" not in sys.modules:
        return []
    return [
        (name, getattr(hook, "keywords", {"": None}))
        for module in modules
        for hook in module._forward_pre_hooks.values()
        if (name := module_name(hook)).startswith("peft.")
    ]


def module_name(function: Any) -> str:
    """Return the module that defines a function. It is not `__module__`, which `functools.wraps` copies."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)
    written = getattr(function, "__globals__", None)
    return str(written["__name__"]) if written is not None else type(function).__module__


def name_of(function: Any) -> str:
    """Return the qualified name of a function; of any other callable, that of its class."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is_from(packages: tuple[str, ...], function: Any, module: nn.Module) -> bool:
    """Return whether a function is from these packages, as is all that it wraps except the module's forward."""
    while function is not None and getattr(function, "__func__", function) is not type(module).forward:
        if not f"{module_name(function)}.".startswith(packages):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class Numbers:
    """`Numbers` gives each function a number that no other has had.

    References are weak: a hook may hold much memory.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[int, Any]] = {}  # ids of a function and its owner -> number, references
        self._next = count(1)

    def of(self, functions: Iterable[Any]) -> list[int]:
        """Return the number of each function."""
        found = []
        for each in functions:
            # a bound method is another object each time it is read
            function, owner = getattr(each, "__func__", each), getattr(each, "__self__", None)
            key = id(function), id(owner)
            if key not in self.known:
                forget = partial(_forget, self.known, key)
                self.known[key] = next(self._next), [_watched(part, forget) for part in (function, owner)]
            found.append(self.known[key][0])
        return found


def _forget(known: dict[tuple[int, int], Any], key: tuple[int, int], _: object) -> None:
    known.pop(key, None)


def _watched(thing: Any, on_end: Callable[[Any], Any]) -> Any:
    """Return a weak reference that calls `on_end` at the end; `thing` itself if its type has no weak references."""
    try:
        return ref(thing, on_end)
    except TypeError:
        return thing
