"""Models whose layers carry states, in the shapes of Qwen3.5 and LFM2, with random weights: prompts, steps, an
evaluation.
"""

from __future__ import annotations

import copy
from collections import deque

import models
import torch
from harness import Timing
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from .few_shot import read_prompts
from .line import BASELINE, OURS, RECIPE, Line
from .registry import Lines, Repeat, scene
from .ways import (
    Measured,
    Way,
    from_scratch,
    measure_rounds,
    measure_steps,
    on_ours,
    run_round,
    share_not_computed,
    timed_call,
    turned,
)
from .windows import on_prepared
from .workbench import NEW_TOKENS, Bench

STATES = "Layers with a state"
_SHAPES = ("qwen3.5", "lfm2")
_NUM_BEAMS = 4
_NUM_QUESTIONS = 40
_BATCH = 8


@scene(STATES, minutes=25)
def states(bench: Bench, repeat: Repeat) -> Lines:
    """12 layers, of which 9 carry states and keep no keys (Qwen3.5's shape), or 8 short convolutions (LFM2's): prompts
    and steps.
    """
    for shape in _SHAPES:
        narrow = {} if bench.warmups else models.quick_changes(shape)
        model = models.random_model(shape, bench.model.device, bench.model.dtype, **narrow)
        stateful = Bench(model, bench.sizes, has_bars=bench.has_bars, is_quick=not bench.warmups)
        ready = DynamicCache(config=model.config)
        stateful.prefill(stateful.text(bench.sizes.shared), ready)
        yield from _prompts(stateful, shape, ready, repeat)
        yield from _steps(stateful, shape, ready, repeat)
        yield from _few_shot(stateful, shape)


def _prompts(bench: Bench, shape: str, ready: DynamicCache, repeat: Repeat) -> Lines:
    """16 tokens behind a known prefix, and a prompt that nobody knows."""
    length = bench.sizes.shared
    knowing, copies = bench.knowing(length), deque([copy.deepcopy(ready)])  # a round before its turn, as in `windows`

    def known() -> dict[str, Way]:
        ids = bench.behind(bench.text(length), 1)
        copies.append(copy.deepcopy(ready))
        return {
            BASELINE: from_scratch(bench, ids),
            RECIPE: _on_a_copy(bench, copies.popleft(), ids),
            OURS: on_ours(bench, knowing, ids),
        }

    measured = measure_rounds(bench, known, rounds=repeat(21), baseline_every=3)
    what = f"{shape}: {length:,} tokens known"
    yield f"{shape}, warm {length:,}", measured.line(what, at_least=bench.bar(10.0))
    what = f"{what}, against a deep copy of a prefilled DynamicCache"
    yield f"{shape}, warm {length:,} / {RECIPE}", measured.line(what, against=RECIPE, at_least=bench.bar(0.95))
    cache = PagedPrefixCache(bench.model)

    def unknown() -> dict[str, Way]:
        ids, given = bench.tokens(1, length), {"new_tokens": NEW_TOKENS}
        return {BASELINE: from_scratch(bench, ids, **given), OURS: on_ours(bench, cache, ids, **given)}

    measured = measure_rounds(bench, unknown, rounds=repeat(9), baseline_warms_up=True)
    what = f"{shape}: {length:,} tokens, nothing known"
    yield f"{shape}, nohit {length:,}", measured.line(what, at_least=bench.bar(0.96))


def _steps(bench: Bench, shape: str, ready: DynamicCache, repeat: Repeat) -> Lines:
    """A step behind the known prefix, of one row and of beams."""
    length = bench.sizes.shared
    for num_beams, name in ((1, "decode"), (_NUM_BEAMS, f"beam step {_NUM_BEAMS} beams")):
        cache, given = bench.knowing(length), {"new_tokens": 17, "num_beams": num_beams}

        def prepare(cache=cache, given=given) -> dict[str, Way]:
            ids = bench.behind(bench.text(length), 1)
            prepared = copy.deepcopy(ready) if given["num_beams"] == 1 else _repeated(bench, ids, given["num_beams"])
            return {BASELINE: on_prepared(bench, prepared, ids, **given), OURS: on_ours(bench, cache, ids, **given)}

        measured = measure_rounds(
            bench,
            prepare,
            rounds=repeat(8),
            warmups=min(1, bench.warmups),
            baseline_warms_up=True,
            measure=lambda way: measure_steps(bench, way),
        )
        what = f"{shape}: a step of {'1 row' if num_beams == 1 else f'{num_beams} beams'} at {length:,} tokens"
        yield f"{shape}, {name}, {length:,}", measured.line(what, at_least=bench.bar(0.98))


def _few_shot(bench: Bench, shape: str) -> Lines:
    """An evaluation from an empty cache, one question at a time and in batches."""
    prompt, questions = read_prompts(bench)
    questions = questions[:_NUM_QUESTIONS]
    for size, bar in ((1, 9.0), (_BATCH, 14.0)):
        cache, measured = PagedPrefixCache(bench.model), Measured()
        for number in range(0, len(questions), size):
            asked = torch.cat(questions[number : number + size])
            ids = torch.cat((prompt.expand(asked.shape[0], -1), asked), dim=1)
            ways = {BASELINE: from_scratch(bench, ids), OURS: on_ours(bench, cache, ids)}
            order = turned(list(ways), number // size)
            measured.rounds.append(run_round(bench, ways, order, measured, lambda way: timed_call(bench, way))[0])
        totals = {name: sum(measured.seconds(name)) for name in (BASELINE, OURS)}
        ratio = totals[BASELINE] / totals[OURS]
        how = "one at a time" if size == 1 else f"in batches of {size}"
        yield (
            f"{shape}, few_shot {how}",
            Line(
                what=f"{shape}: {len(questions)} questions behind {prompt.shape[1]:,} tokens, {how}",
                value=ratio,
                kind="ratio",
                spread=Timing.of([ratio]),
                ways={name: Timing.of([seconds]) for name, seconds in totals.items()},
                hit_rate=share_not_computed(cache.stats()),
                kv_bytes=measured.kv_bytes,
                at_least=bench.bar(bar),
                details={"a_call": measured.timings()},
            ),
        )


def _on_a_copy(bench: Bench, ready: DynamicCache, ids: Tensor) -> Way:
    """`generate` on a deep copy; the copy is timed, and what it copies is fresh: states cannot be cropped back."""
    made: list[DynamicCache] = []

    def run(**options: object) -> Tensor:
        made.append(copy.deepcopy(ready))
        return bench.generate(ids, past_key_values=made[-1], **options)

    return Way(run, lambda: made[-1], made.clear)


def _repeated(bench: Bench, ids: Tensor, num_rows: int) -> DynamicCache:
    """A DynamicCache that holds all of `ids` but the last token in every row."""
    cache = DynamicCache(config=bench.model.config)
    bench.prefill(ids[:, :-1].expand(num_rows, -1), cache)
    return cache
