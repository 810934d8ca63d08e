"""Bytes of keys and values, ours beside DynamicCache's. No time is compared, so each runs once."""

from __future__ import annotations

from collections.abc import Mapping

from harness import Timing

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, GATHER, OURS, Line
from .registry import Lines, Repeat, scene
from .ways import Measured, Way, from_scratch, on_ours, on_ready, run_round, timed_call
from .workbench import Bench

MEMORY = "Memory of keys and values"


@scene(MEMORY, minutes=2)
def memory(bench: Bench, repeat: Repeat) -> Lines:
    """8 and 128 beams of a prompt; and 16 rows behind a known prefix of 1,024, 16 new. Run once: it is no time."""
    for num_beams, length, num_new, bar, bar_gather in (
        (8, 2 * bench.sizes.shared, 64, 0.30, 0.16),
        (128, bench.sizes.shared // 2, 8, 0.05, None),
    ):
        given = {"new_tokens": num_new, "num_beams": num_beams}
        ids = bench.tokens(1, length)
        caches = {OURS: PagedPrefixCache(bench.model), GATHER: PagedPrefixCache(bench.model, attention="gather")}
        ours = {name: on_ours(bench, cache, ids, **given) for name, cache in caches.items()}
        measured = _once(bench, {BASELINE: from_scratch(bench, ids, **given), **ours})
        for name, limit in ((OURS, bar), (GATHER, bar_gather)):
            copies = caches[name].stats().num_copies_on_write
            # with "gather" beams are in the pool; on rows of their own each writes into its own
            assert copies > 0 or name == OURS, "no block was copied on write, so nothing of what beams cost was counted"
            suffix, at_most = "" if name == OURS else ", gather", None if limit is None else bench.bar(limit)
            what, details = f"{num_beams} beams, {length:,} tokens + {num_new} new{suffix}", {"copies_on_write": copies}
            yield f"memory {num_beams} beams{suffix}", _bytes(measured, what, name, at_most=at_most, details=details)
        del caches, measured
    num_rows, length, given = 16, bench.sizes.shared, {"new_tokens": 16}
    ids = bench.behind(bench.text(length), num_rows)
    ways = {
        BASELINE: on_ready(bench, bench.prefilled(length, num_rows), ids, **given),
        OURS: on_ours(bench, bench.knowing(length), ids, **given),
        GATHER: on_ours(bench, bench.knowing(length, attention="gather"), ids, **given),
    }
    measured = _once(bench, ways)
    for name in (OURS, GATHER):
        suffix = "" if name == OURS else ", gather"
        what = f"{num_rows} rows behind {length:,} known tokens, 16 new{suffix}"
        yield f"memory {num_rows} rows{suffix}", _bytes(measured, what, name)


def _once(bench: Bench, ways: Mapping[str, Way]) -> Measured:
    measured = Measured()
    seconds, _ = run_round(bench, ways, list(ways), measured, lambda way: timed_call(bench, way))
    measured.rounds.append(seconds)
    return measured


def _bytes(
    measured: Measured, what: str, subject: str, *, at_most: float | None = None, details: Mapping | None = None
) -> Line:
    """The bytes of `subject` over DynamicCache's."""
    ratio = measured.kv_bytes[subject] / measured.kv_bytes[BASELINE]
    return Line(
        what=what,
        value=ratio,
        kind="ratio",
        spread=Timing.of([ratio]),
        ways={name: Timing.of([number]) for name, number in measured.kv_bytes.items()},
        subject=subject,
        unit="bytes",
        at_most=at_most,
        hit_rate=measured.hit_rate,
        kv_bytes=measured.kv_bytes,
        details={**(details or {}), "seconds": measured.timings()},
    )
