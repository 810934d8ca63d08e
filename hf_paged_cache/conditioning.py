"""All that conditions keys and values besides tokens: weights, modules, hooks, adapters, autocast, salt -> a root.

Owns the question "is this still the model that computed those blocks?". Nobody has to remember a reset: what changes
K/V changes the root, and blocks under another root are not found. Also names what makes a whole forward unfit for
reuse (`Conditioning.bypass`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import root_hash

_VALUES_PER_TENSOR = 8
# Hooks and replaced forwards of these packages move, record or dispatch; they do not change what a layer computes.
_NEUTRAL_PACKAGES = ("accelerate.", "hf_paged_cache.", "peft.", "transformers.")
_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks")
_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "scaling", "merged_adapters", "fan_in_fan_out")
_ROPE_BY_LENGTH = {"dynamic", "longrope"}  # frequencies depend on the longest position of a forward


class Conditioning:
    """What the keys and values of one model depend on, read anew for every call.

    Args:
        model: read, never changed; held.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules: list[tuple[nn.Module, list[Any]]] = []  # module, its children as they were
        self._tensors: list[tuple[dict[str, Any], str, Tensor, int]] = []  # owner, name, tensor, data_ptr
        self._samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # strided views of the tensors
        self._unsampled: list[Tensor] = []  # told apart by version only
        self._adapters: list[nn.Module] = []
        self._droppers: list[nn.Module] = []
        self._rope_types: set[str] = set()
        self._structure = b""
        self._serials: dict[int, tuple[int, Any]] = {}  # id -> (number, the object itself, or its id comes back)

    def digest(self) -> bytes:
        """Digest of all that conditions every row of a call now.

        Cost: a walk over a flat list of modules and one `torch.cat` for each device and dtype; on an accelerator one
        synchronisation for each of those.
        """
        if not self._is_as_listed():
            self._list_model()
        parts = [self._structure]
        for samples in self._samples.values():
            values = torch.cat(samples)
            parts.append(values.view(torch.uint8).cpu().numpy().tobytes())
        parts.append(repr([(tensor.data_ptr(), _version(tensor)) for tensor in self._unsampled]).encode())
        parts.append(repr(list(self._hook_numbers())).encode())
        parts.append(repr([[repr(getattr(m, name, None)) for name in _ADAPTER_STATE] for m in self._adapters]).encode())
        parts.append(_autocast_state(self._device_types()).encode())
        parts.append(str(getattr(self.model.config, "_attn_implementation", None)).encode())
        return root_hash(*parts)

    def bypass(self) -> str | None:
        """Why nothing of a forward may be reused or committed now; None when it may."""
        if any(module.training for module in self._droppers):
            return "a dropout is active; call model.eval()"
        by_length = sorted(self._rope_types & _ROPE_BY_LENGTH)
        if by_length:
            return f"rope of type {by_length[0]} depends on the length of a sequence"
        return None

    def _is_as_listed(self) -> bool:
        if not self._modules:
            return False
        for owner, name, tensor, pointer in self._tensors:
            if owner.get(name) is not tensor or tensor.data_ptr() != pointer:
                return False
        return all(list(module._modules.values()) == children for module, children in self._modules)

    def _list_model(self) -> None:
        """Walk the module tree once, and keep flat lists of all that may change."""
        modules = list(self.model.modules())
        self._modules = [(module, list(module._modules.values())) for module in modules]
        self._tensors, self._samples, self._unsampled = [], {}, []
        names = []
        for module in modules:
            names.append(type(module).__qualname__)
            for owner, name, tensor in _weights_of(module):
                names.append(f"{name}{tuple(tensor.shape)}{tensor.dtype}{tensor.device}")
                self._tensors.append((owner, name, tensor, tensor.data_ptr()))
                sample = _sample(tensor)
                if sample is None:
                    self._unsampled.append(tensor)
                else:
                    self._samples.setdefault((sample.device, sample.dtype), []).append(sample)
        self._structure = hashlib.sha256("\n".join(names).encode()).digest()
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]
        self._droppers = [module for module in modules if _drops(module)]
        self._rope_types = {rope_type for module in modules for rope_type in _rope_types(module)}

    def _hook_numbers(self) -> Iterator[tuple[int, int]]:
        """(module number, hook number) of all hooks and replaced forwards that may change what a module computes."""
        for number, (module, _) in enumerate(self._modules):
            for name in _HOOK_DICTS:
                hooks = module.__dict__[name]
                if hooks:
                    for hook in hooks.values():
                        if not _is_neutral(hook):
                            yield number, self._number(hook)
            forward = module.__dict__.get("forward")
            if forward is not None and not _is_neutral(forward):
                yield number, self._number(forward)

    def _number(self, thing: Any) -> int:
        """A number for an object, the same each time it is seen."""
        function = getattr(thing, "__func__", thing)  # a bound method is another object each time it is read
        number, _ = self._serials.setdefault(id(function), (len(self._serials), (function, thing)))
        return number

    def _device_types(self) -> list[str]:
        return sorted({device.type for device, _ in self._samples} | {"cpu"})


def _weights_of(module: nn.Module) -> Iterable[tuple[dict[str, Any], str, Tensor]]:
    """Parameters and persistent buffers; a buffer that is not saved is derived, and some forwards rewrite theirs."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield module._parameters, name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield module._buffers, name, buffer


def _sample(tensor: Tensor) -> Tensor | None:
    """A view of a few values spread over a tensor, which follows every change made in place; None without one."""
    if tensor.device.type == "meta" or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    with torch.no_grad():
        values = tensor.detach()
        if not values.is_contiguous():
            dense = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)) + 1
            if dense != values.numel():
                return None
            values = values.as_strided((values.numel(),), (1,))
        values = values.view(-1)
        return values[:: max(1, values.numel() // _VALUES_PER_TENSOR)][:_VALUES_PER_TENSOR]


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count theirs
        return -1


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values while it trains."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in module.__dict__.items())


def _rope_types(module: nn.Module) -> list[str]:
    """The kinds of rotary embedding a module computes."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        return [rope_type]
    if isinstance(rope_type, dict):
        return [str(value) for value in rope_type.values()]
    return []


def _is_neutral(function: Callable[..., Any]) -> bool:
    function = getattr(function, "func", function)  # functools.partial
    name = getattr(function, "__module__", None) or ""
    return f"{name}.".startswith(_NEUTRAL_PACKAGES)


def _autocast_state(device_types: Iterable[str]) -> str:
    return ",".join(
        f"{device_type}:{torch.get_autocast_dtype(device_type)}"
        for device_type in device_types
        if torch.is_autocast_enabled(device_type)
    )
