"""Decides how much memory a pool may take by default: a share of what its device has free.

What other stores were promised does not count as free. Keeps the promises of the stores that live. Refuses nothing.
"""

from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil
import torch

from ..locks import new_lock

DEFAULT_SHARE = 0.5  # share of the free memory, when neither num_blocks nor max_bytes is given

# Files in which Linux tells a container its limit, its usage and its statistics, and the name of the statistic that
# counts reclaimable bytes: control groups version 2, then version 1.
_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_CONTROL_GROUP_ROOT = Path("/sys/fs/cgroup")


_stores: WeakSet[Any] = WeakSet()  # stores of blocks that were promised memory
_lock = new_lock()  # guards `_stores`


def add_store(store: object) -> None:
    """Keep what the store may still take from being promised to others, as long as the store lives."""
    with _lock:
        _stores.add(store)


def default_budget_bytes(device: torch.device, store: object = None) -> int:
    """Return `DEFAULT_SHARE` of what `device` has free now and no other store in this process was promised.

    Of several stores each gets at least an equal part of `DEFAULT_SHARE`, whatever the others were promised: most
    stores never take all of it. The caller holds no store's lock: other stores' locks are taken, one after the other.
    """
    free = free_bytes(device)
    with _lock:
        stores = list(_stores)
    to_come = [other.bytes_to_come(device) for other in stores if other is not store]
    others = [num_bytes for num_bytes in to_come if num_bytes > 0]
    return int(max(free - sum(others), free // (1 + len(others))) * DEFAULT_SHARE)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that `device` has free now; in a container, those that its limit leaves.

    For an accelerator that does not tell, they are the host's.
    """
    free = _free_bytes_of_accelerator(device)
    if free is not None:
        return free
    available = int(psutil.virtual_memory().available)
    in_container = _free_bytes_in_container()
    return available if in_container is None else min(available, in_container)


def _free_bytes_of_accelerator(device: torch.device) -> int | None:
    """Return the bytes that the driver says are free, and those that torch's allocator holds and nobody uses.

    None for a host, or if the accelerator does not tell.
    """
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    accelerator = torch.accelerator
    try:
        free, _ = accelerator.get_memory_info(device)
        return free + accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    except (AttributeError, RuntimeError, ValueError):  # this torch, device or accelerator does not tell
        return None


def _free_bytes_in_container() -> int | None:
    """Return the bytes left of the container's limit; None if there is no limit, or it cannot be read."""
    for limit, usage, statistics, reclaimable in _CONTROL_GROUPS:
        try:
            texts = [(_CONTROL_GROUP_ROOT / name).read_text(encoding="ascii") for name in (limit, usage, statistics)]
            counts = dict(line.split() for line in texts[2].splitlines())
            return max(0, int(texts[0]) - int(texts[1]) + int(counts[reclaimable]))
        except (OSError, ValueError, KeyError):  # no such file; "max": no limit
            continue
    return None
