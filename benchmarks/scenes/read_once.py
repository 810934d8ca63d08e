"""A step of decoding where rows share a prefix, which attention reads once, and where they share nothing."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, OURS
from .registry import Lines, Repeat, scene
from .steps import extend, measure_steps_of
from .ways import Measured, Way, on_ours, on_ready
from .workbench import Bench

READ_ONCE = "Read once"


@scene(READ_ONCE, minutes=7)
def shared_steps(bench: Bench, repeat: Repeat) -> Lines:
    """A step of rows, beams and samples that share a known prefix."""
    double, quadruple, half = 2 * bench.sizes.shared, 4 * bench.sizes.shared, bench.sizes.shared // 2
    beams, samples = "num_beams", "num_return_sequences"
    places: tuple[tuple[str, int, int, str | None, int, int, float], ...] = (
        ("rows", 8, double, None, 10, 4, 1.65),
        ("rows", 16, quadruple, None, 4, 2, 7.5),
        ("beams", 8, double, beams, 10, 4, 2.2),
        ("beams", 32, double, beams, 4, 2, 10.0),
        ("beams", 128, half, beams, 4, 2, 6.0),
        ("samples", 8, double, samples, 10, 4, 1.65),
    )
    for kind, num_rows, length, option, num_steps, rounds, bar in places:
        given: dict[str, Any] = {"new_tokens": num_steps + 1}
        if option is not None:
            given |= {option: num_rows, "do_sample": option == samples}
        measured = _behind_a_prefix(bench, num_rows, length, given, repeat(rounds), is_expanded=option is not None)
        name, what = f"{num_rows} {kind}, {length:,}", f"a step of {num_rows} {kind} that share {length:,} tokens"
        yield f"read once {name}", measured.line(what, at_least=bench.bar(bar))


@scene(READ_ONCE, minutes=1)
def nothing_shared_steps(bench: Bench, repeat: Repeat) -> Lines:
    """A step of 8 rows that share nothing, and of one row: there is nothing to read once."""
    length = bench.sizes.shared
    for num_rows, num_steps in ((8, 10), (1, 20)):
        ids = bench.tokens(num_rows, length)
        ready, given = DynamicCache(config=bench.model.config), {"new_tokens": num_steps + 1}
        bench.prefill(ids[:, :-1], ready)
        cache = PagedPrefixCache(bench.model)

        def prepare(ids: Any = ids, ready: Any = ready, cache: Any = cache, given: Any = given) -> dict[str, Way]:
            return {BASELINE: on_ready(bench, ready, ids, **given), OURS: on_ours(bench, cache, ids, **given)}

        measured = measure_steps_of(bench, prepare, repeat(6))
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows that share nothing"
        what = f"a step of {rows} at {length:,} tokens"
        yield f"read once {num_rows} alone", measured.line(what, at_least=bench.bar(1.0))


def _behind_a_prefix(
    bench: Bench, num_rows: int, length: int, given: dict[str, Any], rounds: int, *, is_expanded: bool
) -> Measured:
    """Steps behind `length` ready tokens and a question; of a prompt that is expanded, or of a question in each row."""
    ready = bench.prefilled(length, num_rows)
    cache = bench.knowing(length)

    def prepare() -> dict[str, Way]:
        ids = bench.behind(bench.text(length), 1 if is_expanded else num_rows)
        extend(bench, ready, ids, num_rows if is_expanded else 1)
        bench.generate(ids, past_key_values=cache)  # so that ours has no more to prefill than one token, either
        return {BASELINE: on_ready(bench, ready, ids, **given), OURS: on_ours(bench, cache, ids, **given)}

    return measure_steps_of(bench, prepare, rounds)
