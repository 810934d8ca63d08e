"""What a forward costs beside its tokens, in tokens: a prefill of its own must save more than that to be worth it."""

from __future__ import annotations

import statistics

from harness import Timing
from transformers import DynamicCache

from hf_paged_cache.call.plan import FORWARD_COST_ON_HOST

from .line import Line
from .registry import Lines, Repeat, scene
from .ways import turned
from .workbench import Bench

COUNTS = (1, 32, 64, 128, 256)  # tokens of a forward


@scene("The cost of a forward", minutes=0.3)
def forward_cost(bench: Bench, repeat: Repeat) -> Lines:
    """Forwards of 1 to 256 tokens with an empty cache: where the line through their times starts, over its slope."""
    names = {f"DynamicCache, {count} tokens": count for count in COUNTS}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-bench.warmups, repeat(9)):
        for name in turned(list(names), max(0, number)):
            ids, cache = bench.tokens(1, names[name]), DynamicCache(config=bench.model.config)
            taken, _ = bench.clock.time(lambda ids=ids, cache=cache: bench.prefill(ids, cache))
            if number >= 0:
                seconds[name].append(taken)
    lines = [statistics.linear_regression(COUNTS, times) for times in zip(*seconds.values(), strict=True)]
    spread = Timing.of([line.intercept / line.slope for line in lines])
    yield (
        "cost of a forward",
        Line(
            what="a forward's cost beside its tokens; the plan of what is prefilled first assumes the bar",
            value=spread.median,
            kind="tokens",
            spread=spread,
            ways={name: Timing.of(times) for name, times in seconds.items()},
            subject="",
            against="",
            at_most=bench.bar(float(FORWARD_COST_ON_HOST)),
        ),
    )
