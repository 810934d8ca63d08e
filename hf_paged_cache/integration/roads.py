"""Which of two ways a call takes: on rows of its own, or in the pool; both stand over the same blocks until the second is gone.

A model takes the first where all its layers see all tokens; what that way has not got yet takes the other.
"""

import os
from itertools import count
from typing import Any

from transformers.cache_utils import DynamicLayer

from ..model.support import cache_layers, has_index, has_state, holds_nothing

WAYS = (
    "rows",
    "pool",
    "mixed",
)  # "mixed": each further call takes the other one, so that what one keeps the other finds
way = os.environ.get("HF_PAGED_CACHE_WAY", "rows")  # where a model may take either
# where models whose layers have windows run: "rows" or "pool"
windows = os.environ.get("HF_PAGED_CACHE_WINDOWS", "rows")
states = os.environ.get("HF_PAGED_CACHE_STATES", "rows")  # the same of models whose layers carry states
ranks = os.environ.get("HF_PAGED_CACHE_RANKS", "rows")  # of models that processes share
images = os.environ.get("HF_PAGED_CACHE_IMAGES", "rows")  # of models that take images
_calls = count()


def why_in_pool(model: Any, *, rank_groups: Any, placeholders: Any) -> str | None:
    """Why no call of this model runs on rows of its own yet; None: they do."""
    if rank_groups and ranks != "rows":
        return "other processes share the model"
    if placeholders and images != "rows":
        return "the model takes images"
    layers = [layer for layer in cache_layers(model) if type(layer) is not DynamicLayer and not holds_nothing(layer)]
    carry = [layer for layer in layers if has_state(layer)]
    if carry and states != "rows":
        return "some layers carry states"
    if not carry and not all(map(has_index, layers)) and windows != "rows":
        return "some layers do not see all tokens"
    return None


def takes_rows(*, asked: bool = False) -> bool:
    """Whether a call of a model that may, a `generate` or a loop of forwards, runs on rows of its own.

    Args:
        asked: its cache was built so that their steps are captured, which the pool cannot.
    """
    if way == "mixed" and not asked:
        return bool(next(_calls) % 2)
    return asked or way == "rows"
