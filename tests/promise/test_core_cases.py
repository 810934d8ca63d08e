"""What a simple cache of rows gets wrong: each case against `DynamicCache`, on an empty store, a used one, and one of a
single block.

Others rewrite what ran, raise in the middle, bring positions of their own, call from two threads.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import TOLERANCE, AtStep, assert_right, assert_same, batch, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

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


def test_positions_of_ones_own_are_not_taken_for_usual_ones(store: Store) -> None:
    cache, prompt = store.cache(), ids(row((1, 40)))
    own = {**prompt, "position_ids": torch.arange(40)[None] * 3}
    assert_right(store.model, cache, reused=0, **own)
    assert "positions" in cache.last_call.rows[0].stopped
    assert_right(store.model, cache, reused=0, **prompt)


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
    found: list[Any] = [None] * len(prompts)

    def call(number: int) -> None:
        mine = cache if is_shared else PagedPrefixCache(cache.store)
        try:
            for _ in range(2):
                given = {**prompts[number], "attention_mask": torch.ones_like(prompts[number]["input_ids"])}
                options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
                found[number] = store.model.generate(**given, **LONG, **options, past_key_values=mine)
        except Exception as error:  # noqa: BLE001 (told below)
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reference, output in zip(wanted, found, strict=True):
        assert not isinstance(output, Exception), output
        assert_same(reference, output)
    cache.check()


# What people do with caches.


def test_keys_and_values_that_are_edited_are_heeded_and_never_kept(store: Store) -> None:
    cache, tokens, new = store.cache(), torch.tensor([row((1, 48))]), torch.tensor([row((2, 4))])

    def edited(edits: Any) -> torch.Tensor:
        with torch.no_grad():
            store.model(tokens, past_key_values=edits)
            for layer in edits.layers:
                layer.values[:, :, -1] += 5.0
            return store.model(new, past_key_values=edits).logits

    wanted, found = edited(DynamicCache(config=store.model.config)), edited(cache)
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    cache.reset()
    turn = {"input_ids": torch.cat([tokens, new], 1)}
    assert_right(store.model, cache, **turn)


def test_blocks_under_older_weights_make_room_before_the_pool_grows() -> None:
    model = build("llama")
    cache, prompts = PagedPrefixCache(model), batch(row((1, 200)), row((2, 200)))
    sizes = []
    for _ in range(12):
        run(model, cache, **prompts)
        sizes.append(cache.stats().num_cached_blocks)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    assert max(sizes) <= 4 * sizes[0], sizes
    assert_right(model, cache, **prompts)


def test_weights_that_a_processor_changes_in_the_middle_leave_nothing_to_later_calls(store: Store) -> None:
    """No hook, no thread: nothing tells before the call ends."""
    cache, weight = store.cache(block_size=4), store.model.model.layers[0].self_attn.k_proj.weight
    before = weight.detach().clone()

    def change() -> None:
        with torch.no_grad():
            weight.mul_(1.5)

    said = run(store.model, cache, **ids(row((1, 40))), **LONG, logits_processor=[AtStep(3, change)]).sequences
    with torch.no_grad():
        weight.copy_(before)
    assert_right(store.model, cache, input_ids=said)
    cache.reset()
    assert_right(store.model, cache, input_ids=said)


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
