"""Owns host memory that tensors are laid over: zeroed without being written, and used again when no tensor refers to it.

Refuses nothing: where there is no address space, torch is asked.
"""

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor

_MIN_HUGE_BYTES = 2**25  # below, zeroing whole huge pages costs more than it saves
_MIN_MAPPED_BYTES = 2**20  # below, a mapping of its own costs more than writing zeros
_MIN_RECYCLED_BYTES = 2**17  # below, malloc recycles by itself
_MAX_FREE = 4  # free mappings kept when one of them is used again: keys and values of two sizes
SPARE_PART = 4  # a mapping is a fourth larger than asked for: at the next step rows are a little longer
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # what torch says of it, by platform
_MAX_HELD = 16  # mappings held, used ones included; older ones live on in the tensors over them


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, huge_pages: bool = False) -> Tensor:
    """Zeroed memory that any later forward may write in place, in or out of inference mode.

    On a host, large memory is mapped, not written: a page costs nothing until it is used.

    Args:
        huge_pages: ask the kernel for them. For memory that is used as a whole, and again; where memory fills up bit by
            bit, each huge page is waited for, in a virtual machine several times as long as for its small pages.

    Raises:
        torch.OutOfMemoryError: on whatever device; torch raises others of a host and of some accelerators.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return zeros(shape, dtype, device, huge_pages=huge_pages)
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= _MIN_MAPPED_BYTES:
        with contextlib.suppress(OSError):  # no address space: let torch say so
            return torch.frombuffer(_mapped(num_bytes, huge_pages=huge_pages), dtype=dtype).view(shape)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


class RecycledMemory:
    """Memory for copies that are read for a moment, such as those of one layer's rows.

    To ask the system for new memory costs as much as the copy. A tensor over a mapping refers to it, as its views do, so
    a mapping that only this object refers to is free. A tensor that is kept keeps its memory. Not thread-safe.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A host tensor with unspecified values, in memory that no other tensor uses.  Cost: looks at up to 16 mappings."""
        num_elements = math.prod(shape)
        num_bytes = num_elements * dtype.itemsize
        if num_bytes >= _MIN_RECYCLED_BYTES:
            with contextlib.suppress(OSError):  # no address space: let torch say so
                return torch.frombuffer(self._mapping_of(num_bytes), dtype=dtype, count=num_elements).view(shape)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def drop(self) -> None:
        """Let all memory go; tensors keep theirs."""
        self._mappings = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the mappings held, free or used."""
        return sum(map(len, self._mappings))

    def _mapping_of(self, num_bytes: int) -> mmap.mmap:
        """A free mapping of at least `num_bytes` and at most 4 times that, or a new one."""
        mappings = self._mappings
        # By index: a name would be a reference.
        free = [index for index in range(len(mappings)) if sys.getrefcount(mappings[index]) == _REFERENCES_WHEN_UNUSED]
        for index in free:
            if num_bytes <= len(mappings[index]) <= 4 * num_bytes:
                if len(free) > _MAX_FREE:
                    self._mappings = [mappings[at] for at in range(len(mappings)) if at == index or at not in free]
                return mappings[index]
        mapping = _mapped(num_bytes + num_bytes // SPARE_PART, huge_pages=True)
        wanted = [at for at in range(len(mappings)) if at not in free or len(mappings[at]) > 4 * num_bytes]
        self._mappings = [*(mappings[at] for at in wanted), mapping][-_MAX_HELD:]
        return mapping


def _mapped(num_bytes: int, *, huge_pages: bool = False) -> mmap.mmap:
    """Zeroed memory of this process alone: a forked process gets a copy. Raises OSError without address space."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no forks
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and num_bytes >= _MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _references_of_unused() -> int:
    """What `sys.getrefcount` says of a mapping that only a list holds."""
    mappings = [_mapped(1)]
    return sys.getrefcount(mappings[0])


_REFERENCES_WHEN_UNUSED = _references_of_unused()
