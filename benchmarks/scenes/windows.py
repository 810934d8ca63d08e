"""Models whose layers see a window, in the shapes of Gemma 3 and gpt-oss, with random weights: steps, prompts, and
bytes.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import models
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, LIMIT, OURS
from .registry import Lines, Repeat, scene
from .ways import Way, from_scratch, measure_rounds, measure_steps, on_ours
from .workbench import Bench

WINDOWS = "Layers with a window"
# shape -> its window, as a part of the usual prefix of 1,024 tokens
_SHAPES = {"gemma-3": 2, "gpt-oss": 8}
_WIDE = {"gemma-3-1b": 2, "gpt-oss-wide": 8}  # what is done beside a forward, some 3 ms, counts less
_CHUNK = 1024  # of a long prompt: gpt-oss's attention holds a weight for each pair of tokens


@scene(WINDOWS, minutes=40)
def windows(bench: Bench, repeat: Repeat) -> Lines:
    """12 layers, of which 10 see 512 tokens (Gemma 3's shape), or every other one 128 (gpt-oss's): steps, prompts and
    bytes.
    """
    for shape, part in _SHAPES.items():
        windowed = _bench(bench, shape, part)
        yield from _nohit(windowed, shape, repeat)
        yield from _warm(windowed, shape, repeat, None)
        yield from _steps(windowed, shape, repeat)
    for shape, part in _WIDE.items():
        yield from _warm(_bench(bench, shape, part), shape, repeat, bench.bar(0.97))


def _bench(bench: Bench, shape: str, part: int) -> Bench:
    is_quick = not bench.warmups
    narrow = models.quick_changes(shape) if is_quick else {}
    model = models.random_model(
        shape, bench.model.device, bench.model.dtype, sliding_window=bench.sizes.shared // part, **narrow
    )
    return Bench(model, bench.sizes, has_bars=bench.has_bars, is_quick=is_quick)


def _nohit(bench: Bench, shape: str, repeat: Repeat) -> Lines:
    """A prompt that nobody knows."""
    cache, length = PagedPrefixCache(bench.model), bench.sizes.long

    def unknown(cache=cache) -> dict[str, Way]:
        ids = bench.tokens(1, length)
        return {BASELINE: from_scratch(bench, ids), OURS: on_ours(bench, cache, ids)}

    measured = measure_rounds(bench, unknown, rounds=repeat(5), baseline_warms_up=True)
    yield (
        f"{shape}, nohit {length:,}",
        measured.line(f"{shape}: {length:,} tokens, nothing known", at_least=bench.bar(0.98)),
    )


def _warm(bench: Bench, shape: str, repeat: Repeat, at_least: float | None) -> Lines:
    """16 tokens behind a prompt that is known."""
    length = bench.sizes.shared
    knowing, ready = bench.knowing(length), _ready(bench, bench.text(length))
    # made a round before its turn: not in the processor's caches more than ours is
    copies = deque([copy.deepcopy(ready)])

    def known() -> dict[str, Way]:
        ids = bench.behind(bench.text(length), 1)
        copies.append(copy.deepcopy(ready))
        return {LIMIT: on_prepared(bench, copies.popleft(), ids), OURS: on_ours(bench, knowing, ids)}

    measured = measure_rounds(bench, known, rounds=repeat(31))
    what = f"{shape}: {length:,} tokens known, against a ready DynamicCache of them"
    yield f"{shape}, warm {length:,}", measured.line(what, against=LIMIT, at_least=at_least)


def _steps(bench: Bench, shape: str, repeat: Repeat) -> Lines:
    """A step behind a long prefix, and the bytes that are held meanwhile."""
    for length, rounds in ((bench.sizes.long, 5), (4 * bench.sizes.long, 4), (8 * bench.sizes.long, 1)):
        text = bench.text(length)
        ready, cache = _ready(bench, text), _knowing(bench, text)
        given = {"new_tokens": 17}

        def prepare(text=text, cache=cache, ready=ready, given=given) -> dict[str, Way]:
            ids = bench.behind(text, 1)
            return {
                BASELINE: on_prepared(bench, copy.deepcopy(ready), ids, **given),
                OURS: on_ours(bench, cache, ids, **given),
            }

        measured = measure_rounds(
            bench,
            prepare,
            rounds=repeat(rounds),
            warmups=min(1, bench.warmups),
            baseline_warms_up=True,
            measure=lambda way: measure_steps(bench, way),
        )
        bar = bench.bar(0.99) if rounds > 1 else None
        name, what = f"{shape}, decode {length:,}", f"{shape}: a step at {length:,} tokens"
        yield name, measured.line(what, at_least=bar, point={"tokens": length})


def _ready(bench: Bench, ids: Tensor) -> DynamicCache:
    """A DynamicCache of the model's config that holds `ids`."""
    cache = DynamicCache(config=bench.model.config)
    for stop in range(_CHUNK, ids.shape[1] + _CHUNK, _CHUNK):
        bench.prefill(ids[:, :stop], cache)
    return cache


def _knowing(bench: Bench, ids: Tensor) -> PagedPrefixCache:
    """A cache of ours that has just seen `ids`."""
    cache = PagedPrefixCache(bench.store)
    bench.generate(ids, past_key_values=cache, prefill_chunk_size=_CHUNK)
    return cache


def on_prepared(bench: Bench, made: DynamicCache, ids: Tensor, **given: Any) -> Way:
    """`generate` on a copy, which is not timed: what a window has let go cannot be cropped back."""
    return Way(lambda **options: bench.generate(ids, past_key_values=made, **given, **options), lambda: made)
