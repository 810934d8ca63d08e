"""Rows whose layers have windows, or carry states, start exactly where they are known: where that is, and what becomes of them when a forward dies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_paged_cache import ForwardMismatchError, PagedPrefixCache

from ..conformance import zoo
from ..internals import failing_forward
from ..reference import FROM_5_23, Forwards, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build

pytestmark = [pytest.mark.usefixtures("one_thread"), FROM_5_23]
SHARED = row((1, 320))


def test_a_window_is_kept_where_prompts_part_that_it_no_longer_shows() -> None:
    model = build("mistral", sliding_window=64, max_position_embeddings=1024)
    cache, reused = PagedPrefixCache(model), []
    for question in range(2, 5):
        prompt = batch([*SHARED, *row((question, 150))])
        assert_same(run(model, **prompt), run(model, cache, **prompt))
        reused.append(cache.last_call.reused_tokens)
        cache.check()
    assert reused[2] == 320
    zero_blocks(cache)
    prompt = batch([*SHARED, *row((5, 30))])  # its last token still sees what is before
    assert not is_same(run(model, **prompt), run(model, cache, **prompt))


def test_rows_of_other_lengths_start_at_one_column_where_forwards_ahead_cost_more() -> None:
    model, cache = build("gemma3"), None
    prompts = batch(*([*row((1, 48)), *row((seed, 3 + seed))] for seed in range(2, 10)))
    cache = PagedPrefixCache(model)
    for number in range(3):
        with Forwards(model) as shapes:
            assert_same(run(model, **prompts), run(model, cache, **prompts)) if number else run(model, cache, **prompts)
        cache.reset()
    assert cache.last_call.reused_tokens >= 8 * 41
    assert shapes[-1] == (8, 1)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_states_are_taken_where_the_prompt_parts_and_at_its_last_place(name: str) -> None:
    model = zoo.build(name)
    cache, reused = PagedPrefixCache(model), []
    for question in range(2, 5):
        prompt = batch([*row((1, 140)), *row((question, 70))])
        assert_same(run(model, **prompt), run(model, cache, **prompt))
        reused.append(cache.last_call.reused_tokens)
        cache.reset()
        cache.check()
    assert reused[2] >= 128
    prompt = batch([*row((1, 140)), *row((2, 70))])
    run(model, cache, **prompt)
    assert cache.last_call.reused_tokens >= 192


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2"])
def test_rows_of_a_loop_are_lost_where_a_forward_dies_and_begin_again_after_a_reset(name: str) -> None:
    model = zoo.build(name)
    given = "cache_params" if name == "mamba2" else "past_key_values"
    cache, ids = PagedPrefixCache(model), torch.tensor([row((1, 40))])

    def forward(new: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(new, **{given: cache}, use_cache=True).logits

    wanted = model(ids).logits
    forward(ids[:, :30])
    with pytest.raises(ZeroDivisionError), failing_forward(model, 1, ZeroDivisionError()):
        forward(ids[:, 30:])
    with pytest.raises(ForwardMismatchError, match="is lost, because a forward died"):
        forward(ids[:, 30:])
    cache.reset()
    assert torch.allclose(forward(ids), wanted, atol=1e-4)
    cache.check()


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "minimax", "inkling_text", "deepseek_v32"])
def test_a_copy_goes_on_beside_the_rows(name: str) -> None:
    model = zoo.build(name)
    cache, ids = PagedPrefixCache(model), torch.tensor([row((1, 40)), row((2, 40))])
    with torch.no_grad():
        wanted = model(ids).logits[:, -8:]
        model(ids[:, :32], past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        model(ids[:, :8], past_key_values=cache, use_cache=True)  # goes on otherwise
        got = model(ids[:, 32:], past_key_values=twin, use_cache=True).logits[:, -8:]
    assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
    cache.check()
