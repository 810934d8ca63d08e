"""Which of two ways a call takes: on rows of its own, or in the pool; both stand over the same blocks until the second is gone.

A model takes the first where all its layers see all tokens; what that way has not got yet takes the other.
"""

import os
from itertools import count
from typing import Any

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..model.cache_adapters import own_cache_class
from ..model.support import cache_layers, holds_nothing
from .generate_arguments import GenerateArguments

WAYS = (
    "rows",
    "pool",
    "mixed",
)  # "mixed": each further call takes the other one, so that what one keeps the other finds
way = os.environ.get("HF_PAGED_CACHE_WAY", "rows")  # where a model may take either
# where models whose layers have windows run: "rows" or "pool"
windows = os.environ.get("HF_PAGED_CACHE_WINDOWS", "pool")
_calls = count()


def why_in_pool(
    model: Any, *, has_tiers: bool, rank_groups: Any, placeholders: Any, rope_by_length: bool
) -> str | None:
    """Why no call of this model runs on rows of its own yet; None: they do."""
    if has_tiers:
        return "blocks have lower tiers"
    if rank_groups:
        return "other processes share the model"
    if placeholders:
        return "the model takes images"
    if rope_by_length:
        return "rotary frequencies depend on length"
    if own_cache_class(model) is not None:
        return "the model has a cache class of its own"
    layers = [layer for layer in cache_layers(model) if type(layer) is not DynamicLayer and not holds_nothing(layer)]
    if layers and (windows != "rows" or any(type(layer) is not DynamicSlidingWindowLayer for layer in layers)):
        return "some layers do not see all tokens"
    return None


def takes_rows(given: GenerateArguments | None = None, *, asked: bool = False) -> bool:
    """Whether a call of a model that may, a `generate` or a loop of forwards, runs on rows of its own.

    Args:
        asked: its cache was built so that their steps are captured, which the pool cannot.
    """
    if given is not None and given.chunk_size is not None and not given.verifies_drafts:
        return False
    if given is not None and given.synced_gpus:  # processes in step run equally many forwards, and none ahead
        return False
    if way == "mixed" and not asked:
        return bool(next(_calls) % 2)
    return asked or way == "rows"
