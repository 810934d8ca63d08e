"""Beams and samples: rows that start equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, FLOOR, OURS
from .registry import Lines, Repeat, scene
from .several_rows import forget
from .ways import Measured, Way, by_hand, from_scratch, measure_rounds, on_ours
from .workbench import NEW_TOKENS, Bench

BEAMS = "Beams and samples"
TOLERANCE = 1e-4  # of logits, relative to their greatest, in fp32


@scene(BEAMS, minutes=1)
def beam_warm(bench: Bench, repeat: Repeat) -> Lines:
    """3 beams of 2 rows whose prompts are known; 8 new tokens."""
    prefixes, cache = bench.tokens(2, bench.sizes.shared), PagedPrefixCache(bench.model)
    given = {"new_tokens": NEW_TOKENS, "num_beams": 3}

    def prepare() -> dict[str, Way]:
        ids = bench.behind(prefixes, 2)
        for row in ids.split(1):  # one by one, so that no rows of the call before can be taken over as they are
            bench.generate(row, past_key_values=cache)
        return {BASELINE: from_scratch(bench, ids, **given), OURS: on_ours(bench, cache, ids, **given)}

    measured = measure_rounds(bench, prepare, rounds=repeat(4))
    yield "beam_warm", measured.line("3 beams of 2 known rows, 8 new tokens", at_least=bench.bar(9.0))


@scene(BEAMS, minutes=2.5)
def beam_cold(bench: Bench, repeat: Repeat) -> Lines:
    """Beams of a prompt that nobody has seen; 8 new tokens."""
    for num_beams, bar, rounds in ((4, 2.7, 4), (8, None, 3)):
        measured = _on_an_empty_cache(bench, num_beams, repeat(rounds), new_tokens=NEW_TOKENS, num_beams=num_beams)
        what, at_least = f"{num_beams} beams, nothing known, 8 new tokens", None if bar is None else bench.bar(bar)
        yield f"beam_cold {num_beams} beams", measured.line(what, at_least=at_least, floor=FLOOR)


@scene(BEAMS, minutes=1.5)
def nsample_cold(bench: Bench, repeat: Repeat) -> Lines:
    """8 samples of a prompt that nobody has seen, from one seed; 1 new token each."""
    error = _difference_of_logits(bench)
    if bench.is_exact:
        assert error < TOLERANCE, f"the distribution sampled from differs by {error:.1e} of its scale"
    measured = _on_an_empty_cache(bench, 8, repeat(3), do_sample=True, num_return_sequences=8)
    yield (
        "nsample_cold",
        measured.line(
            "8 samples, nothing known", at_least=bench.bar(7.0), floor=FLOOR, details={"difference_of_logits": error}
        ),
    )


def _on_an_empty_cache(bench: Bench, num_rows: int, rounds: int, **given: Any) -> Measured:
    cache = PagedPrefixCache(bench.model)

    def prepare() -> dict[str, Way]:
        forget(cache)
        ids = bench.tokens(1, bench.sizes.shared)
        return {
            BASELINE: from_scratch(bench, ids, **given),
            FLOOR: by_hand(bench, ids[:, :-1], num_rows, ids, **given),
            OURS: on_ours(bench, cache, ids, **given),
        }

    return measure_rounds(bench, prepare, rounds=rounds)


def _difference_of_logits(bench: Bench) -> float:
    """How far apart the two distributions are that 8 samples are drawn from, relative to the greatest logit."""
    ids = bench.tokens(1, bench.sizes.shared)
    options = {"do_sample": True, "num_return_sequences": 8, "return_dict_in_generate": True, "output_logits": True}
    logits: list[Tensor] = [
        bench.generate(ids, past_key_values=cache, **options).logits[0]
        for cache in (None, PagedPrefixCache(bench.model))
    ]
    return float((logits[0] - logits[1]).abs().max() / torch.maximum(*(of.abs().max() for of in logits)))
