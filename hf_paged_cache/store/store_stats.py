"""Gathers the numbers of a store and of the calls on it. The caller holds the store's lock."""

from typing import Any

from ..stats import CacheStats
from .block_store import BlockStore
from .call_totals import CallTotals


def stats_of(
    store: BlockStore,
    totals: CallTotals,
    salt: bytes,
    static: Any,  # memory of static rows
    bytes_of_rows: int,
    peak_kv_bytes: int | None,
    backend: str | None,
) -> CacheStats:
    """Return the numbers of the calls in `totals`, and of the blocks now: all, or given a salt, its own.

    Given a salt, numbers in which other salts' blocks might show are None.
    """
    allocator, metrics, windows = store.allocator, totals.metrics, store.windows
    num_cached = allocator.num_cached_blocks_of(salt) if salt else allocator.num_cached_blocks
    num_in_use = allocator.num_blocks_in_use_of(salt) if salt else allocator.num_blocks_in_use
    num_pinned, num_evictions = len(store.pins.block_ids(salt or None)), allocator.num_evictions
    num_saved = metrics.num_hit_tokens + metrics.num_shared_tokens
    num_free, num_managed = allocator.num_free_blocks, allocator.num_blocks
    num_snapshots = store.states.kept.num_of(salt) if salt else len(store.states.kept)
    if windows.are_all:
        group = windows.groups[0]
        num_cached = group.num_idle_of(salt) if salt else group.num_idle
        num_in_use = windows.num_needed(salt or None)[0]
        num_pinned = len(group.needed_by(store.pins.allocations(salt or None)))
        num_evictions += group.num_evictions
        num_free, num_managed = group.num_free, group.num_blocks
    return CacheStats(
        prompt_tokens=metrics.num_queried_tokens,
        computed_tokens=metrics.num_queried_tokens - num_saved,
        reused_tokens=metrics.num_hit_tokens,
        shared_tokens=metrics.num_shared_tokens,
        hit_rate=metrics.hit_rate,
        recent_hit_rate=metrics.recent_hit_rate,
        num_calls=totals.num_calls,
        num_bypassed_calls=totals.num_bypassed_calls,
        num_blocks=None if salt else store.max_num_blocks,
        num_free_blocks=None if salt or store.max_num_blocks is None else num_free + store.max_num_blocks - num_managed,
        num_cached_blocks=num_cached,
        num_blocks_in_use=num_in_use,
        num_pinned_blocks=num_pinned,
        num_evictions=None if salt else num_evictions,
        kv_bytes=store.kv_bytes_in_use(salt) + bytes_of_rows,
        peak_kv_bytes=peak_kv_bytes,
        pool_bytes=None if salt else store.pool.pool_bytes,
        num_snapshots=num_snapshots,
        snapshot_bytes=num_snapshots * store.states.rules.num_bytes,
        static_bytes=None if salt else static.num_bytes,
        num_graphs=None if salt else static.num_graphs,
        tiers=() if store.tiers is None else store.tiers.stats(store.layout.kinds, salt),
        computed_because=tuple(totals.computed_because.most_common()),
        backend=None if salt else backend,
    )
