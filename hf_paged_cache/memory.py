"""How much memory a pool may take when nobody says: a share of what its device has free."""

import os

import torch

DEFAULT_SHARE = 0.5  # of the free memory, when neither num_blocks nor max_bytes is given
_FALLBACK_BYTES = 4 * 2**30  # where the platform tells neither free nor total memory


def default_budget_bytes(device: torch.device) -> int:
    """`DEFAULT_SHARE` of the memory free on `device` now; on a host that tells only its total, a quarter of that."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * DEFAULT_SHARE)
    if device.type == "mps":
        return int((torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()) * DEFAULT_SHARE)
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_AVPHYS_PAGES" in names:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * DEFAULT_SHARE)
    if "SC_PHYS_PAGES" in names:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * DEFAULT_SHARE / 2)
    return _FALLBACK_BYTES
