"""One prompt: time to the first token behind a known prefix, and calls that know nothing, or hardly anything."""

from __future__ import annotations

import torch

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, LIMIT, OURS, RECIPE
from .registry import Lines, Repeat, scene
from .ways import Way, from_scratch, measure_rounds, on_a_copy, on_ours, on_ready
from .workbench import NEW_TOKENS, Bench

ONE_ROW = "One row"
FULL = "ours, full pool"


@scene(ONE_ROW, minutes=5)
def warm(bench: Bench, repeat: Repeat) -> Lines:
    """The prefix is known, 16 question tokens are new; 1 new token."""
    sizes, as_the_limit = bench.sizes, bench.bar(0.97)
    bars = {sizes.shared: 14.0, sizes.long: 38.0}
    for length, new_tokens, rounds, every in (
        (sizes.shared, 1, 42, 7),
        (sizes.shared - 3, 1, 42, 21),
        (sizes.shared, 32, 3, 2),
        (sizes.long, 1, 12, 4),
        (sizes.long - 3, 1, 16, 16),
        (sizes.long, 32, 2, 2),
    ):
        cache, ready = bench.knowing(length), bench.prefilled(length)

        def prepare(length=length, new_tokens=new_tokens, cache=cache, ready=ready) -> dict[str, Way]:
            ids, given = bench.behind(bench.text(length), 1), {"new_tokens": new_tokens}
            return {
                BASELINE: from_scratch(bench, ids, **given),
                LIMIT: on_ready(bench, ready, ids, **given),
                OURS: on_ours(bench, cache, ids, **given),
            }

        measured = measure_rounds(bench, prepare, rounds=repeat(rounds), baseline_every=every)
        bar = bars.get(length) if new_tokens == 1 else None
        name = f"warm {length:,}" + (f", {new_tokens} new tokens" if new_tokens > 1 else "")
        yield name, measured.line(f"{length:,} tokens known", at_least=bar and bench.bar(bar), floor=LIMIT)
        if new_tokens == 1:
            what = f"{length:,} tokens known, against a ready DynamicCache of them"
            yield f"{name} / {LIMIT}", measured.line(what, against=LIMIT, at_least=as_the_limit)


@scene(ONE_ROW, minutes=1)
def recipe(bench: Bench, repeat: Repeat) -> Lines:
    """As warm, against copy.deepcopy of a DynamicCache that holds the prefix; the copy is timed."""
    for length, bar, rounds in ((bench.sizes.shared, 1.12, 31), (bench.sizes.long, 1.35, 21)):
        cache, ready = bench.knowing(length), bench.prefilled(length)

        def prepare(length=length, cache=cache, ready=ready) -> dict[str, Way]:
            ids = bench.behind(bench.text(length), 1)
            return {
                RECIPE: on_a_copy(bench, ready, ids),
                LIMIT: on_ready(bench, ready, ids),
                OURS: on_ours(bench, cache, ids),
            }

        measured = measure_rounds(bench, prepare, rounds=repeat(rounds))
        what = f"{length:,} tokens known, against a deep copy of a prefilled DynamicCache"
        yield f"recipe {length:,}", measured.line(what, against=RECIPE, at_least=bench.bar(bar), floor=LIMIT)


@scene(ONE_ROW, minutes=3)
def first_token(bench: Bench, repeat: Repeat) -> Lines:
    """Time to the first token against the length of the known prefix, 16 question tokens behind it."""
    for length in bench.sizes.lengths:
        cache, ready = bench.knowing(length), bench.prefilled(length)
        rounds = 9 if length < bench.sizes.long else 6
        every = 3 if length < bench.sizes.long else rounds

        def prepare(length=length, cache=cache, ready=ready) -> dict[str, Way]:
            ids = bench.behind(bench.text(length), 1)
            return {
                BASELINE: from_scratch(bench, ids),
                RECIPE: on_a_copy(bench, ready, ids),
                LIMIT: on_ready(bench, ready, ids),
                OURS: on_ours(bench, cache, ids),
            }

        measured = measure_rounds(bench, prepare, rounds=repeat(rounds), baseline_every=every)
        what = f"first token behind {length:,} known tokens"
        yield f"first token {length:,}", measured.line(what, point={"tokens": length})


@scene(ONE_ROW, minutes=4)
def nohit(bench: Bench, repeat: Repeat) -> Lines:
    """A prompt of fresh random tokens every time; 8 new tokens. Nothing is to be had."""
    cache = PagedPrefixCache(bench.model)
    length = bench.sizes.shared
    full = PagedPrefixCache(bench.model, num_blocks=2 + length // cache.store.blocks.block_size + NEW_TOKENS)
    bench.generate(bench.tokens(1, length), past_key_values=full)

    def prepare() -> dict[str, Way]:
        ids = bench.tokens(1, length)
        return {
            BASELINE: from_scratch(bench, ids, new_tokens=NEW_TOKENS),
            OURS: on_ours(bench, cache, ids, new_tokens=NEW_TOKENS),
            FULL: on_ours(bench, full, ids, new_tokens=NEW_TOKENS),
        }

    measured = measure_rounds(bench, prepare, rounds=repeat(31), baseline_warms_up=True)
    yield "nohit", measured.line("nothing known, 8 new tokens", at_least=bench.bar(0.98))
    what = "the same with a full pool, which evicts instead of filling memory that nobody has used before"
    yield FULL.replace("ours", "nohit"), measured.line(what, subject=FULL, at_least=bench.bar(0.98))


@scene(ONE_ROW, minutes=2)
def few_known(bench: Bench, repeat: Repeat) -> Lines:
    """A sixty-fourth, a sixteenth and a quarter of the prompt is known, the long rest is new; 1 new token."""
    length = bench.sizes.shared
    for known in (length // 64, length // 16, length // 4):
        cache = bench.knowing(known)

        def prepare(known=known, cache=cache) -> dict[str, Way]:
            ids = torch.cat((bench.text(known), bench.tokens(1, length - known)), dim=1)
            return {BASELINE: from_scratch(bench, ids), OURS: on_ours(bench, cache, ids)}

        measured = measure_rounds(bench, prepare, rounds=repeat(15), baseline_warms_up=True)
        yield f"few known {known:,}", measured.line(f"{known:,} of {length:,} tokens known", at_least=bench.bar(0.98))
