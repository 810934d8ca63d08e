"""The hit rate. Scenario 65."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.metrics import PrefixCacheMetrics
from hf_paged_cache.errors import CacheArgumentError


def test_the_recent_rate_forgets_queries_outside_its_window():
    metrics = PrefixCacheMetrics(window=2)
    assert metrics.hit_rate == metrics.recent_hit_rate == 0.0
    for queried, hit in [(10, 5), (10, 10), (30, 30)]:
        metrics.record(queried, hit)
    assert metrics.recent_hit_rate == 1.0
    assert metrics.hit_rate == 0.9
    assert (metrics.num_queries, metrics.num_queried_tokens, metrics.num_hit_tokens) == (3, 50, 45)


def test_rates_are_by_token_and_not_by_query():
    metrics = PrefixCacheMetrics()
    metrics.record(1, 1)
    metrics.record(99, 0)
    assert metrics.hit_rate == metrics.recent_hit_rate == 0.01


@pytest.mark.parametrize(("queried", "hit"), [(1, 2), (1, -1), (-1, -1)])
def test_counts_that_cannot_be_are_refused(queried, hit):
    metrics = PrefixCacheMetrics()
    with pytest.raises(CacheArgumentError):
        metrics.record(queried, hit)
    assert metrics.num_queries == 0


def test_a_window_without_queries_is_refused():
    with pytest.raises(CacheArgumentError, match="window is 0"):
        PrefixCacheMetrics(window=0)
