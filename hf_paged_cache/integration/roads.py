"""Which of two ways a call takes: on rows of its own, or in the pool; both stand over the same blocks until the second is gone.

It takes the first, but for a cache with `attention="gather"`, and where a test says so.
"""

import os
from itertools import count

WAYS = (
    "rows",
    "pool",
    "mixed",
)  # "mixed": each further call takes the other one, so that what one keeps the other finds
way = os.environ.get("HF_PAGED_CACHE_WAY", "rows")
_calls = count()


def takes_rows(*, asked: bool = False) -> bool:
    """Whether a call, a `generate` or a loop of forwards, runs on rows of its own.

    Args:
        asked: its cache was built so that their steps are captured, which the pool cannot.
    """
    if way == "mixed" and not asked:
        return bool(next(_calls) % 2)
    return asked or way == "rows"
