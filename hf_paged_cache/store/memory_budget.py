"""Owns how much memory a pool may take by default: a share of what its device has free. Refuses nothing and keeps nothing."""

from pathlib import Path

import psutil
import torch

DEFAULT_SHARE = 0.5  # of the free memory, when neither num_blocks nor max_bytes is given

# Files in which Linux tells a container its limit, its usage and its statistics, and the name of the statistic that counts
# reclaimable bytes: control groups version 2, then version 1.
_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_CONTROL_GROUP_ROOT = Path("/sys/fs/cgroup")


def default_budget_bytes(device: torch.device) -> int:
    """`DEFAULT_SHARE` of what `device` has free now; in a container, at most of what its limit leaves."""
    return int(_free_bytes(device) * DEFAULT_SHARE)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    available = int(psutil.virtual_memory().available)
    in_container = _free_bytes_in_container()
    return available if in_container is None else min(available, in_container)


def _free_bytes_in_container() -> int | None:
    """What is left of the container's limit; None: there is none, or it cannot be read."""
    for limit, usage, statistics, reclaimable in _CONTROL_GROUPS:
        try:
            texts = [(_CONTROL_GROUP_ROOT / name).read_text(encoding="ascii") for name in (limit, usage, statistics)]
            counts = dict(line.split() for line in texts[2].splitlines())
            return max(0, int(texts[0]) - int(texts[1]) + int(counts[reclaimable]))
        except (OSError, ValueError, KeyError):  # no such file; "max": no limit
            continue
    return None
