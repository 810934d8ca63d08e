"""Finds functions that compute a model's forward, and says whose they are: transformers', a library's, or others'."""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as everywhere

from .weights import REPLACED

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


class Function(NamedTuple):
    """`Function` is one that may change what a module computes."""

    module: int  # number of the module that it is on; -1: of all modules, or of a class
    where: str  # name of the module's class; "" for the forward of a class
    code: Any
    is_uniform: bool  # it is of a package that treats all tokens alike, as is all that it wraps
    hook: int = 0  # number that torch gives a hook, and gives no other; 0: it is a forward


def functions_of(modules: list[nn.Module]) -> list[Function]:
    """List functions on modules that may change what these compute, then the forward of each class."""
    top, found = modules[0], list[Function]()
    for hooks in (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks):
        for key, each in hooks.items():
            found.append(Function(-1, type(top).__name__, each, _is_from(_UNIFORM_PACKAGES, each, top), key))
    for number, module in enumerate(modules):
        on_it: list[tuple[int, Any]] = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
        on_it += [(0, module.__dict__[name]) for name in REPLACED if name in module.__dict__]
        for key, each in on_it:
            if not _is_from(_NEUTRAL_PACKAGES, each, module):
                is_uniform = _is_from(_UNIFORM_PACKAGES, each, module)
                found.append(Function(number, type(module).__name__, each, is_uniform, key))
    kinds: list[Any] = [*dict.fromkeys(map(type, modules))]
    forwards = [kind.forward for kind in kinds]
    return found + [Function(-1, "", each, f"{module_name(each)}.".startswith(_UNIFORM_PACKAGES)) for each in forwards]


def foreign_layer(modules: list[nn.Module]) -> str | None:
    """Name the first layer of somebody else that may compute with what nobody watches; None: there is none.

    Such a layer is round other layers, or has no weight.
    """
    own = f"{type(modules[0]).__module__.partition('.')[0]}."
    for module in modules:
        package = f"{type(module).__module__}."
        has_weight = not module._modules and (hasattr(module, "weight") or hasattr(module, "qweight"))
        is_packed = package.startswith("torch.ao.nn.")  # scales of a whole call; weights are in no parameter
        if is_packed or not (has_weight or package.startswith((*_UNIFORM_PACKAGES, own))):
            where = "round a layer" if module._modules else "among the layers"
            return f"a {type(module).__qualname__} ({type(module).__module__}) is {where}"
    return None


def passed_by_peft(modules: Iterable[nn.Module]) -> tuple[list[str] | None, str | None]:
    """Return the adapter of each row that PEFT's hooks name, if they do; and why nothing can be reused under them."""
    names: list[str] | None = None
    if "peft" not in sys.modules:
        return None, None
    for hook in [hook for module in modules for hook in module._forward_pre_hooks.values()]:
        if not (source := module_name(hook)).startswith("peft."):
            continue
        passed = getattr(hook, "keywords", {"": None})
        if "alora_offsets" in passed:
            return None, "activated LoRA changes keys and values at an offset of each row"
        if passed.keys() - {"adapter_names"}:
            return None, f"PEFT passes arguments of the call to its layers ({source})"
        names = names or passed.get("adapter_names")
    return None if names is None else list(names), None


def full_name(function: Any) -> str:
    """Return the name of a function and of the module that defines it."""
    return f"{module_name(function)}.{name_of(function)}"


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
