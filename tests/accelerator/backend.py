"""Makes "sim" a device of PyTorch, with two indices: tensors that say they lie there, run on the CPU, and log what a GPU would have to do.

`start` registers it for the whole process and for good: the tests of this folder run in one of their own (`conftest.py`).
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from .memory import NUM_DEVICES, memory
from .tensor import Event, SimulatedTensor, copy, is_pinned, launch, located, pin, run, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "sim"

_FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "empty.memory_format",
    "empty_strided",
    "eye",
    "eye.m",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randint.low",
    "randn",
    "randperm",
    "randperm.generator",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)

_NUMBER = torch.ops.aten._local_scalar_dense.default


def why_not() -> str | None:
    """Why this PyTorch cannot be simulated on; None: it can."""
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="ascii").splitlines()
    pinned = next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    installed = torch.__version__.partition("+")[0]
    return None if installed == pinned else f"the simulated device is written for torch {pinned}, this is {installed}"


_libraries: list[torch.library.Library] = []  # kernels live as long as these


def is_started() -> bool:
    return bool(_libraries)


def start() -> None:
    """Register the device; once more does nothing."""
    if _libraries:
        return
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")
    # `torch.tensor(..., device=...)` comes here past every subclass, and reads numbers among its values so.
    library.impl("_local_scalar_dense", lambda tensor: run(_NUMBER, (tensor,), {}), "PrivateUse1")
    library.impl("_copy_from", lambda source, out, non_blocking=False: copy(out, source, non_blocking), "PrivateUse1")
    library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: pin(tensor.clone()), "CPU")
    _device_constructors()  # kept: what a default device is for, before these have other names
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _pinning(getattr(torch, name)))
    torch.Event = Event  # type: ignore[assignment, misc]
    torch.Generator = _Generator  # type: ignore[misc]
    for name in (*_MEMORY, "device_count", "synchronize", "empty_cache"):
        setattr(torch.accelerator, name, getattr(getattr(torch, NAME), name))
    torch.accelerator.get_memory_info = getattr(torch, NAME).mem_get_info


def _factory(func: Any) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = located(kwargs.pop("device"))
        kwargs.pop("pin_memory", None)
        out = SimulatedTensor(func(*args, **kwargs, device="cpu"), device)
        if not func.__name__.startswith("empty"):
            launch(func._overloadpacket.__name__, device)
        return out

    return made


def _pinning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """PyTorch asks an allocator in C++ for pinned memory; a simulated device has none."""

    @functools.wraps(function)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        out = function(*args, **kwargs)
        return pin(out) if pin_memory else out

    return made


class _Generator(torch.Generator):
    """Of a simulated device: one of the CPU, where its numbers are drawn. PyTorch would ask for one in C++."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        device = torch.device(device)
        return super().__new__(cls, device="cpu" if device.type == NAME else device)


# -------------------------------------------------------------------------------------------------------- what torch.sim is

_MEMORY = {
    "memory_allocated": lambda device=None: memory(device).allocated,
    "memory_reserved": lambda device=None: memory(device).allocated,
    "max_memory_allocated": lambda device=None: memory(device).peak,
    "max_memory_reserved": lambda device=None: memory(device).peak,
    "reset_peak_memory_stats": lambda device=None: memory(device).reset_peak(),
}

_current = [0]


def _set_device(device: Any) -> None:
    index = torch.device(device).index if isinstance(device, str) else getattr(device, "index", device)
    if not 0 <= (index or 0) < NUM_DEVICES:
        raise RuntimeError(f"invalid device index {index}: there are {NUM_DEVICES}")
    _current[0] = index or 0


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _current[0]
    _set_device(device)
    try:
        yield
    finally:
        _current[0] = before


def _synchronize(device: Any = None) -> None:
    index = _current[0] if device is None else device
    wait("synchronize", located(torch.device(NAME, index) if isinstance(index, int) else torch.device(index)))


def _module() -> ModuleType:
    module = ModuleType(f"torch.{NAME}")
    of_module: dict[str, Any] = {
        **_MEMORY,
        "mem_get_info": lambda device=None: (memory(device).free, memory(device).total),
        "get_memory_info": lambda device=None: (memory(device).free, memory(device).total),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: _current[0],
        "set_device": _set_device,
        "device": _device,
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "Event": Event,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
    }
    for name, value in of_module.items():
        setattr(module, name, value)
    return module
