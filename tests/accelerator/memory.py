"""Owns how many bytes each device holds: counted by storage, so views share them; a limit raises `torch.OutOfMemoryError`."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

TOTAL_BYTES = 1 << 28  # of each device, where no limit is set


class Memory:
    """The bytes of one device."""

    def __init__(self) -> None:
        self.allocated = 0  # bytes now
        self.peak = 0  # most bytes since `reset_peak`
        self.limit: int | None = None  # None: nothing is refused
        self.failing: int | None = None  # this many allocations from now, one is refused (0: the next); None: none is
        self.num_allocations = 0

    @property
    def total(self) -> int:
        return TOTAL_BYTES if self.limit is None else self.limit

    @property
    def free(self) -> int:
        return max(0, self.total - self.allocated)

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def take(self, num_bytes: int) -> None:
        """Count an allocation, or refuse it."""
        self.num_allocations += 1
        fails = self.limit is not None and self.allocated + num_bytes > self.limit
        if self.failing is not None:
            fails = fails or self.failing == 0
            self.failing = None if self.failing == 0 else self.failing - 1
        if fails:
            raise torch.OutOfMemoryError(
                f"sim: out of memory. Tried to allocate {num_bytes} bytes; {self.allocated} of {self.total} are allocated"
            )
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def give(self, num_bytes: int) -> None:
        self.allocated -= num_bytes


NUM_DEVICES = 2
_memories = tuple(Memory() for _ in range(NUM_DEVICES))


def memory(device: torch.device | str | int | None = None) -> Memory:
    """Of `device`; None: of the first."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return _memories[index or 0]


@contextmanager
def limited(limit: int, device: torch.device | str | int | None = None) -> Iterator[Memory]:
    """Within the block `device` has `limit` bytes."""
    of_device = memory(device)
    before, of_device.limit = of_device.limit, limit
    try:
        yield of_device
    finally:
        of_device.limit = before


class Allocation:
    """The bytes of one storage; whoever holds a tensor of that storage holds this."""

    __slots__ = ("__weakref__", "_num_bytes", "_of_device")

    def __init__(self, of_device: Memory, num_bytes: int) -> None:
        if num_bytes:
            of_device.take(num_bytes)
        self._of_device, self._num_bytes = of_device, num_bytes  # last: what was refused is not given back

    def __del__(self) -> None:
        if hasattr(self, "_num_bytes"):
            self._of_device.give(self._num_bytes)


# address of a storage -> its bytes
_allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()


def allocation_of(data: torch.Tensor, device: torch.device) -> Allocation:
    """The allocation of the storage of `data`, made if there is none."""
    storage = data.untyped_storage()
    allocation = _allocations.get(storage._cdata)
    if allocation is None:
        allocation = _allocations[storage._cdata] = Allocation(memory(device), storage.nbytes())
    return allocation
