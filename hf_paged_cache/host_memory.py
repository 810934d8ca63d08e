"""Host memory that tensors are laid over: zeroed without being written, and used again when nobody reads it any more."""

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor

_MIN_HUGE_BYTES = 2**25  # below, zeroing whole huge pages costs more than it saves
_MIN_MAPPED_BYTES = 2**20  # below, a mapping of its own costs more than writing zeros
_MIN_RECYCLED_BYTES = 2**17  # below, malloc recycles by itself


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory that may be written in place by any later forward, in or out of inference mode.

    On a host, large memory is mapped rather than written: a page costs nothing until it is used, and where the kernel
    has huge pages then a fifth of what a small one's first write costs.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cpu" and num_bytes >= _MIN_MAPPED_BYTES:
            with contextlib.suppress(OSError):  # no address space: let torch say so
                return torch.frombuffer(_mapped(num_bytes), dtype=torch.uint8).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)


class RecycledMemory:
    """Memory for copies that live as long as somebody reads them, and are then made again: of each layer, in turn.

    Asking the system for it each time costs as much as the copy, or more: its pages come and go. A tensor laid over a
    mapping holds a reference to it, so those that nobody but this object holds are free; tensors that were kept keep
    their memory, whoever keeps them.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A host tensor of that shape, unspecified values; its memory is its own until it and its views are gone."""
        num_elements = math.prod(shape)
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < _MIN_RECYCLED_BYTES:
            return torch.empty(shape, dtype=dtype)
        mappings = self._mappings
        for number in range(len(mappings)):
            if sys.getrefcount(mappings[number]) == _UNUSED and len(mappings[number]) >= num_bytes:
                break
        else:
            used = [number for number in range(len(mappings)) if sys.getrefcount(mappings[number]) != _UNUSED]
            self._mappings = mappings = [mappings[number] for number in used]  # those too small go
            mappings.append(_mapped(num_bytes + num_bytes // 4))  # the next tensor is a little longer
            number = len(used)
        return torch.frombuffer(mappings[number], dtype=dtype, count=num_elements).view(shape)

    def drop(self) -> None:
        """Hold none any more; tensors that are still read keep theirs."""
        self._mappings = []

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(len(memory) for memory in self._mappings)


def _mapped(num_bytes: int) -> mmap.mmap:
    """Zeroed memory.

    Raises:
        OSError: there is no address space.
    """
    memory = mmap.mmap(-1, num_bytes)
    if num_bytes >= _MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _references_of_unused() -> int:
    """What `sys.getrefcount` says of a mapping that only a list holds."""
    mappings = [_mapped(1)]
    return sys.getrefcount(mappings[0])


_UNUSED = _references_of_unused()
