"""What a cache has done, as plain numbers that print as a table. No torch, no state of its own."""

from dataclasses import dataclass, fields


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    values = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<{width}}  {value:>{values}}" for name, value in rows)


def _readable(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:,.1f} MiB"
    if name.endswith("hit_rate"):
        return f"{value:.1%}"
    return f"{value:,}"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of tokens over all calls, and the state of the store's blocks now. `print` shows a table.

    Tokens are those of prompts, of all rows, without padding. Tokens that `generate` makes are not counted; without
    `generate` every token passed is. Blocks are counted with the reserved null block, which is never handed out: free + cached + in use is `num_blocks - 1`.
    """

    prompt_tokens: int  # of all rows, without padding
    computed_tokens: int  # of those, run through the model
    reused_tokens: int  # the first less the second: rows equal to a computed one count as reused
    hit_rate: float  # reused_tokens / prompt_tokens; 0.0 before the first call
    recent_hit_rate: float  # the same of the last 100 forwards of prompts
    num_calls: int
    num_blocks: int
    num_free_blocks: int  # hold nothing that could be reused
    num_cached_blocks: int  # nobody holds them, reusable until evicted
    num_blocks_in_use: int
    num_pinned_blocks: int  # of those in use: held by pins, whether rows hold them, too, or not
    num_evictions: int
    num_copies_on_write: int
    kv_bytes: int  # blocks in use times their bytes, plus what attention reads: the view, or one layer's rows
    peak_kv_bytes: int  # the most that was during the last call
    pool_bytes: int  # held by the pool, whatever is in it

    def __str__(self) -> str:
        return _table([(field.name, _readable(field.name, getattr(self, field.name))) for field in fields(self)])


@dataclass(frozen=True, slots=True)
class RowStats:
    """One sequence of the last call: how far it matched, and why no further."""

    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    matched_tokens: int  # found in the store or in the rows of the call before
    stopped: str  # why the match ended there, or why known tokens were computed again


@dataclass(frozen=True, slots=True)
class CallStats:
    """The same counts for one call. `print` shows a table with a line a row."""

    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    hit_rate: float
    peak_kv_bytes: int
    rows: tuple[RowStats, ...]

    def __str__(self) -> str:
        head = _table(
            [(f.name, _readable(f.name, getattr(self, f.name))) for f in fields(self) if f.name not in ("rows",)]
        )
        lines = [
            f"row {i}: {row.reused_tokens} of {row.prompt_tokens} prompt tokens reused; {row.stopped}"
            for i, row in enumerate(self.rows)
        ]
        return "\n".join([head, *lines])


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


def hit_rate(prompt_tokens: int, computed_tokens: int) -> float:
    """The share of prompt tokens that was not computed; 0.0 of none."""
    return (prompt_tokens - computed_tokens) / prompt_tokens if prompt_tokens else 0.0
