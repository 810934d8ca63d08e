"""Owns the counts of calls: of one cache, or of all caches of a store, collected ones included. Plain numbers."""

from ..blocks import PrefixCacheMetrics

_WINDOW = 100  # forwards of prompts that the recent hit rate is about


class CallTotals:
    """Prompt tokens, those reused and shared, and calls.

    Attributes:
        metrics: prompt tokens, those reused and those shared, of all calls and of the last forwards.
        num_calls: calls that computed something.
        num_bypassed_calls: those of which a part ran without the store.
    """

    def __init__(self) -> None:
        self.metrics = PrefixCacheMetrics(window=_WINDOW)
        self.num_calls = 0
        self.num_bypassed_calls = 0

    def record(self, num_tokens: int, num_computed: int, num_reused: int, *, num_calls: int) -> None:
        """Count a forward of prompts, which begins `num_calls` calls: 0 or 1."""
        self.num_calls += num_calls
        self.metrics.record(num_tokens, num_reused, num_tokens - num_computed - num_reused)
