"""States under conditions that change while a call runs, and change back; and `verify` where layers have nothing but states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..conformance import zoo
from ..model.test_support import FROM_5_23
from ..reference import assert_right, assert_same, batch, row, run

pytestmark = [pytest.mark.usefixtures("one_thread"), FROM_5_23]

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
    cache.store.blocks.states.kept.reset()


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
    states = cache.store.blocks.states
    with torch.no_grad():
        model(torch.tensor([prompt[:128]]), past_key_values=cache, logits_to_keep=1)
        changed.begin_at(1)
        model(torch.tensor([prompt[128:]]), past_key_values=cache, logits_to_keep=1)
        changed.end()
        more = row((2, 2 * states.align))
        model(torch.tensor([more]), past_key_values=cache, logits_to_keep=1)
    cache.reset()
    for tokens in (prompt, prompt + more):
        prompt_behind = batch(tokens + row((4, 5)))
        assert_right(model, cache, **prompt_behind)
        cache.reset()


def test_a_look_at_blocks_of_one_token_agrees_where_one_token_is_clamped_otherwise() -> None:
    model_class, config = zoo.configuration("nemotron_h")
    config.time_step_min = 0.5
    model = zoo.instantiate(model_class, config, 0)
    cache = PagedPrefixCache(model, block_size=1, num_blocks=256)
    prompt = batch(row((1, 70)))
    for number in range(6):
        assert_right(model, cache, **prompt)
        assert number == 0 or cache.last_call.reused_tokens > 0
        found = cache.verify()
        assert found.num_blocks
        assert not found.differing
