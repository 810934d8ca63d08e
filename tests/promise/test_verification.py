"""`cache.verify`: which blocks are recomputed, what counts as another, at what cost, and what is forgotten."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore, UnsupportedModelError
from hf_paged_cache.ask import verification

from ..conformance import zoo
from ..internals import held_tensors
from ..reference import IDS, PROMPT, AtStep, assert_same, batch, row, run
from ..tiny_models import build
from .test_conditions_of_reuse import ROPES

BLOCK_SIZE = 16
ALL_EQUAL = (3, 0, ())  # of a prompt of 50 tokens


def spoil_block(cache: PagedPrefixCache, number: int) -> None:
    """The block that the pool took as that one, from 0 on; block 0 of the pool is kept back."""
    for held in held_tensors(cache):
        held[1 + number] += 1


def as_cached(cache: PagedPrefixCache) -> tuple[Any, ...]:
    stats = cache.store.stats()
    return stats.num_cached_blocks, stats.num_blocks_in_use, stats.prompt_tokens, stats.num_calls, stats.num_evictions


@pytest.mark.parametrize(
    ("name", "most"),
    [(name, 2048) for name in ("llama", "bloom", "gemma3", "glm_moe_dsa", "qwen3_next", "mamba2")]
    + [("llama", 32), ("lfm2", 32)],
)
def test_of_an_unchanged_model_no_block_differs_and_nothing_is_lost(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_MOST_TOKENS", most)
    model = zoo.build(name)
    cache = PagedPrefixCache(model)
    prompts = [batch(row((1, 128), (2 + number, 37))) for number in range(3)]
    for _ in range(2):
        for prompt in prompts:
            run(model, cache, **prompt, max_new_tokens=2)
        before = as_cached(cache)
        found = cache.verify()
        assert found.num_blocks
        assert not found.differing
        assert as_cached(cache) == before
        cache.check()
    for prompt in prompts:
        assert_same(run(model, **prompt), run(model, cache, **prompt))
        assert cache.last_call.reused_tokens >= 128


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm_moe_dsa", "qwen3_next", "lfm2"])
def test_a_weight_that_changes_unseen_is_found_whatever_the_layers(name: str) -> None:
    model = copy.deepcopy(zoo.build(name))
    cache = PagedPrefixCache(model)
    prompt = batch(row((1, 128), (2, 37)))
    run(model, cache, **prompt, max_new_tokens=2)
    model.get_input_embeddings().weight.data[int(prompt["input_ids"][0, 5])] *= 1.5  # neither counted nor sampled
    assert cache.lookup(prompt["input_ids"]).num_tokens >= 128
    assert cache.verify().differing
    assert cache.lookup(prompt["input_ids"]).num_tokens == 0
    assert_same(run(model, **prompt), run(model, cache, **prompt))
    assert not cache.verify().differing


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_block_that_differs_is_named_and_everything_is_forgotten(number: int, model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model)
    run(model, cache, input_ids=IDS)
    assert cache.verify() == ALL_EQUAL
    cache.reset()
    spoil_block(cache, number)
    start = number * BLOCK_SIZE
    assert cache.verify() == (3, 0, ((start, tuple(PROMPT[start : start + BLOCK_SIZE])),))
    assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS))
    assert cache.last_call.rows[0].matched_tokens == 0
    cache.check()


def test_a_block_that_holds_no_numbers_differs(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model)
    run(model, cache, input_ids=IDS)
    for held in held_tensors(cache):
        held[1:] = torch.nan
    assert [start for start, _ in cache.verify().differing] == [0, 16, 32]


def test_rows_go_on_after_a_look_in_the_middle_of_their_call(model: PreTrainedModel) -> None:
    cache, found = PagedPrefixCache(model), []
    wanted = run(model, input_ids=IDS)
    run(model, PagedPrefixCache(cache.store), input_ids=IDS)
    look = AtStep(3, lambda: found.append(cache.verify()))
    assert_same(wanted, run(model, cache, input_ids=IDS, logits_processor=[look]))
    assert found == [ALL_EQUAL]
    assert cache.last_call.kind == "generate"


def test_a_call_that_runs_while_a_block_turns_out_wrong_leaves_nothing_to_be_found(model: PreTrainedModel) -> None:
    cache, found = PagedPrefixCache(model), []
    run(model, PagedPrefixCache(cache.store), input_ids=IDS)
    spoil_block(cache, 1)
    look = AtStep(3, lambda: found.append(len(cache.verify().differing)))
    run(model, cache, input_ids=IDS, logits_processor=[look])
    assert found == [1]
    assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS))


def test_a_tenant_looks_at_its_own_blocks_and_what_it_finds_holds_for_all(model: PreTrainedModel) -> None:
    store = PrefixStore(model)
    alice, bob, owner = (PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob", None))
    for cache in (alice, bob):
        run(model, cache, input_ids=IDS)
        cache.reset()
    spoil_block(bob, 1)  # the pool's first blocks are of the first
    assert bob.verify() == ALL_EQUAL
    assert owner.verify() == (0, 0, ())
    assert len(alice.verify().differing) == 1
    assert bob.lookup(PROMPT).num_tokens == 0


def test_rows_whose_padding_shows_are_left() -> None:
    """Recomputed without it, they would be at other columns."""
    model = build("bloom")
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(row((1, 20)), row((2, 50))), max_new_tokens=1)
    spoil_block(cache, 0)  # of the padded row
    assert cache.verify() == (3, 1, ())


def test_rows_whose_positions_do_not_begin_at_0_are_left(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model)
    with torch.no_grad():
        model(IDS, position_ids=torch.arange(50)[None] + 7, attention_mask=torch.ones(1, 50), past_key_values=cache)
    cache.reset()
    assert cache.verify() == (0, 3, ())


@pytest.mark.parametrize("name", ["llama", "mistral", "lfm2"])
def test_blocks_held_in_a_finer_dtype_than_the_model_has_now_are_recomputed_in_its_own(name: str) -> None:
    model = copy.deepcopy(zoo.build(name))
    cache = PagedPrefixCache(model)
    prompt = batch(row((1, 50)))
    run(model.double(), cache, **prompt, max_new_tokens=2)
    run(model.float(), cache, **prompt, max_new_tokens=2)
    found = cache.verify()
    assert found.num_blocks
    assert not found.differing


@pytest.mark.parametrize("kind", ["dynamic"])
def test_where_frequencies_depend_on_length_it_is_said_that_none_can_be_recomputed(kind: str) -> None:
    model = build("llama", rope_parameters=ROPES[kind], max_position_embeddings=64)
    cache = PagedPrefixCache(model)
    with pytest.raises(
        UnsupportedModelError, match="no block can be recomputed alone, so none was: rotary frequencies"
    ):
        cache.verify()


def test_under_an_active_dropout_it_is_said_why_not() -> None:
    model = build("llama", attention_dropout=0.5).train()
    with pytest.raises(UnsupportedModelError, match="so none was: a dropout or noise is active"):
        PagedPrefixCache(model).verify()


@pytest.mark.parametrize(("name", "is_seen"), [("llama", True), ("qwen3_next", False)])
def test_a_recurrence_may_round_as_it_does_in_chunks_and_step_by_step(name: str, is_seen: bool) -> None:
    model = zoo.build(name)
    for factor, differs in ((1 + 4e-5, is_seen), (1 + 1e-3, True)):
        cache = PagedPrefixCache(model)
        run(model, cache, input_ids=torch.tensor([row((1, 140))]))
        assert cache.verify().differing == ()
        for slab, _ in cache.store.blocks.pool.all.slabs:
            slab.mul_(factor)
        assert bool(cache.verify().differing) is differs
