"""What a cache has done, as plain numbers that print as a table. No torch, no state of its own."""

from dataclasses import dataclass, field, fields

_KV_BYTES = "of blocks in use, and of the copy that attention reads, which is not in the pool"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of tokens over all calls, and the state of blocks now. `print` shows a table.

    Tokens are those of prompts, of all rows, without padding; those that `generate` makes are not counted. Without
    `generate`, every token passed is. Blocks are counted with the reserved null block, which is never handed out:
    free + cached + in use is `num_blocks - 1`. Where all layers have a window, blocks of the longest window are counted. A cache with a salt counts the blocks of that salt; what would tell of
    others (`num_blocks`, `num_free_blocks`, `num_evictions`, `num_copies_on_write`, `pool_bytes`) is None.

    Attributes:
        computed_tokens: of the prompts' tokens, those that ran through the model.
        reused_tokens: all others, rows equal to a computed one included.
        hit_rate: `reused_tokens / prompt_tokens`; 0.0 before the first call.
        recent_hit_rate: the same of the last 100 forwards of prompts.
        num_bypassed_calls: of the calls, those that did not fit, or not to their end, and ran without the store.
        num_blocks: the most there can be. None, too, before the first forward, where neither `num_blocks` nor `max_bytes`
            is given.
        num_free_blocks: hold nothing that could be reused. None where `num_blocks` is.
        num_evictions: cached blocks that were handed out anew, since the store was made.
        num_cached_blocks: held by nobody, reusable until evicted.
        num_pinned_blocks: of those in use, the ones that pins hold, whether rows hold them, too, or not.
        kv_bytes: of blocks in use, and of the copy that attention reads: that of all rows, or of one layer's.
        peak_kv_bytes: the most that was during the last call. None of a store.
        pool_bytes: held by the pool, whatever is in it. Attention's copy is not in the pool.
        num_snapshots: of what layers with a state carry, at the ends of blocks; 0 where no layer does.
        snapshot_bytes: of these; not in the pool. What running rows carry is not counted.
    """

    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    hit_rate: float
    recent_hit_rate: float
    num_calls: int
    num_bypassed_calls: int
    num_blocks: int | None
    num_free_blocks: int | None
    num_cached_blocks: int
    num_blocks_in_use: int
    num_pinned_blocks: int
    num_evictions: int | None
    num_copies_on_write: int | None
    kv_bytes: int = field(metadata={"remark": _KV_BYTES})
    peak_kv_bytes: int | None
    pool_bytes: int | None
    num_snapshots: int = 0
    snapshot_bytes: int = 0

    def __str__(self) -> str:
        return _table(self)


@dataclass(frozen=True, slots=True)
class RowStats:
    """One row of a call: how far its prompt was known, and why no further. Tokens are counted as in `CacheStats`.

    Attributes:
        matched_tokens: found in the store, or in the rows of the call before.
        stopped: why the match ended there, or why known tokens were computed again.
    """

    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    matched_tokens: int
    stopped: str


@dataclass(frozen=True, slots=True)
class CallStats:
    """The same counts as in `CacheStats`, of one call. `print` shows a table, then a line a row.

    Attributes:
        rows: each row by itself, in the order of the batch.
    """

    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    hit_rate: float
    peak_kv_bytes: int
    rows: tuple[RowStats, ...]

    def __str__(self) -> str:
        lines = [
            f"row {i}: {row.reused_tokens} of {row.prompt_tokens} prompt tokens reused; {row.stopped}"
            for i, row in enumerate(self.rows)
        ]
        return "\n".join([_table(self), *lines])


def _table(stats: CacheStats | CallStats) -> str:
    """A line for each number: its name, its value, and what must be said of it."""
    shown = [each for each in fields(stats) if each.name != "rows"]
    of_a_salt = isinstance(stats, CacheStats) and stats.pool_bytes is None
    values = [_readable(each.name, getattr(stats, each.name), of_a_salt=of_a_salt) for each in shown]
    names_width, values_width = max(len(each.name) for each in shown), max(map(len, values))
    return "\n".join(
        f"{each.name:<{names_width}}  {value:>{values_width}}  {each.metadata.get('remark', '')}".rstrip()
        for each, value in zip(shown, values, strict=True)
    )


def _readable(name: str, value: float | None, *, of_a_salt: bool) -> str:
    if value is None:
        return "the store's" if of_a_salt else "each cache's" if name == "peak_kv_bytes" else "not known yet"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.1%}" if name.endswith("hit_rate") else f"{value:,}"


@dataclass(slots=True)
class RowCount:
    """A `RowStats` in the making."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    matched_tokens: int = 0
    stopped: str = "nothing was computed"

    def frozen(self) -> RowStats:
        """As it is now."""
        reused = self.prompt_tokens - self.computed_tokens
        return RowStats(self.prompt_tokens, self.computed_tokens, reused, self.matched_tokens, self.stopped)
