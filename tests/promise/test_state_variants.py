"""Settings under which states heed more than tokens: clamped time steps, biases after padding, kernels that compute in chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from ..conformance import zoo
from ..conformance.player import distance_of
from ..model.test_support import FROM_5_23
from ..reference import assert_right, assert_same, batch, is_same, row, run

pytestmark = FROM_5_23


def build(name: str, **settings: Any) -> Any:
    model_class, config = zoo.configuration(name)
    for setting, value in settings.items():
        setattr(config, setting, value)
    model = zoo.instantiate(model_class, config, 0)
    zoo.draw_biases(model)
    return model


def cache_of(model: Any) -> PagedPrefixCache:
    return PagedPrefixCache(model, block_size=8, num_blocks=256)


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_where_one_token_is_clamped_otherwise_than_several_repeats_and_follow_up_turns_are_exact(name: str) -> None:
    model = build(name, time_step_min=0.5)
    cache = cache_of(model)
    conversation = row((1, 200))
    for turn in range(3):
        for _ in range(2):
            reference = run(model, **batch(conversation))
            assert_same(reference, run(model, cache, **batch(conversation)))
            cache.check()
        assert cache.last_call.reused_tokens >= 192
        conversation = reference.sequences[0].tolist() + row((2 + turn, 9))


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_the_last_token_of_a_prompt_is_not_computed_alone_there(name: str) -> None:
    """Also where a place for a snapshot lies right before it."""
    model = build(name, time_step_min=0.5)
    cache = cache_of(model)
    prompt = batch(row((1, 3 * cache.store.blocks.states.align + 1)))
    for _ in range(3):
        assert_right(model, cache, **prompt)
        cache.reset()
    assert cache.last_call.reused_tokens


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_a_state_that_was_made_token_by_token_differs_there(name: str) -> None:
    """So the test above would see one that is reused: what was generated, run as a prompt, gives other logits."""
    model = build(name, time_step_min=0.5)
    generated = run(model, **batch(row((1, 40))), max_new_tokens=6)
    again = run(model, input_ids=generated.sequences[:, :-1], max_new_tokens=1)
    assert float((generated.logits[-1] - again.logits[0]).abs().max() / again.logits[0].abs().max()) > 0.01


PADS = (0, 1, 3, 11)


@pytest.mark.parametrize(
    ("name", "setting"), [("lfm2", "conv_bias"), ("bamba", "mamba_proj_bias"), ("nemotron_h", "use_bias")]
)
def test_rows_behind_any_padding_are_exact_where_a_bias_shows_it(name: str, setting: str) -> None:
    model = build(name, **{setting: True})
    cache = cache_of(model)
    for again in range(2):
        for pad in PADS:
            padded = batch(row((1, 200 + pad), (2 + again, 9)), row((3, 200), (4 + again, 9)))
            assert_right(model, cache, **padded)
            cache.check()
    assert cache.last_call.reused_tokens >= 192


@pytest.mark.parametrize(("name", "setting"), [("lfm2", "conv_bias"), ("bamba", "mamba_proj_bias")])
def test_padding_is_of_a_rows_root_as_far_as_it_shows(name: str, setting: str) -> None:
    """After 3 pads and after 11 a row is the same, so its blocks are found; after 0 and 1 it is another."""
    model = build(name, **{setting: True})
    cache = cache_of(model)
    said = {}
    for pad in (11, 3, 1, 0):
        rows = batch(row((5 + pad, 200 + pad)), row((3, 200)))
        assert_right(model, cache, **rows)
        said[pad] = cache.last_call.rows[1].stopped
        cache.reset()
    assert "no cached block has these first" not in said[3]
    assert all("no cached block has these first" in said[pad] for pad in (0, 1))


@pytest.mark.parametrize(("name", "setting"), [("lfm2", "conv_bias"), ("bamba", "mamba_proj_bias")])
def test_a_root_without_padding_would_be_seen(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.model.state_traits.StateTraits.root_padding", lambda self, pad: 0)
    model = build(name, **{setting: True})
    cache = cache_of(model)
    run(model, cache, **batch(row((1, 137))))
    cache.reset()
    padded = batch(row((2, 138)), row((1, 137)))
    output = run(model, cache, **padded)
    assert cache.last_call.rows[1].reused_tokens >= 128
    assert not is_same(run(model, **padded), output)


@pytest.mark.parametrize("num_tokens", [64, 192, 384])
def test_a_hit_at_a_multiple_of_the_chunk_is_within_1e_6(num_tokens: int) -> None:
    model = build("qwen3_next")
    cache = cache_of(model)
    run(model, cache, **batch(row((1, num_tokens + 9))))  # a block more than the chunk's multiple
    cache.reset()
    prompt = batch(row((1, num_tokens + 9), (2, 391 - num_tokens)))
    output = run(model, cache, **prompt)
    assert cache.last_call.reused_tokens == num_tokens
    assert distance_of(run(model, **prompt), output) < 1e-6


def test_beams_of_minimax_are_those_of_scoring_each_row() -> None:
    """Its own cache forgets to reorder states, so `generate` without ours finds other beams."""
    model = build("minimax")
    cache = cache_of(model)
    prompt = batch(row((1, 133)), row((2, 70)))
    how = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8, "output_scores": True}
    for _ in range(2):
        found = run(model, cache, **prompt, **how)
        ids = found.sequences
        mask = torch.cat((prompt["attention_mask"].repeat_interleave(4, 0), torch.ones_like(ids[:, -8:])), 1)
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp_(min=0)
            logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        chosen = logits[:, -9:-1].log_softmax(-1).gather(-1, ids[:, -8:, None]).squeeze(-1)
        torch.testing.assert_close(found.sequences_scores, chosen.mean(-1), atol=1e-4, rtol=0)
    assert cache.last_call.reused_tokens + cache.last_call.shared_tokens
    assert not is_same(run(model, **prompt, **how, use_cache=False), run(model, **prompt, **how))


@pytest.mark.parametrize("step", [1, 3])
def test_positions_that_weigh_index_keys_are_those_that_were_passed_or_follow_from_the_rows(step: int) -> None:
    """Qwen4's index keys are weighed by positions that it keeps in the cache's layer; where they jump, nothing is reused."""
    model = build("qwen4_exp_text")
    ids = torch.tensor([row((1, 96)), row((2, 96))])
    positions = torch.arange(96).mul(step).expand(2, -1)
    cache = cache_of(model)
    for _ in range(2):
        logits = {}
        cache.reset()
        for name, used in (("ours", cache), ("transformers'", DynamicCache(config=model.config))):
            with torch.no_grad():
                for start, stop in ((0, 70), (70, 95), (95, 96)):
                    given = {"input_ids": ids[:, start:stop], "position_ids": positions[:, start:stop]}
                    output = model(**given, past_key_values=used, logits_to_keep=1)
            logits[name] = output.logits
        torch.testing.assert_close(logits["ours"], logits["transformers'"], atol=1e-4, rtol=0)


def test_copied_rows_take_along_the_positions_that_weigh_index_keys() -> None:
    """They ran at positions of the caller's own; then they are copied, reordered, and run token by token, and so are the others."""
    model = build("qwen4_exp")
    ids = torch.tensor([row((1, 29)), row((2, 29))])
    positions = torch.arange(24) + torch.tensor([[[0], [7]], [[3], [0]], [[0], [2]]])
    logits = {}
    for name, cache in (("ours", cache_of(model)), ("transformers'", DynamicCache(config=model.config))):
        with torch.no_grad():
            model(ids[:, :24], position_ids=positions, past_key_values=cache)
            copied = copy.deepcopy(cache)
            copied.reorder_cache(torch.tensor([1, 0]))
            logits[name] = [
                model(ids[:, at : at + 1], past_key_values=rows).logits
                for rows in (copied, cache)
                for at in range(24, 29)
            ]
    torch.testing.assert_close(logits["ours"], logits["transformers'"], atol=1e-4, rtol=0)
