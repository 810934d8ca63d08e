"""Prefixes named by their tokens: computed ahead they are what a call computes, and a look tells what a call finds."""

import copy
import random
from functools import cache as cached
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import (
    CacheArgumentError,
    CacheBusyError,
    Lookup,
    OutOfBlocksError,
    PagedPrefixCache,
    Prefilled,
    PrefixStore,
    UnsupportedModelError,
)
from hf_paged_cache.model.trial import measure_bytes_per_token
from hf_paged_cache.store.memory_budget import SHARE_OF_A_BUDGET

from ..blocks.snapshot import snapshot_of
from ..conformance import zoo
from ..internals import tokens_of_rows, zero_states
from ..reference import AtStep, Forwards, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build, tiny
from .test_conditions_of_reuse import ROPES

WITH_STATES = ("qwen3_next", "lfm2", "zamba2")
# without, with windows in all or every other layer, states
NAMES = ("llama", "bloom", "mistral", "gemma3", *WITH_STATES)
PREFIX = row((1, 150))
QUESTION = row((2, 9))


@cached
def model_of(name: str) -> PreTrainedModel:
    return zoo.build(name) if name in WITH_STATES else tiny(name)


def rope_model(kind: str) -> PreTrainedModel:
    return build("llama", rope_parameters=ROPES[kind], max_position_embeddings=64 if kind == "dynamic" else 256)


def all_blocks(cache: PagedPrefixCache) -> tuple[Any, ...]:
    """Equal while nothing of the store has changed, orders of eviction included."""
    stats = cache.store.stats()  # which takes back what others left
    return stats, snapshot_of(cache.store.blocks.allocator)


def assert_found(cache: PagedPrefixCache, tokens: list[int], **arguments: Any) -> Lookup:
    """Look, then ask: the look changed nothing, and said what the call then found."""
    before = all_blocks(cache)
    found = cache.lookup(tokens)
    assert all_blocks(cache) == before
    run(cache.store.model, cache, **batch(tokens), **{"max_new_tokens": 3, **arguments})
    (told,) = cache.last_call.rows
    assert told.matched_tokens == found.num_tokens
    assert told.stopped.startswith(found.stopped)
    assert found.num_blocks == found.num_tokens // cache.store.blocks.block_size
    assert found.tier == ("device" if found.num_tokens else None)
    return found


@pytest.mark.parametrize(("name", "chunk_size"), [*((name, 32) for name in NAMES), ("llama", 2048), ("lfm2", 2048)])
def test_a_call_behind_a_prefill_gives_the_same_and_computes_what_is_new(name: str, chunk_size: int) -> None:
    model = model_of(name)
    cache, wanted = PagedPrefixCache(model, block_size=4), run(model, **batch(PREFIX + QUESTION))
    assert cache.prefill(PREFIX, chunk_size=chunk_size) == Prefilled(num_tokens=148, num_known=0, num_computed=148)
    assert_same(wanted, run(model, cache, **batch(PREFIX + QUESTION)))
    # kernels that compute 64 tokens at once
    assert cache.last_call.reused_tokens == (128 if name == "qwen3_next" else 148)
    cache.check()
    again = PagedPrefixCache(model, block_size=4)
    again.prefill(PREFIX, chunk_size=chunk_size)
    zero_blocks(again)
    zero_states(again)
    assert not is_same(wanted, run(model, again, **batch(PREFIX + QUESTION)))


@pytest.mark.parametrize("num_tokens", [128, 129])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_next"])
def test_the_very_prompt_that_was_prefilled_computes_little_more_than_its_last_token(
    name: str, num_tokens: int
) -> None:
    model = model_of(name)
    cache, prompt = PagedPrefixCache(model, block_size=4), PREFIX[:num_tokens]
    cache.prefill(prompt)
    assert_same(run(model, **batch(prompt)), run(model, cache, **batch(prompt)))
    assert cache.last_call.computed_tokens <= (64 if name == "qwen3_next" else 5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_no_forward_has_more_tokens_than_asked_for(name: str) -> None:
    cache, least = PagedPrefixCache(model_of(name), block_size=4), 64 if name == "qwen3_next" else 4
    for prompt, num_new in ((PREFIX, 148), (PREFIX + row((3, 100)), 100 if least == 4 else 120)):
        with Forwards(cache.store.model) as shapes:
            done = cache.prefill(prompt, chunk_size=30)
        assert done.num_computed == num_new == sum(columns for _, columns in shapes)
        assert max(shapes) == (1, -(-30 // least) * least)  # whole blocks, or whole places for a snapshot
        assert done.num_tokens == done.num_known + done.num_computed


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_what_is_known_is_not_computed_again(name: str) -> None:
    cache = PagedPrefixCache(model_of(name), block_size=4)
    cache.prefill(PREFIX)
    with Forwards(cache.store.model) as shapes:
        assert cache.prefill(PREFIX) == (148, 148, 0)
    assert not shapes
    stats = cache.stats()
    assert (stats.num_calls, stats.prompt_tokens, stats.computed_tokens) == (1, 148, 148)


def test_what_is_prefilled_again_is_evicted_last() -> None:
    cache = PagedPrefixCache(tiny("llama"), block_size=4, num_blocks=33)
    first, second = row((1, 40)), row((2, 40))
    cache.prefill([first, second])
    assert cache.prefill(first).num_computed == 0
    cache.prefill(row((3, 80)))
    assert cache.lookup(first).num_tokens == 40
    assert cache.lookup(second).num_tokens < 40


def test_of_several_prompts_what_they_share_is_computed_once() -> None:
    cache, shared = PagedPrefixCache(tiny("llama"), block_size=4), row((1, 40))
    prompts = [shared + row((seed, 20)) for seed in (2, 3, 4)]
    assert cache.prefill(prompts) == Prefilled(num_tokens=180, num_known=80, num_computed=100)
    assert [cache.lookup(torch.tensor([prompt])).num_tokens for prompt in prompts] == [60, 60, 60]
    assert cache.prefill([torch.tensor(prompt) for prompt in prompts]).num_computed == 0


def test_the_rows_of_the_cache_stay_also_while_they_run() -> None:
    model = tiny("llama")
    cache, prompt = PagedPrefixCache(model, block_size=4), PREFIX[:50]
    wanted = run(model, **batch(prompt))
    in_a_call = AtStep(3, lambda: cache.prefill(row((5, 40))))
    assert_same(wanted, run(model, cache, **batch(prompt), logits_processor=[in_a_call]))
    told, rows = cache.last_call, tokens_of_rows(cache)
    assert told.kind == "generate"
    cache.prefill(row((6, 40)))
    assert (cache.last_call.kind, cache.last_call.computed_tokens) == ("prefill", 40)
    assert tokens_of_rows(cache) == rows
    assert cache.lookup(wanted.sequences[0]).stopped == "the last call's row ends at token 55, and the prompt continues"
    assert [cache.lookup(row((seed, 40))).num_tokens for seed in (5, 6)] == [40, 40]
    for mine, theirs in zip(cache.layers, wanted.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ROPES)
def test_where_rotary_frequencies_depend_on_length_a_prompt_runs_whole(name: str) -> None:
    model = rope_model(name)
    cache, prompt = PagedPrefixCache(model, block_size=4), row((1, 82))
    with Forwards(model) as shapes:
        done = cache.prefill(prompt, chunk_size=16)
    by_length = cache.store.fingerprint.rope.depends_on_length
    assert done.num_tokens == 80
    assert shapes == [(1, 82)] if by_length else max(shapes) == (1, 16)
    assert cache.lookup(prompt).num_tokens == 80
    reference = run(copy.deepcopy(model), **batch(prompt))  # dynamic frequencies leave a state in the model
    assert_same(reference, run(model, cache, **batch(prompt)))
    assert cache.last_call.reused_tokens == 80


def test_prompts_that_do_not_fit_together_are_refused_and_nothing_changes() -> None:
    cache = PagedPrefixCache(tiny("llama"), block_size=4, num_blocks=33)
    cache.prefill(row((1, 40)))
    before = all_blocks(cache)
    prompts = [row((seed, 60)) for seed in (2, 3, 4)]
    with (
        Forwards(cache.store.model) as shapes,
        pytest.raises(OutOfBlocksError, match=r"45 blocks .* so many cannot be had"),
    ):
        cache.prefill(prompts)
    assert all_blocks(cache) == before
    assert not shapes
    assert cache.prefill(prompts[:2]).num_tokens == 120
    with pytest.raises(OutOfBlocksError, match="so many cannot be had"):
        PagedPrefixCache(cache.store, cache_salt="a").prefill(prompts)


def test_what_nobody_may_reuse_is_not_computed() -> None:
    model = build("llama", attention_dropout=0.1)
    cache = PagedPrefixCache(model, block_size=4)
    cache.prefill(PREFIX)
    model.train()
    with Forwards(model) as shapes, pytest.raises(UnsupportedModelError, match="nothing was prefilled: a dropout"):
        cache.prefill(row((3, 40)))
    assert not shapes
    assert cache.lookup(PREFIX) == Lookup(0, 0, "a dropout or noise is active; call model.eval()", None)
    model.eval()
    assert cache.lookup(PREFIX).num_tokens == 148


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("tokens", "of type str"),
        ({"text": "a"}, "the prefix has text; give it with its input_ids"),
        (None, "the prefix is of type NoneType; give a sequence of token ids"),
        ([1 << 70], f"the prefix has {1 << 70} among its token ids, which is too large for one"),
        ([[1, 2], "tokens"], "prompt 1 is of type str"),
        ([[1, 2], []], "prompt 1 is empty"),
        ([], "the prefix is empty"),
        ([1, 200], "the prefix has token 200; the vocabulary has ids 0 to 127"),
        (torch.ones(2, 3, dtype=torch.int64), "give one row"),
        (torch.ones(3), "token ids are integers"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, says: str) -> None:
    cache = PagedPrefixCache(tiny("llama"))
    for ask in (cache.prefill, cache.pin)[: 1 if isinstance(given, list) else 2]:
        with pytest.raises(CacheArgumentError, match=says):
            ask(given)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True])
def test_a_chunk_has_tokens(chunk_size: Any) -> None:
    with pytest.raises(CacheArgumentError, match="chunk_size"):
        PagedPrefixCache(tiny("llama")).prefill([1, 2], chunk_size=chunk_size)


def test_where_a_call_runs_a_look_would_change_frequencies() -> None:
    model = rope_model("dynamic")
    cache = PagedPrefixCache(model)

    def look() -> None:
        with pytest.raises(CacheBusyError, match="rotary frequencies"):
            cache.lookup(PREFIX)

    run(model, cache, **batch(row((1, 80))), logits_processor=[AtStep(2, look)])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_look_says_what_the_call_then_finds_whatever_came_before(name: str) -> None:
    rng, model = random.Random(name), model_of(name)
    size: dict[str, int] = {"num_blocks": 100}
    if name == "gemma3":  # window blocks for half of the blocks, so that windows end some matches
        size = {"max_bytes": int(400 * measure_bytes_per_token(model, dict.fromkeys((0, 2), SHARE_OF_A_BUDGET)))}
    store = PrefixStore(model, block_size=4, **size)
    caches = [PagedPrefixCache(store), PagedPrefixCache(store), PagedPrefixCache(store, cache_salt="a")]
    prompts, found = [row((1, 60))], []
    for _ in range(40):
        cache = rng.choice(caches)
        base = rng.choice(prompts[-4:])
        tokens = base[: rng.choice([len(base), len(base) // 4 * 4, rng.randint(1, len(base))])]
        tokens = tokens + row((rng.randint(1, 10), rng.choice([0, 0, 1, 7, 30])))
        if len(tokens) > 120:
            tokens = row((rng.randint(1, 10), 70))
        what = rng.random()
        if what < 0.1:
            cache.prefill(tokens)
        elif what < 0.2:
            cache.reset()
        elif what < 0.25:
            cache.reset_prefix_cache()
        found.append(assert_found(cache, tokens))
        prompts.append(tokens_of_rows(cache)[0])
    store.check()
    assert {bool(each.num_tokens) for each in found} == {True, False}
    assert store.stats().num_evictions
    assert len({each.stopped.rstrip("0123456789") for each in found}) > 5
    assert any("a window no longer shows" in each.stopped for each in found) == (name == "gemma3")


def test_while_a_call_runs_a_look_finds_the_blocks_that_it_has_committed() -> None:
    cache, seen = PagedPrefixCache(tiny("llama"), block_size=4), []
    prompt = PREFIX[:50]
    look = AtStep(3, lambda: seen.append(cache.lookup(prompt)))
    run(cache.store.model, cache, **batch(prompt), logits_processor=[look])
    assert [found.num_tokens for found in seen] == [48]
    assert cache.lookup(prompt).num_tokens == 50
