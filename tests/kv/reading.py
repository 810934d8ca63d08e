"""What tests read of a pool."""

from __future__ import annotations

from hf_paged_cache.kv.slot_mapping import ReadSource
from torch import Tensor


def of_slots(slots: Tensor) -> ReadSource:
    """These slots, [R, C] int64."""
    return ReadSource(slots.to, *slots.shape)
