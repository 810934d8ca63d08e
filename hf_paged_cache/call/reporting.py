"""The numbers that `PagedPrefixCache.stats` gives, read where each of them is kept. Takes back what collected caches left first."""

from ..stats import CacheStats
from .call import Call


def stats_of(call: Call) -> CacheStats:
    """Tokens of all calls that one cache has run, and the blocks of its store now."""
    counts, metrics, blocks = call.counters, call.counters.metrics, call.store
    with blocks.lock:
        blocks.settle()
        return CacheStats(
            prompt_tokens=metrics.num_queried_tokens,
            computed_tokens=metrics.num_queried_tokens - metrics.num_hit_tokens,
            reused_tokens=metrics.num_hit_tokens,
            hit_rate=metrics.hit_rate,
            recent_hit_rate=metrics.recent_hit_rate,
            num_calls=counts.num_calls,
            num_blocks=blocks.max_num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.allocator.num_cached_blocks,
            num_blocks_in_use=blocks.allocator.num_blocks_in_use,
            num_pinned_blocks=blocks.pins.num_blocks,
            num_evictions=blocks.allocator.num_evictions,
            num_copies_on_write=blocks.allocator.num_copies_on_write,
            kv_bytes=blocks.kv_bytes_in_use + call.reader.num_bytes,
            peak_kv_bytes=call.peak_kv_bytes,
            pool_bytes=blocks.pool.pool_bytes,
        )
