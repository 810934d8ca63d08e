"""States that heed more than tokens: clamped steps, biases after padding, kernels in chunks, other conditions."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..conformance import zoo
from ..conformance.player import distance_of
from ..reference import FROM_5_23, assert_right, assert_same, batch, is_same, row, run

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


CLAMPED = pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])


@CLAMPED
def test_where_one_token_is_clamped_otherwise_than_several_repeats_and_follow_up_turns_are_exact(name: str) -> None:
    """What was made token by token differs there: what was generated, run as a prompt, gives other logits."""
    model = build(name, time_step_min=0.5)
    cache = cache_of(model)
    conversation = row((1, 200))
    for turn in range(2):
        for _ in range(2):
            said = assert_right(model, cache, **batch(conversation))
            cache.check()
        assert cache.last_call.reused_tokens >= 192
        again = run(model, input_ids=said.sequences[:, :-1], max_new_tokens=1).logits[0]
        assert float((said.logits[-1] - again).abs().max() / again.abs().max()) > 0.01
        conversation = said.sequences[0].tolist() + row((2 + turn, 9))


@CLAMPED
def test_the_last_token_of_a_prompt_is_not_computed_alone_there(name: str) -> None:
    """Also where a place for a snapshot lies right before it."""
    model = build(name, time_step_min=0.5)
    cache = cache_of(model)
    prompt = batch(row((1, 3 * cache.store.blocks.align + 1)))
    for _ in range(3):
        assert_right(model, cache, **prompt)
        cache.reset()
    assert cache.last_call.reused_tokens


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


@pytest.mark.parametrize("step", [1, 3])
def test_positions_that_weigh_index_keys_are_those_that_were_passed_or_follow_from_the_rows(step: int) -> None:
    """Qwen4 keeps the positions that weigh index keys in the cache's layer; where they jump, nothing is reused."""
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
    """They ran at positions of the caller's own; then they are copied, reordered and run token by token."""
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


# Conditions that change while a call runs, and change back.

# A gated delta net beside attention; convolutions alone; Mamba and attention in one layer.
NAMES = pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])


class ChangedForward:
    """The model's forward of that number, counted from 1, and all up to `end` are computed under another condition."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._embeddings = model.get_input_embeddings()
        self._embeddings.register_forward_pre_hook(self._count)  # there from the start
        self._countdown = 0
        self._handle: Any = None

    def begin_at(self, number: int) -> None:
        self._countdown = number

    def end(self) -> None:
        self._countdown = 0
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, *_: Any) -> None:
        self._countdown -= 1
        if self._countdown == 0:
            self._handle = self._embeddings.register_forward_hook(lambda *given: given[-1].roll(1, dims=-1))


def lose_snapshots(cache: PagedPrefixCache) -> None:
    """Blocks stay known, and no state: as where snapshots were evicted."""
    cache.reset()
    cache.store.blocks.snapshots.reset()


@NAMES
@pytest.mark.parametrize(("length", "way"), [(256, {}), (261, {"prefill_chunk_size": 64})], ids=["whole", "in chunks"])
def test_states_that_known_tokens_left_under_other_conditions_are_not_kept(
    name: str, length: int, way: dict[str, int]
) -> None:
    """All blocks of the prompt are known and stay so; what is computed again is their states alone."""
    model = zoo.build(name)
    changed, cache = ChangedForward(model), PagedPrefixCache(model)
    prompt = row((1, length))
    run(model, cache, **batch(prompt), max_new_tokens=1)
    reference = {stop: run(model, **batch(prompt[:stop] + row((4, 5)))) for stop in (64, 128, 192, 256)}
    for number in range(1, 6):
        lose_snapshots(cache)
        changed.begin_at(number)
        run(model, cache, **batch(prompt), max_new_tokens=2, **way)
        changed.end()
        for stop, wanted in reference.items():
            cache.reset()
            assert_same(wanted, run(model, cache, **batch(prompt[:stop] + row((4, 5)))))
        cache.check()


@NAMES
def test_tokens_behind_states_of_other_conditions_are_not_kept(name: str) -> None:
    """The condition is back before anybody looks again; what follows carries on from the states that it left."""
    model = zoo.build(name)
    changed, cache = ChangedForward(model), PagedPrefixCache(model)
    prompt = row((1, 256))
    run(model, cache, **batch(prompt), max_new_tokens=1)
    lose_snapshots(cache)
    blocks = cache.store.blocks
    with torch.no_grad():
        model(torch.tensor([prompt[:128]]), past_key_values=cache, logits_to_keep=1)
        changed.begin_at(1)
        model(torch.tensor([prompt[128:]]), past_key_values=cache, logits_to_keep=1)
        changed.end()
        more = row((2, 2 * blocks.align))
        model(torch.tensor([more]), past_key_values=cache, logits_to_keep=1)
    cache.reset()
    for tokens in (prompt, prompt + more):
        prompt_behind = batch(tokens + row((4, 5)))
        assert_right(model, cache, **prompt_behind)
        cache.reset()


def test_a_look_at_blocks_of_one_token_agrees_where_one_token_is_clamped_otherwise() -> None:
    model = build("nemotron_h", time_step_min=0.5)
    cache = PagedPrefixCache(model, block_size=1, num_blocks=256)
    prompt = batch(row((1, 70)))
    for number in range(3):
        assert_right(model, cache, **prompt)
        assert number == 0 or cache.last_call.reused_tokens > 0
        found = cache.verify()
        assert found.num_blocks
        assert not found.differing


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
