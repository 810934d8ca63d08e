"""Prompts with images, as a processor returns them, where a user names a prompt: what is said is what a call finds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, UnsupportedModelError

from ..conformance.image_zoo import tiny
from ..conformance.images import Towers
from ..reference import assert_same, is_same, run, zero_blocks
from .test_image_inputs import FIRST, KINDS, SECOND, TEXT, THIRD, ask, begin


def state_of(model: Any) -> list[Tensor | None]:
    return [module.rope_deltas for module in model.modules() if hasattr(module, "rope_deltas")]


@pytest.mark.parametrize("name", KINDS)
def test_an_image_is_prefilled_and_a_look_says_what_a_call_finds(name: str) -> None:
    model, _ = tiny(name)
    with Towers(model) as towers:
        held = PagedPrefixCache(model, block_size=8)
        given, other = ask(name, [TEXT, 1, FIRST]), ask(name, [TEXT, 1, SECOND])
        run(model, **ask(name, [THIRD, 2, THIRD]))
        before, towers.num_runs = state_of(model), 0
        assert held.lookup(given).num_tokens == 0
        assert not towers.num_runs, "a look runs nothing"
        done = held.prefill([given])
        assert (done.num_tokens, done.num_known, towers.num_runs) == (done.num_computed // 8 * 8, 0, 1)
        assert held.prefill(given).num_computed == 0
        assert all(a is b for a, b in zip(before, state_of(model), strict=True))
        for each in (given, other):
            found = held.lookup(each).num_tokens
            assert found >= START
            output = run(model, held, **each)
            assert held.last_call.rows[0].matched_tokens == found
            held.reset()
        assert towers.num_runs == 1
    assert_same(run(model, **other), output)
    zero_blocks(held)
    assert not is_same(run(model, **other), run(model, held, **other))


START = len(TEXT) + 16  # after the image


@pytest.mark.parametrize("name", KINDS)
def test_explain_names_the_image_in_which_prompts_part(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    held.prefill(ask(name, [TEXT, 1, FIRST, 2, SECOND, 3, THIRD]))
    said = held.explain(ask(name, [TEXT, 1, FIRST, 3, SECOND, 3, THIRD]))
    assert said.parts_at == len(TEXT) + 16 + len(FIRST)
    assert "no cached block has image 2 of 3, at token 70, after these tokens" in str(said)
    assert "image 2 of 3, at token 70, is another one" in said.advice
    run(model, held, **ask(name, [TEXT, 1, FIRST, 3, SECOND]))
    assert held.last_call.rows[0].stopped == "no cached block has image 2 of 2, at token 70, after these tokens"


@pytest.mark.parametrize("name", KINDS)
def test_a_pinned_image_stays_for_other_questions(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8, num_blocks=24)
    given = ask(name, [TEXT, 1, FIRST])
    held.prefill(given)
    assert held.pin(given) == given["input_ids"].shape[1] // 8 * 8
    for seed in (2, 3, 2):
        run(model, held, **ask(name, [SECOND, seed, THIRD]))
        held.reset()
    other = ask(name, [TEXT, 1, THIRD])
    assert held.lookup(other).num_tokens == START
    assert_same(run(model, **other), run(model, held, **other))
    assert held.unpin(given)
    assert held.stats().num_pinned_blocks == 0
    held.check()


class _Force(LogitsProcessor):
    def __init__(self, ids: list[int]) -> None:
        self.ids = iter(ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -1e9)
        forced[:, next(self.ids)] = 0
        return forced


@pytest.mark.parametrize("name", KINDS)
def test_continuations_of_an_image_are_scored_as_generate_scores_them(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    continuations = [FIRST[:4], FIRST[:5], SECOND[:3], [7]]
    for seed in (1, 2, 1):
        given = ask(name, [TEXT, seed, FIRST])
        scores = held.score(given, continuations)
        for score, forced in zip(scores, continuations, strict=True):
            fresh = DynamicCache(config=model.config)
            output = run(
                model, past_key_values=fresh, **given, max_new_tokens=len(forced), logits_processor=[_Force(forced)]
            )
            wanted = [float(step[0].log_softmax(-1)[id_]) for step, id_ in zip(output.logits, forced, strict=True)]
            assert score.log_probs == pytest.approx(wanted, abs=1e-4)
    assert held.last_call.reused_tokens > START
    assert held.stats().num_blocks_in_use == 0


def test_what_cannot_be_asked_is_said() -> None:
    _, held, given = begin("qwen2_vl", [TEXT, 1, FIRST])
    with pytest.raises(UnsupportedModelError, match="the prompt ends with an image"):
        held.prefill(ask("qwen2_vl", [TEXT, 1]))
    assert held.lookup(ask("qwen2_vl", [TEXT, 1])).stopped.startswith("the prompt ends with an image")
    with pytest.raises(CacheArgumentError, match="give one row of token ids"):
        held.pin(ask("qwen2_vl", [TEXT, 1, FIRST], [TEXT, 2, FIRST]))
    with pytest.raises(CacheArgumentError, match="the prompt has padding"):
        held.lookup(
            {**given, "attention_mask": torch.ones_like(given["input_ids"]).index_fill_(1, torch.tensor([0]), 0)}
        )
    with pytest.raises(CacheArgumentError, match="the prompt has pixel_values; give it with its input_ids"):
        held.lookup({"pixel_values": given["pixel_values"]})
    with pytest.raises(CacheArgumentError, match='pass return_tensors="pt"'):
        held.lookup({**given, "input_ids": given["input_ids"].tolist()})
    with pytest.raises(CacheArgumentError, match="leave prefill_chunk_size out"):
        held.score(given, [FIRST], prefill_chunk_size=8)
    with pytest.raises(
        CacheArgumentError, match="tokens follow the context is not known: the prompt ends with an image"
    ):
        held.score(ask("qwen2_vl", [TEXT, 1]), [FIRST])
    with pytest.raises(CacheArgumentError, match="the placeholder of an image"):
        held.prefill(given["input_ids"])
    assert held.stats().num_cached_blocks == 0
