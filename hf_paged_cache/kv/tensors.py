"""Makes zeroed tensors, and moves numbers between the host and devices: what is needed together in one transfer.

Each transfer to the host waits for the device. One to a device comes from pinned memory, so nobody waits for it.
"""

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

UNPINNED = ("cpu", "meta", "mps")  # kinds of devices that do not copy from pinned memory
_MIN_MAPPED_BYTES = 2**20  # below this, a mapping of its own costs more than writing zeros
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # torch's words for it, by platform


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory that any later forward may write in place, or raise torch.OutOfMemoryError.

    On a host, large memory is mapped, not written: a page costs nothing until it is used.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return zeros(shape, dtype, device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= _MIN_MAPPED_BYTES:
        with contextlib.suppress(OSError):  # no address space: let torch say so
            return torch.frombuffer(_mapped(num_bytes), dtype=dtype).view(shape)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _mapped(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory of this process alone; a forked one gets a copy. Raises OSError without address space."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no forks
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def read_arrays(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the values of tensors as int64 arrays of their shapes; floats are cut, and None stays None.

    Cost: one wait for each accelerator.
    """
    found: list[np.ndarray | None] = [None] * len(tensors)
    together: dict[torch.device, dict[int, Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.device.type == "cpu":
            found[number] = tensor.detach().to(torch.int64).numpy()
        else:
            together.setdefault(tensor.device, {})[number] = tensor
    for on_device in together.values():
        values = torch.cat([tensor.flatten().to(torch.int64) for tensor in on_device.values()]).cpu().numpy()
        for number, tensor in on_device.items():
            shape = tensor.shape
            found[number], values = values[: shape.numel()].reshape(shape), values[shape.numel() :]
    return found


def read_bytes(tensors: Mapping[tuple[torch.device, torch.dtype], Sequence[Tensor]]) -> bytes:
    """Return the bytes of 1-D tensors, reading those on a device together.  Cost: one wait for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for (device, _), same in tensors.items():
        by_device.setdefault(device, []).append(torch.cat([*same]).view(torch.uint8))
    found = b""
    for parts in by_device.values():
        found += (torch.cat(parts) if len(parts) > 1 else parts[0]).cpu().numpy().tobytes()
    return found


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return [N] int64 on `device`.  Cost: one transfer, which nobody waits for where memory can be pinned."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type not in UNPINNED:
        with contextlib.suppress(RuntimeError):  # no memory can be pinned: the host waits
            return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
