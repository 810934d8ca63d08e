"""What a simple cache of rows gets wrong: each case against `DynamicCache`, on an empty store, a used one, and one of a
single block.

Others rewrite what ran, raise in the middle, bring positions of their own, call from two threads.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import assert_right, assert_same, at_once, batch, row, run
from ..tiny_models import build

LONG = {"max_new_tokens": 20}


class Store:
    """Makes caches."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self.model, self.kind = model, kind

    def cache(self, **sizes: Any) -> PagedPrefixCache:
        if self.kind == "one block":
            return PagedPrefixCache(self.model, num_blocks=2)
        cache = PagedPrefixCache(self.model, **sizes)
        if self.kind == "used":
            run(self.model, cache, **batch(row((91, 40)), row((92, 33))), num_beams=2)
            cache.reset()
        return cache


@pytest.fixture(params=["empty", "used", "one block"])
def store(request: pytest.FixtureRequest) -> Store:
    return Store(build("llama"), request.param)


def ids(*tokens: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([*tokens])}


def test_a_processor_that_rewrites_a_token_that_ran(store: Store) -> None:
    class Heal(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 40:
                input_ids[0, 36] = 5 if int(input_ids[0, 36]) != 5 else 6
            return scores

    cache = store.cache(block_size=4)
    said = run(store.model, cache, **ids(row((1, 32))), **LONG, logits_processor=[Heal()]).sequences[0].tolist()
    turn = ids(said + row((2, 5)))
    assert_right(store.model, cache, **turn)
    cache.reset()
    assert_right(store.model, cache, **turn)


def test_embeddings_beside_ids_are_not_taken_for_the_ids(store: Store) -> None:
    cache, prompt = store.cache(), ids(row((1, 40)))
    own = {**prompt, "inputs_embeds": store.model.get_input_embeddings()(torch.tensor([row((2, 40))]))}
    assert_right(store.model, cache, **own)
    assert "embeddings" in cache.last_call.rows[0].stopped
    assert_right(store.model, cache, reused=0, **prompt)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("is_shared", [True, False], ids=["one cache", "caches of one store"])
def test_threads_that_call_at_once_are_all_right(is_shared: bool, store: Store) -> None:
    cache = store.cache()
    prompts = [ids(row((1, 48), (seed, 16))) for seed in range(2, 6)]
    wanted = [run(store.model, **prompt, **LONG) for prompt in prompts]

    def call(prompt: dict[str, torch.Tensor]) -> list[Any]:
        mine = cache if is_shared else PagedPrefixCache(cache.store)
        given = {**prompt, "attention_mask": torch.ones_like(prompt["input_ids"]), "do_sample": False}
        options = {"return_dict_in_generate": True, "output_logits": True, "past_key_values": mine}
        return [store.model.generate(**given, **LONG, **options) for _ in range(2)]

    for reference, outputs in zip(wanted, at_once(*(partial(call, prompt) for prompt in prompts)), strict=True):
        for output in outputs:
            assert_same(reference, output)
    cache.check()


def test_rows_that_a_call_returned_go_on_beside_later_calls(store: Store) -> None:
    """They are theirs who have them: no later call of the cache writes to them."""
    cache, prompt = store.cache(), row((1, 50))
    returned = run(store.model, cache, **ids(prompt))
    run(store.model, cache, **ids(prompt[:40] + row((2, 30))), **LONG)
    said = returned.sequences[0].tolist()
    turn = ids(said + row((3, 6)))
    wanted = run(store.model, **turn)
    assert_same(wanted, run(store.model, copy.deepcopy(returned.past_key_values), **turn))
    assert_same(wanted, run(store.model, returned.past_key_values, **turn))
    mask = torch.ones_like(turn["input_ids"])
    new = {"input_ids": turn["input_ids"][:, returned.past_key_values.get_seq_length() :], "attention_mask": mask}
    assert_same(wanted, run(store.model, returned.past_key_values, **new))


def test_the_tensors_of_a_layer_are_contiguous_as_a_dynamic_caches_are() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    run(model, cache, **ids(row((1, 30))))
    for layer in cache.layers:
        assert layer.keys.is_contiguous()
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
