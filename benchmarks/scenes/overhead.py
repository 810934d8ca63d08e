"""What our own lines cost: as a share of a call that can reuse nothing, and in microseconds a step.

CPU time of the calling thread (`time.thread_time`), which other processes hardly disturb.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import models
from harness import Timing

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, OURS, Line
from .meter import CallCost, metered
from .registry import Lines, Repeat, scene
from .ways import Measured, Way, from_scratch, on_ours, run_round, turned
from .workbench import NEW_TOKENS, Bench, Sizes

OVERHEAD = "What our own lines cost"


@scene(OVERHEAD, minutes=1)
def overhead(bench: Bench, repeat: Repeat) -> Lines:
    """CPU time of our own lines over that of the main thread, in a call like nohit's and in its decode steps."""
    with metered(bench.model) as meter:
        pairs = _pairs(bench, repeat(7), lambda way: meter.measure(way.run))
    steps = [step for theirs, ours in pairs for step in zip(theirs.steps, ours.steps, strict=True)]
    whole = [(theirs.whole, ours.whole) for theirs, ours in pairs]
    own = [ours.bracket + ours.hooks + ours.update - theirs.update for theirs, ours in pairs]
    parts = {
        "bracket": Timing.of([ours.bracket for _, ours in pairs]),
        "hooks": Timing.of([ours.hooks for _, ours in pairs]),
        "update": Timing.of([ours.update for _, ours in pairs]),
        "dynamic_cache_update": Timing.of([theirs.update for theirs, _ in pairs]),
    }
    what = "the whole call: bracket, hooks, update less DynamicCache's"
    yield "overhead: nohit", _share(what, whole, own, parts, at_most=bench.bar(0.02))
    whole = [(theirs.whole, ours.whole) for theirs, ours in steps]
    own = [ours.hooks + ours.update - theirs.update for theirs, ours in steps]
    parts = {
        "hooks": Timing.of([ours.hooks for _, ours in steps]),
        "update": Timing.of([ours.update for _, ours in steps]),
        "dynamic_cache_update": Timing.of([theirs.update for theirs, _ in steps]),
    }
    yield "overhead: decode step", _share("a decode step: hooks, update less DynamicCache's", whole, own, parts)


@scene(OVERHEAD, minutes=1)
def bookkeeping(bench: Bench, repeat: Repeat) -> Lines:
    """What is done once a step, not once a layer (hooks, slots, commits), on a tiny model, so that it is our lines that
    are timed.
    """
    num_steps, rows = 66, (1, 8, 32)
    tiny = Bench(models.tiny(bench.model.device), Sizes())
    samples: dict[int, list[float]] = {num_rows: [] for num_rows in rows}
    with metered(tiny.model) as meter:
        cache = PagedPrefixCache(tiny.model)
        for number in range(-bench.warmups, repeat(31)):
            for num_rows in turned_rows(rows, number):
                ids = tiny.tokens(num_rows, 64)
                cost, _ = meter.measure(lambda ids=ids: tiny.generate(ids, new_tokens=num_steps, past_key_values=cache))
                if number >= 0:  # of each call the mean over its steps: a few of them take blocks and commit
                    samples[num_rows].append(statistics.fmean(step.hooks for step in cost.steps) * 1e6)
    ways = {f"{num_rows} rows": Timing.of(of) for num_rows, of in samples.items()}
    yield (
        "bookkeeping: 1 row",
        _number("hooks, slots and commits of a step", samples[1], ways, bench.bar(60.0)),
    )
    growth = [(many - one) / (rows[-1] - 1) for one, many in zip(samples[1], samples[rows[-1]], strict=True)]
    what = f"what a step takes more for each further row, from 1 to {rows[-1]}"
    yield "bookkeeping: a further row", _number(what, growth, ways, bench.bar(3.0))


def turned_rows(rows: Sequence[int], number: int) -> list[int]:
    """The numbers of rows, in an order that turns."""
    return [int(name) for name in turned([str(num_rows) for num_rows in rows], max(0, number))]


def _pairs(bench: Bench, rounds: int, measure: Any) -> list[tuple[CallCost, CallCost]]:
    """What DynamicCache's call and ours cost on the same fresh prompts."""
    cache, scratch, pairs = PagedPrefixCache(bench.model), Measured(), []
    for number in range(-bench.warmups, rounds):
        ids, given = bench.tokens(1, bench.sizes.shared), {"new_tokens": NEW_TOKENS}
        ways: dict[str, Way] = {
            BASELINE: from_scratch(bench, ids, **given),
            OURS: on_ours(bench, cache, ids, **given),
        }
        costs, _ = run_round(bench, ways, turned(list(ways), max(0, number)), scratch, measure)
        if number >= 0:
            pairs.append((costs[BASELINE], costs[OURS]))
    return pairs


def _share(
    what: str,
    whole: Sequence[tuple[float, float]],
    own: Sequence[float],
    parts: dict[str, Timing],
    at_most: float | None = None,
) -> Line:
    spread = Timing.of([seconds / ours for seconds, (_, ours) in zip(own, whole, strict=True)])
    ways = {BASELINE: Timing.of([theirs for theirs, _ in whole]), OURS: Timing.of([ours for _, ours in whole])}
    return Line(
        what=what,
        value=spread.median,
        kind="share",
        spread=spread,
        ways=ways,
        unit="CPU s",
        at_most=at_most,
        details=parts,
    )


def _number(what: str, microseconds: Sequence[float], ways: dict[str, Timing], at_most: float | None) -> Line:
    spread = Timing.of(microseconds)
    return Line(
        what=what,
        value=spread.median,
        kind="microseconds",
        spread=spread,
        ways=ways,
        subject="1 rows",
        against="",
        unit="CPU us",
        at_most=at_most,
    )
