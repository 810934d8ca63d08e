"""Counts calls and their prompt tokens: of one cache, or of all caches of a store, collected caches included."""

import re
from collections import Counter
from collections.abc import Sequence

from ..stats import RowStats

_MOST_REASONS = 64  # most reasons that are counted; there are about twenty
_NUMBER = re.compile(r"\d+")


class CallTotals:
    """`CallTotals` counts calls, their prompt tokens, and why tokens were computed.

    Attributes:
        num_calls: number of calls that computed something.
        num_bypassed_calls: number of calls of which a part ran without the store.
        num_tokens, num_reused, num_shared: numbers of prompt tokens; of those that were known; of those that ran once
            for several rows, in all rows but the first.
        computed_because: why rows matched no further, with N in place of numbers -> number of tokens computed.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_reused = self.num_shared = 0
        self.num_calls = 0
        self.num_bypassed_calls = 0
        self.computed_because: Counter[str] = Counter()

    def record(self, rows: Sequence[RowStats], new: Sequence[RowStats], *, num_calls: int) -> None:
        """Count the `new` tokens of a forward of the rows of a call; `num_calls` is 1 where the call begins with it."""
        self.num_calls += num_calls
        for row, more in zip(rows, new, strict=True):
            self.num_tokens += more.prompt_tokens
            self.num_reused += more.reused_tokens
            self.num_shared += more.prompt_tokens - more.computed_tokens - more.reused_tokens
            if more.computed_tokens:
                why = _NUMBER.sub("N", row.stopped.partition(";")[0])
                if why in self.computed_because or len(self.computed_because) < _MOST_REASONS:
                    self.computed_because[why] += more.computed_tokens
