"""Owns the hit rate of a prefix cache. Refuses to count more tokens hit and shared than queried."""

from __future__ import annotations

from collections import deque

from ..errors import CacheArgumentError


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
        if window < 1:
            raise CacheArgumentError(f"window is {window}; it must be at least 1 query")
        self.window = window
        self.num_queries = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_shared_tokens = 0
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=window)  # numbers of tokens queried, hit and shared

    def record(self, num_queried_tokens: int, num_hit_tokens: int, num_shared_tokens: int = 0) -> None:
        """Count one query, of one sequence or of several.

        Args:
            num_shared_tokens: tokens that were computed once for several sequences: those of all but the first.

        Raises:
            CacheArgumentError: more tokens hit and shared than queried, or fewer than 0.
        """
        if num_hit_tokens < 0 or num_shared_tokens < 0 or num_hit_tokens + num_shared_tokens > num_queried_tokens:
            shared = f" and {num_shared_tokens} shared" if num_shared_tokens else ""
            raise CacheArgumentError(
                f"{num_hit_tokens} tokens hit{shared} of {num_queried_tokens} queried; give 0 to all of them"
            )
        self.num_queries += 1
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens
        self.num_shared_tokens += num_shared_tokens
        self._recent.append((num_queried_tokens, num_hit_tokens, num_shared_tokens))

    @property
    def recent(self) -> list[tuple[int, int, int]]:
        """Numbers of tokens queried, hit and shared in each of the last `window` queries, the oldest first."""
        return list(self._recent)

    @property
    def hit_rate(self) -> float:
        """Share of tokens hit among tokens queried, over all queries; 0.0 before the first."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        """Share of tokens hit among tokens queried, over the last `window` queries; 0.0 before the first."""
        queried, hit, _ = map(sum, zip(*self._recent, strict=True)) if self._recent else (0, 0, 0)
        return hit / queried if queried else 0.0
