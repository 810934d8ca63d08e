"""The hit rate. Scenario 65."""

from __future__ import annotations

from hf_paged_cache.blocks.metrics import PrefixCacheMetrics


def test_the_recent_rate_forgets_queries_outside_its_window():
    metrics = PrefixCacheMetrics(window=2)
    assert metrics.hit_rate == metrics.recent_hit_rate == 0.0
    for queried, hit in [(10, 5), (10, 10), (30, 30)]:
        metrics.record(queried, hit)
    assert metrics.recent_hit_rate == 1.0
    assert metrics.hit_rate == 0.9
    assert (metrics.num_queried_tokens, metrics.num_hit_tokens) == (50, 45)


def test_rates_are_by_token_and_not_by_query():
    metrics = PrefixCacheMetrics()
    metrics.record(1, 1)
    metrics.record(99, 0)
    assert metrics.hit_rate == metrics.recent_hit_rate == 0.01
