"""Owns the counts of calls: of one cache, or of all caches of a store, collected ones included. Plain numbers."""

import re
from collections import Counter
from collections.abc import Iterable

from ..blocks import PrefixCacheMetrics

_WINDOW = 100  # forwards of prompts that the recent hit rate is about
_MOST_REASONS = 64  # there are about twenty


class CallTotals:
    """Prompt tokens, those reused and shared, and calls.

    Attributes:
        metrics: prompt tokens, those reused and those shared, of all calls and of the last forwards.
        num_calls: calls that computed something.
        num_bypassed_calls: those of which a part ran without the store.
        computed_because: why rows matched no further, without its numbers -> tokens that were computed after that.
    """

    def __init__(self) -> None:
        self.metrics = PrefixCacheMetrics(window=_WINDOW)
        self.num_calls = 0
        self.num_bypassed_calls = 0
        self.computed_because: Counter[str] = Counter()

    def record(self, num_tokens: int, num_computed: int, num_reused: int, *, num_calls: int) -> None:
        """Count a forward of prompts, which begins `num_calls` calls: 0 or 1."""
        self.num_calls += num_calls
        self.metrics.record(num_tokens, num_reused, num_tokens - num_computed - num_reused)

    def record_reasons(self, reasons: Iterable[tuple[str, int]]) -> None:
        """Count why each row of a forward matched no further, and how many tokens it computed."""
        for stopped, num_computed in reasons:
            if num_computed:
                why = re.sub(r"\d+", "…", stopped.partition(";")[0])
                if why in self.computed_because or len(self.computed_because) < _MOST_REASONS:
                    self.computed_because[why] += num_computed
