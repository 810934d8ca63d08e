"""What rows of a batch share is computed once, in a forward of its own, and every row gets what it gets without."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import OutOfBlocksError, PagedPrefixCache, PrefixStore
from hf_paged_cache.integration.side_forward import SideForwards

from ..call.bench import new_row
from ..internals import make_forwards_cheap, runs_on_rows
from ..reference import TOLERANCE, Forwards, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build, tiny

MODELS = ("llama", "gpt2", "gemma3", "bloom", "opt", "mixtral")
FEW_SHOT = row((1, 64))
QUESTIONS = [[*FEW_SHOT, *row((seed, length))] for seed, length in ((2, 9), (3, 5), (4, 9), (5, 8))]


@pytest.fixture(autouse=True)
def cheap_forwards(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    make_forwards_cheap(monkeypatch)


def compare(model: PreTrainedModel, cache: PagedPrefixCache, **arguments: Any) -> list[tuple[int, int]]:
    """One call with both caches, which must give the same; the forwards of several columns that ours ran."""
    reference = run(model, **arguments)
    with Forwards(model) as shapes:
        output = run(model, cache, **arguments)
    assert_same(reference, output)
    cache.check()
    return of_prompts(shapes)


def of_prompts(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [shape for shape in shapes if shape[1] > 1]


@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize("name", MODELS)
def test_a_common_prompt_is_computed_once(name: str, attention: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model, attention=attention)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        # what a row shares depends on its padding: rows of one length
        questions = [tokens + [9] * (73 - len(tokens)) for tokens in QUESTIONS]
    else:
        questions = QUESTIONS
    shapes = compare(model, cache, **batch(*questions))
    if runs_on_rows(cache) and cache.store.conditioning.sights():  # rows start exactly where they are known
        assert shapes[0] == (1, 64)
    else:
        assert shapes == [(1, 64), (4, 9)]
        assert cache.last_call.computed_tokens == 64 + 4 * 9


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_padding_is_in_front_of_rows_that_run_ahead_and_filling_behind(name: str) -> None:
    model, rows = tiny(name), [row((1, 9)), row((2, 6))]
    store = PrefixStore(model)
    side = SideForwards(model, store.argument_reader, partial(PagedPrefixCache, store))
    pad = 0 if side.takes_positions else 3
    with side.sibling() as sibling, torch.no_grad():
        logits = side.run(sibling, [new_row(tokens, pad) for tokens in rows], num_logits=9)
        for tokens, got in zip(rows, logits, strict=True):
            ids, mask = torch.tensor([[0] * pad + tokens]), torch.tensor([[0] * pad + [1] * len(tokens)])
            wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, pad:]
            assert float((got[: len(tokens)] - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())
    with side.sibling() as sibling, torch.no_grad():  # the padding is passed once
        side.run(sibling, [new_row(rows[0][:4], pad)])
        logits = side.run(sibling, [new_row(rows[0][4:], pad)], num_logits=5)
        ids, mask = torch.tensor([[0] * pad + rows[0]]), torch.tensor([[0] * pad + [1] * 9])
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -5:]
        assert float((logits - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


@pytest.mark.way("pool")
def test_what_was_computed_ahead_is_seen_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in place of it give other logits, for each row."""
    model = build("llama")
    inputs = batch(*QUESTIONS)
    cache = PagedPrefixCache(model)
    schedule, zeroed = cache.call.schedule, []

    def zeroing(request: Any, computed_ahead: Any = None, **options: Any) -> Any:
        if computed_ahead:
            zero_blocks(cache)
            zeroed.append(computed_ahead)
        return schedule(request, computed_ahead, **options)

    monkeypatch.setattr(cache.call, "schedule", zeroing)
    reference, output = run(model, **inputs), run(model, cache, **inputs)
    assert [list(each.values()) for each in zeroed] == [[64]]
    assert not is_same(reference, output)
    first = (reference.logits[0] - output.logits[0]).abs().amax(dim=1)
    assert bool((first > 1e-3).all())


def test_nested_prefixes_are_computed_once_each() -> None:
    model = build("llama")
    a, b, c = row((1, 48)), row((2, 32)), row((3, 32))
    rows = [a + b + row((4, 8)), a + b + row((5, 8)), a + c + row((6, 8))]
    cache = PagedPrefixCache(model)
    assert compare(model, cache, **batch(*rows)) == [(1, 80), (1, 32), (3, 8)]
    assert cache.last_call.computed_tokens == 80 + 32 + 3 * 8


def test_a_new_row_among_known_ones_is_computed_alone() -> None:
    model = build("llama")
    known = [row((1, 64), (seed, 8)) for seed in (2, 3, 4)]
    new = row((9, 64), (5, 8))
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(known[0]))
    assert compare(model, PagedPrefixCache(cache.store), **batch(*known, new)) == [(1, 64), (4, 8)]


def test_nothing_runs_ahead_of_chunks() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    rows = [[*row((1, 48)), *row((seed, 41))] for seed in (2, 3, 3)]
    forwards = compare(model, cache, **batch(*rows), prefill_chunk_size=32)
    assert forwards == [(3, 32), (3, 32), (3, 25)]
    assert cache.last_call.computed_tokens == 3 * 89


def test_beams_of_rows_that_share_are_computed_once() -> None:
    model = build("llama")
    inputs = batch(*QUESTIONS[:2])
    reference = run(model, **inputs, num_beams=3)
    cache = PagedPrefixCache(model)
    with Forwards(model) as shapes:
        output = run(model, cache, **inputs, num_beams=3)
    assert_same(reference, output)
    # the longer row begins four columns further left: its forward resumes so far; six rows as soon as beams part
    assert shapes == [(1, 68), (2, 5), *[(6, 1)] * 5]
    assert cache.last_call.computed_tokens == 68 + 5 + 5
    assert len(cache.last_call.rows) == 6


@pytest.mark.way("pool")
def test_rows_of_the_call_before_make_room_for_what_rows_share() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model, num_blocks=1 + 4 * 5)  # without sharing: 78 columns a row
    others = batch(*(row((seed, 73)) for seed in (11, 12, 13, 14)))
    compare(model, cache, **others)
    assert cache.stats().num_blocks_in_use == 4 * 5  # until the next call begins, the rows of this one keep them
    assert compare(model, cache, **batch(*QUESTIONS)) == [(1, 64), (4, 9)]
    cache.check()


@pytest.mark.way("pool")
def test_a_pool_that_rows_fit_into_because_they_share_serves_others_like_them() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model, num_blocks=1 + 4 + 4)  # the prompt once, and a block a row
    others = [[*row((8, 64)), *row((seed, 9))] for seed in range(4)]
    for rows in (QUESTIONS, others, QUESTIONS):
        assert compare(model, cache, **batch(*rows)) == [(1, 64), (4, 9)]
    cache.check()


@pytest.mark.way("pool")
def test_a_call_that_cannot_fit_is_refused_before_anything_is_computed() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model, num_blocks=7)
    with Forwards(model) as shapes, pytest.raises(OutOfBlocksError):
        run(model, cache, **batch(*QUESTIONS))
    assert shapes == []
    cache.check()
    assert cache.stats().num_blocks_in_use == 0


def test_a_call_that_fits_only_once_rows_share_is_run() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model, num_blocks=1 + 4 + 4)  # the prompt once, and a block a row
    assert compare(model, cache, **batch(*QUESTIONS)) == [(1, 64), (4, 9)]


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_processes_in_step_compute_nothing_ahead() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    with Forwards(model) as shapes:
        run(model, cache, **batch(*QUESTIONS), synced_gpus=True)
    assert of_prompts(shapes) == [(4, 73)]
    cache.reset()
    cache.reset_prefix_cache()
    assert compare(model, cache, **batch(*QUESTIONS)) == [(1, 64), (4, 9)]


def test_where_frequencies_depend_on_length_nothing_is_computed_ahead() -> None:
    """A shorter forward may have others, and then its blocks would be of no use."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=dynamic)
    assert compare(model, PagedPrefixCache(model), **batch(*QUESTIONS)) == [(4, 73)]


def test_an_exception_in_a_shared_prefix_leaves_nothing_behind() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    reference = run(model, **batch(*QUESTIONS))

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(model, cache, **batch(*QUESTIONS))
    handle.remove()
    cache.check()
    assert cache.stats().num_blocks_in_use == 0
    assert_same(reference, run(model, cache, **batch(*QUESTIONS)))


def test_what_was_computed_ahead_counts_for_its_row() -> None:
    cache = PagedPrefixCache(build("llama"))
    run(cache.store.model, cache, **batch(*QUESTIONS))
    counts = cache.last_call
    assert [counted.computed_tokens for counted in counts.rows].count(9) >= 1
    assert sum(counted.computed_tokens for counted in counts.rows) == counts.computed_tokens
    assert sum("computed first" in counted.stopped for counted in counts.rows) == 1
    assert cache.stats().computed_tokens == counts.computed_tokens
