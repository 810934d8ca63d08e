"""Counts and describes what a cache has done, as plain numbers that print as a table. No torch."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

_NUMBER = re.compile(r"\d+")
_MOST_REASONS = 64  # most reasons that are counted; there are about twenty
_NO_NUMBERS = ("rows", "tiers", "dense", "captured", "computed_because")  # fields that are no lines of a table


@dataclass(frozen=True, slots=True)
class CacheStats:
    """`CacheStats` counts tokens over all calls, and the state of blocks now. `print` shows a table.

    Tokens are those of prompts, in all rows, without padding; tokens that `generate` makes are not counted. Without
    `generate`, every token passed is counted. Blocks are counted with the reserved null block, which is never handed
    out: free + cached + in use is `num_blocks - 1`. Where all layers have a window, blocks of the longest window are
    counted. A cache with a salt counts the blocks of that salt; numbers that would tell of other salts (`num_blocks`,
    `num_free_blocks`, `num_evictions`, `pool_bytes`, `static_bytes`) are None.

    Attributes:
        computed_tokens: prompt tokens that ran through the model.
        reused_tokens: prompt tokens that were there before their call: in the store, or in the rows of the call before.
        shared_tokens: all other prompt tokens, which ran once for several rows of their call: those of equal rows, and
            of prefixes that rows share.
        hit_rate: `reused_tokens / prompt_tokens`; 0.0 before the first call.
        num_bypassed_calls: calls that were unusual, or became so: from then on they reused and kept nothing.
        num_blocks: most blocks that there can be. None before the first forward, too, if neither `num_blocks` nor
            `max_bytes` is given.
        num_free_blocks: blocks that hold nothing that could be reused. None where `num_blocks` is None.
        num_cached_blocks: blocks that nobody holds, and that are reusable until evicted.
        num_pinned_blocks: blocks in use that pins hold, whether rows hold them, too, or not.
        num_evictions: cached blocks that were handed out anew since the store was made.
        kv_bytes: bytes of blocks in use, and of the rows that run or may be gone on with: rows hold a copy, which is
            not in the pool.
        peak_kv_bytes: most `kv_bytes` during the last call. None for a store.
        pool_bytes: bytes that the pool holds, whatever is in it.
        num_snapshots: snapshots of what layers with a state carry, at the ends of blocks; 0 if no layer has a state.
        snapshot_bytes: bytes of these snapshots, which are not in the pool. What running rows carry is not counted.
        static_bytes: bytes of the memory that captured calls run in, which stays until `release()`.
        tiers: tiers below the pool, from the nearest on.
        computed_because: reasons why rows were known no further, each with the number of tokens computed after that,
            the most tokens first. A reason has N in place of its numbers.
    """

    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    shared_tokens: int
    hit_rate: float
    num_calls: int
    num_bypassed_calls: int
    num_blocks: int | None
    num_free_blocks: int | None
    num_cached_blocks: int
    num_blocks_in_use: int
    num_pinned_blocks: int
    num_evictions: int | None
    kv_bytes: int
    peak_kv_bytes: int | None
    pool_bytes: int | None
    num_snapshots: int = 0
    snapshot_bytes: int = 0
    static_bytes: int | None = 0
    tiers: "tuple[TierStats, ...]" = ()
    computed_because: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "\n".join([_table(self), *map(str, self.tiers)])


@dataclass(frozen=True, slots=True)
class TierStats:
    """`TierStats` says what one tier below the pool keeps, and what it has done since the store was made.

    Window blocks and snapshots count as blocks do. For a cache with a salt, `num_blocks` is that of its salt, and all
    other numbers are None: they would tell of other salts.

    Attributes:
        name: "host" or "disk".
        num_blocks: blocks whose contents the tier keeps.
        num_bytes: bytes that the tier takes now.
        max_bytes: bytes that the tier may take; None: as many as there are.
        num_down: blocks that the tier was given.
        num_up: blocks that were read back from it.
        num_dropped: blocks that the tier gave up for others.
        num_refused: blocks that it had no room for, or may not keep.
    """

    name: str
    num_blocks: int
    num_bytes: int | None = None
    max_bytes: int | None = None
    num_down: int | None = None
    num_up: int | None = None
    num_dropped: int | None = None
    num_refused: int | None = None

    def __str__(self) -> str:
        said = f"{self.name} tier: {self.num_blocks:,} blocks"
        if self.num_bytes is None:
            return said
        most = "" if self.max_bytes is None else f" of {_mib(self.max_bytes)}"
        return (
            f"{said}, {_mib(self.num_bytes)}{most}; {self.num_down:,} down, {self.num_up:,} up, "
            f"{self.num_dropped:,} dropped, {self.num_refused:,} refused"
        )


@dataclass(slots=True)
class RowStats:
    """`RowStats` says how far the prompt of one row of a call was known, and why no further.

    Tokens are counted as in `CacheStats`.

    Attributes:
        matched_tokens: tokens found in the store, or in the rows of the call before.
        stopped: why the match ended there, or why known tokens were computed again.
        host_tokens, disk_tokens: tokens of those found that were read back from this lower tier for this call.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    matched_tokens: int = 0
    stopped: str = "nothing was computed"
    host_tokens: int = 0
    disk_tokens: int = 0

    @property
    def shared_tokens(self) -> int:
        """Number of tokens that were neither computed nor reused: they were computed for another row of the call."""
        return self.prompt_tokens - self.computed_tokens - self.reused_tokens

    def __str__(self) -> str:
        said = [f"{self.reused_tokens} of {self.prompt_tokens} prompt tokens reused"]
        if self.shared_tokens:
            said.append(f"{self.shared_tokens} were computed for another row")
        if self.host_tokens:
            said.append(f"{self.host_tokens} were read back from host memory")
        if self.disk_tokens:
            said.append(f"{self.disk_tokens} were read back from disk")
        return "; ".join([*said, self.stopped])


class CallTotals:
    """`CallTotals` counts calls, their prompt tokens, and why tokens were computed.

    The calls are those of one cache, or of all caches of a store, collected caches included. `num_shared` tokens ran
    once for several rows, and count in all of these but the first.
    """

    def __init__(self) -> None:
        self.num_calls = self.num_bypassed_calls = self.num_tokens = self.num_reused = self.num_shared = 0
        self.computed_because: Counter[str] = Counter()  # reason, with N in place of its numbers -> tokens computed

    def record(self, rows: Sequence[RowStats], new: Sequence[RowStats], *, num_calls: int) -> None:
        """Count the `new` tokens of a forward of the rows of a call; `num_calls` is 1 where the call begins with it."""
        self.num_calls += num_calls
        for row, more in zip(rows, new, strict=True):
            self.num_tokens += more.prompt_tokens
            self.num_reused += more.reused_tokens
            self.num_shared += more.shared_tokens
            if more.computed_tokens:
                why = _NUMBER.sub("N", row.stopped.partition(";")[0])
                if why in self.computed_because or len(self.computed_because) < _MOST_REASONS:
                    self.computed_because[why] += more.computed_tokens


@dataclass(frozen=True, slots=True)
class CallStats:
    """`CallStats` has the counts of `CacheStats` for one call. `print` shows a line for each row, then a table.

    Attributes:
        kind: what the call was: "generate", "forward" (plain forwards), "score" or "prefill"; "none" before the first
            call.
        rows: statistics of each row, in the order of the batch; of a `score`, those of its continuations, each with the
            context; of a `prefill`, those of its prompts.
        read_once_tokens: most tokens in common to several rows that attention read once at a time; 0 where attention
            read each row by itself.
        dense: why attention read each row by itself, all the time or at the end, although several rows may have shared
            tokens; "" where it did not.
        captured: how many forwards of the call were replays of captured graphs, and why the last other forward was
            none, or why none was; "" with `capture=False`, and where the model is not on a CUDA device.
    """

    kind: str
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    shared_tokens: int
    hit_rate: float
    peak_kv_bytes: int
    rows: tuple[RowStats, ...]
    read_once_tokens: int = 0
    dense: str = ""
    captured: str = ""

    def __str__(self) -> str:
        lines = [f"row {number}: {row}" for number, row in enumerate(self.rows)]
        if self.dense:
            lines.append(f"each row was read by itself: {self.dense}")
        if self.captured:
            lines.append(f"captured: {self.captured}")
        return "\n".join([*lines, _table(self)])


def _table(stats: CacheStats | CallStats) -> str:
    """Return a line for each number: its name and its value."""
    names = [each.name for each in fields(stats) if each.name not in _NO_NUMBERS]
    said = {name: _readable(name, getattr(stats, name)) for name in names}
    names_width, values_width = max(map(len, said)), max(map(len, said.values()))
    return "\n".join(f"{name:<{names_width}}  {value:>{values_width}}" for name, value in said.items())


def _readable(name: str, value: float | str | None) -> str:
    if value is None:
        return "not known"
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return _mib(value)
    return f"{value:.1%}" if name == "hit_rate" else f"{value:,}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
