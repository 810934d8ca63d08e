"""Owns the hit rate of a prefix cache."""

from __future__ import annotations

from collections import deque


class PrefixCacheMetrics:
    """`PrefixCacheMetrics` counts which share of queried tokens was hit, in all queries and in the last `window`.

    Examples:
        >>> metrics = PrefixCacheMetrics(window=1)
        >>> metrics.record(10, 0), metrics.record(10, 8)
        (None, None)
        >>> metrics.hit_rate, metrics.recent_hit_rate
        (0.4, 0.8)
    """

    def __init__(self, window: int = 1000) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_shared_tokens = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)  # numbers of tokens queried and hit

    def record(self, num_queried_tokens: int, num_hit_tokens: int, num_shared_tokens: int = 0) -> None:
        """Count one query, of one sequence or of several.

        Args:
            num_shared_tokens: tokens that were computed once for several sequences: those of all but the first.
        """
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens
        self.num_shared_tokens += num_shared_tokens
        self._recent.append((num_queried_tokens, num_hit_tokens))

    @property
    def hit_rate(self) -> float:
        """Share of tokens hit among tokens queried, over all queries; 0.0 before the first."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        """Share of tokens hit among tokens queried, over the last `window` queries; 0.0 before the first."""
        num_queried, num_hit = sum(each[0] for each in self._recent), sum(each[1] for each in self._recent)
        return num_hit / num_queried if num_queried else 0.0
