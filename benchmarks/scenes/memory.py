"""Bytes of keys and values, ours beside DynamicCache's. No time is compared, so each runs once."""

from __future__ import annotations

from collections.abc import Mapping

from harness import Timing

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, OURS, Line
from .registry import Lines, Repeat, scene
from .ways import Measured, Way, from_scratch, on_ours, on_ready, run_round, timed_call
from .workbench import Bench

MEMORY = "Memory of keys and values"


@scene(MEMORY, minutes=2)
def memory(bench: Bench, repeat: Repeat) -> Lines:
    """8 and 128 beams of a prompt; and 16 rows behind a known prefix of 1,024, 16 new. Run once: it is no time."""
    for num_beams, length, num_new, bar in (
        (8, 2 * bench.sizes.shared, 64, 0.30),
        (128, bench.sizes.shared // 2, 8, 0.05),
    ):
        given = {"new_tokens": num_new, "num_beams": num_beams}
        ids = bench.tokens(1, length)
        cache = PagedPrefixCache(bench.model)
        ways = {BASELINE: from_scratch(bench, ids, **given), OURS: on_ours(bench, cache, ids, **given)}
        what = f"{num_beams} beams, {length:,} tokens + {num_new} new"
        yield f"memory {num_beams} beams", _bytes(_once(bench, ways), what, at_most=bench.bar(bar))
        del cache, ways
    num_rows, length, given = 16, bench.sizes.shared, {"new_tokens": 16}
    ids = bench.behind(bench.text(length), num_rows)
    ways = {
        BASELINE: on_ready(bench, bench.prefilled(length, num_rows), ids, **given),
        OURS: on_ours(bench, bench.knowing(length), ids, **given),
    }
    what = f"{num_rows} rows behind {length:,} known tokens, 16 new"
    yield f"memory {num_rows} rows", _bytes(_once(bench, ways), what)


def _once(bench: Bench, ways: Mapping[str, Way]) -> Measured:
    measured = Measured()
    seconds, _ = run_round(bench, ways, list(ways), measured, lambda way: timed_call(bench, way))
    measured.rounds.append(seconds)
    return measured


def _bytes(measured: Measured, what: str, *, at_most: float | None = None) -> Line:
    """Our bytes over DynamicCache's."""
    ratio = measured.kv_bytes[OURS] / measured.kv_bytes[BASELINE]
    return Line(
        what=what,
        value=ratio,
        kind="ratio",
        spread=Timing.of([ratio]),
        ways={name: Timing.of([number]) for name, number in measured.kv_bytes.items()},
        unit="bytes",
        at_most=at_most,
        hit_rate=measured.hit_rate,
        kv_bytes=measured.kv_bytes,
        details={"seconds": measured.timings()},
    )
