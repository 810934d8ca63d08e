"""A step of decoding, from token to token, behind a prefix that every way has ready: no prefill is in it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import DynamicCache

from .in_place import in_place
from .line import BASELINE, IN_PLACE, OURS
from .registry import Lines, Repeat, scene
from .ways import Measured, Way, measure_rounds, measure_steps, on_ours, on_ready
from .workbench import QUESTION_TOKENS, Bench

STEPS = "Decode steps"


@scene(STEPS, minutes=6.5)
def decode(bench: Bench, repeat: Repeat) -> Lines:
    """A decode step against length, of one row, and against the number of rows."""
    sizes = bench.sizes
    bars = {(1, sizes.shared): 1.05, (1, sizes.long): 1.1, (8, sizes.shared): 1.2}
    places = [(1, length) for length in sizes.lengths[2:]] + [(rows, sizes.shared) for rows in (4, 8, 16)]
    for num_rows, length in places:
        num_steps, rounds = (6, 2) if num_rows == 16 else (10, 12 if (num_rows, length) in bars else 3)
        measured = _measure(bench, num_rows, length, num_steps, repeat(rounds))
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        name, what = f"decode {rows}, {length:,}", f"a step of {rows} at {length:,} tokens"
        point = {"tokens": length, "rows": num_rows}
        bar = bench.bar(bars[num_rows, length]) if (num_rows, length) in bars else None
        yield name, measured.line(what, at_least=bar, floor=IN_PLACE, point=point)


@scene(STEPS, minutes=1.3)
def decode_short(bench: Bench, repeat: Repeat) -> Lines:
    """A decode step where there is next to nothing to copy: 128 tokens of context."""
    length = max(2 * QUESTION_TOKENS, bench.sizes.shared // 8)
    measured = _measure(bench, 1, length - QUESTION_TOKENS, 32, repeat(8))
    what = f"a step of 1 row at {length:,} tokens"
    yield f"decode 1 row, {length:,}", measured.line(what, at_least=bench.bar(0.98))


@scene(STEPS, minutes=2.5)
def beam_step(bench: Bench, repeat: Repeat) -> Lines:
    """A step of beam search, its reordering included: 8 beams."""
    num_beams, length, num_steps = 8, 2 * bench.sizes.shared, 19
    given = {"new_tokens": num_steps + 1, "num_beams": num_beams}
    cache, ready = bench.knowing(length), bench.prefilled(length, num_beams)
    roomy = in_place(ready, QUESTION_TOKENS + num_steps + 1)

    def prepare() -> dict[str, Way]:
        ids = bench.behind(bench.text(length), 1)
        bench.generate(ids, past_key_values=cache)  # so that ours has no more to prefill than one token, either
        for held in (ready, roomy):
            extend(bench, held, ids, num_beams)
        return {
            BASELINE: on_ready(bench, ready, ids, **given),
            IN_PLACE: on_ready(bench, roomy, ids, **given),
            OURS: on_ours(bench, cache, ids, **given),
        }

    measured = measure_steps_of(bench, prepare, repeat(6))
    what = f"a step of {num_beams} beams at {length:,} tokens"
    yield f"beam step {num_beams} beams, {length:,}", measured.line(what, at_least=bench.bar(1.4), floor=IN_PLACE)


def extend(bench: Bench, ready: DynamicCache, ids: Tensor, num_rows: int) -> None:
    """The ready rows hold all of `ids`, each `num_rows` times, but the last token."""
    length = ids.shape[1] - QUESTION_TOKENS
    if ready.get_seq_length() > length:
        ready.crop(length - ready.get_seq_length())
    bench.prefill(ids[:, :-1].repeat_interleave(num_rows, dim=0), ready)


def _measure(bench: Bench, num_rows: int, length: int, num_steps: int, rounds: int) -> Measured:
    """Steps of DynamicCache, of ours, and of the floor, all behind `length` ready tokens."""
    ready = bench.prefilled(length, num_rows)
    roomy = in_place(ready, QUESTION_TOKENS + num_steps + 1)
    cache, given = bench.knowing(length), {"new_tokens": num_steps + 1}

    def prepare() -> dict[str, Way]:
        ids = bench.behind(bench.text(length), num_rows)
        return {
            BASELINE: on_ready(bench, ready, ids, **given),
            IN_PLACE: on_ready(bench, roomy, ids, **given),
            OURS: on_ours(bench, cache, ids, **given),
        }

    return measure_steps_of(bench, prepare, rounds)


def measure_steps_of(bench: Bench, prepare: Callable[[], dict[str, Way]], rounds: int) -> Measured:
    """Their steps in turn, the baseline's warmed up as well."""
    return measure_rounds(
        bench,
        prepare,
        rounds=rounds,
        warmups=min(1, bench.warmups),
        baseline_warms_up=True,
        measure=lambda way: measure_steps(bench, way),
    )
