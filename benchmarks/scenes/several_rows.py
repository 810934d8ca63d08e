"""A batch whose rows share a prefix: known to no row, to some, to all."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, FLOOR, LIMIT, OURS
from .registry import Lines, Repeat, scene
from .ways import Way, by_hand, from_scratch, measure_rounds, on_ours, on_ready
from .workbench import Bench

SEVERAL_ROWS = "Several rows"


@scene(SEVERAL_ROWS, minutes=2.5)
def batch_cold(bench: Bench, repeat: Repeat) -> Lines:
    """Rows with a common prefix that nobody has seen, 16 question tokens of its own behind it in each; 1 new token."""
    for num_rows, bar, rounds in ((4, 2.9, 4), (16, 8.0, 2)):
        cache = PagedPrefixCache(bench.model)

        def prepare(num_rows=num_rows, cache=cache) -> dict[str, Way]:
            forget(cache)
            prefix = bench.tokens(1, bench.sizes.shared)
            ids = bench.behind(prefix, num_rows)
            return {
                BASELINE: from_scratch(bench, ids),
                FLOOR: by_hand(bench, prefix, num_rows, ids),
                OURS: on_ours(bench, cache, ids),
            }

        measured = measure_rounds(bench, prepare, rounds=repeat(rounds))
        yield (
            f"batch_cold {num_rows} rows",
            measured.line(f"{num_rows} rows, nothing known", at_least=bench.bar(bar), floor=FLOOR),
        )


@scene(SEVERAL_ROWS, minutes=1)
def batch_mixed(bench: Bench, repeat: Repeat) -> Lines:
    """4 rows: the prefix of 3 is known, that of the fourth new; 16 question tokens behind it in each; 1 new token."""
    length = bench.sizes.shared
    cache, ready = bench.knowing(length), bench.prefilled(length, 3)

    def prepare() -> dict[str, Way]:
        new = bench.tokens(1, length)
        ids = bench.behind(torch.cat((bench.text(length).expand(3, -1), new)), 4)
        return {
            BASELINE: from_scratch(bench, ids),
            FLOOR: _one_more_row(bench, ready, new, ids),
            OURS: on_ours(bench, cache, ids),
        }

    measured = measure_rounds(bench, prepare, rounds=repeat(4))
    yield "batch_mixed", measured.line("3 rows known, 1 new", at_least=bench.bar(2.9), floor=FLOOR)


@scene(SEVERAL_ROWS, minutes=2)
def batch_warm(bench: Bench, repeat: Repeat) -> Lines:
    """Rows behind a known prefix, 16 question tokens of its own in each; 1 new token."""
    length = bench.sizes.shared
    for num_rows, bar, rounds, every in ((4, 17.0, 12, 3), (8, None, 8, 4), (16, None, 6, 3)):
        cache, ready = bench.knowing(length), bench.prefilled(length, num_rows)

        def prepare(num_rows=num_rows, cache=cache, ready=ready) -> dict[str, Way]:
            ids = bench.behind(bench.text(length), num_rows)
            return {
                BASELINE: from_scratch(bench, ids),
                LIMIT: on_ready(bench, ready, ids),
                OURS: on_ours(bench, cache, ids),
            }

        measured = measure_rounds(bench, prepare, rounds=repeat(rounds), baseline_every=every)
        what, at_least = f"{num_rows} rows, the prefix known", None if bar is None else bench.bar(bar)
        yield f"batch_warm {num_rows} rows", measured.line(what, at_least=at_least, floor=LIMIT)


def forget(cache: PagedPrefixCache) -> None:
    """As if nothing had ever been seen."""
    cache.reset()
    cache.reset_prefix_cache()


def _one_more_row(bench: Bench, ready: DynamicCache, new: Tensor, ids: Tensor) -> Way:
    """What three rows know by hand, and the fourth prefilled beside it: the floor of `batch_mixed`."""
    made: list[DynamicCache] = []

    def run(**options) -> Tensor:
        cache = DynamicCache(config=bench.model.config)
        made.append(cache)
        bench.prefill(new, cache)
        for layer, known in zip(cache.layers, ready.layers, strict=True):
            layer.keys = torch.cat((known.keys, layer.keys))
            layer.values = torch.cat((known.values, layer.values))
        return bench.generate(ids, past_key_values=cache, **options)

    return Way(run, lambda: made[-1], made.clear)
