"""Moves numbers between the host and devices: what is needed together goes in one transfer.

Owns no tensor of a model. Each transfer to the host waits for the device. A transfer to a device comes from pinned
memory where there is any, and then nobody waits for it. On a CPU nothing is copied.
"""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

UNPINNED = ("cpu", "meta", "mps")  # kinds of devices that do not copy from pinned memory


def read_together(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the integers of each tensor, in order, whatever its shape; see `read_arrays`."""
    return [values.ravel().tolist() for values in read_arrays(tensors)]


def read_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return the values of tensors of integers or booleans, as int64 of their shapes; floats are cut.

    Cost: one wait for each accelerator.
    """
    found = [np.empty(0, np.int64)] * len(tensors)
    together: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            found[number] = tensor.detach().to(torch.int64).numpy()
        else:
            together.setdefault(tensor.device, []).append(number)
    for numbers in together.values():
        values = torch.cat([tensors[number].flatten().to(torch.int64) for number in numbers]).cpu().numpy()
        for number in numbers:
            shape = tensors[number].shape
            found[number], values = values[: shape.numel()].reshape(shape), values[shape.numel() :]
    return found


def read_bytes(tensors: Mapping[tuple[torch.device, torch.dtype], Sequence[Tensor]]) -> bytes:
    """Return the bytes of 1-D tensors, reading those on a device together.  Cost: one wait for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for (device, _), same in tensors.items():
        by_device.setdefault(device, []).append(torch.cat([*same]).view(torch.uint8))
    on_host = [(torch.cat(parts) if len(parts) > 1 else parts[0]).cpu() for parts in by_device.values()]
    return b"".join([part.numpy().tobytes() for part in on_host])


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return [N] int64 on `device`.  Cost: one transfer, which nobody waits for where memory can be pinned."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type not in UNPINNED:
        with contextlib.suppress(RuntimeError):  # no memory can be pinned: the host waits
            return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
