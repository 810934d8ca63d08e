"""Pinned prefixes stay whatever floods the pool, are counted, never break a running call and can always be unpinned."""

import contextlib
import copy
import gc
import threading
from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, CacheBusyError, PagedPrefixCache, PrefixStore

from ..internals import split_everywhere
from ..reference import AtStep, assert_same, at_once, batch, row, run
from ..tiny_models import build, tiny
from .test_conditions_of_reuse import ROPES

BLOCK_SIZE = 4
NUM_BLOCKS = 33  # 32 that can be had
PREFIX = row((1, 32))  # 8 blocks
MODEL = tiny("llama")


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore(MODEL, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.fixture
def cache(store: PrefixStore) -> PagedPrefixCache:
    return PagedPrefixCache(store)


def ask(cache: PagedPrefixCache, tokens: list[int], **arguments: Any) -> Any:
    """One call that gives what `DynamicCache` gives; its rows are dropped."""
    ids = torch.tensor([tokens])
    output = run(cache.store.model, cache, input_ids=ids, **arguments)
    assert_same(run(cache.store.model, input_ids=ids, **arguments), output)
    cache.reset()
    return output


def flood(cache: PagedPrefixCache, num_prompts: int = 6) -> None:
    """Prompts that nobody asks again, 5 times as many tokens as the pool has slots for beside a prefix."""
    evicted = cache.stats().num_evictions
    for number in range(num_prompts):
        ask(cache, row((100 + number, 60)))
    assert cache.stats().num_evictions > evicted + 2 * NUM_BLOCKS


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_flood_evicts_everything_but_what_is_pinned(cache: PagedPrefixCache, is_pinned: bool) -> None:
    other_prefix = row((2, 32))
    ask(cache, PREFIX + row((3, 5)))
    ask(cache, other_prefix + row((4, 5)))
    if is_pinned:
        assert cache.pin(PREFIX) == 32
    flood(cache)
    ask(cache, other_prefix + row((5, 5)))
    assert cache.last_call.reused_tokens == 0
    ask(cache, PREFIX + row((5, 5)))
    assert cache.last_call.reused_tokens == (32 if is_pinned else 0)
    cache.check()


def test_the_states_at_the_end_of_a_pinned_prefix_stay_whatever_others_compute() -> None:
    cache = PagedPrefixCache(build("lfm2"), block_size=2, num_blocks=25)
    ask(cache, row((1, 8)))
    num_pinned = cache.pin(row((1, 8)))
    for number in range(6):
        ask(cache, row((100 + number, 30)))
    assert cache.lookup(row((1, 8), (3, 5))).num_tokens >= num_pinned > 0
    ask(cache, row((1, 8), (4, 5)))
    assert cache.last_call.reused_tokens >= num_pinned
    cache.unpin()
    cache.check()


def test_whole_blocks_of_what_is_cached_are_pinned_and_nothing_is_computed(cache: PagedPrefixCache) -> None:
    ask(cache, PREFIX, max_new_tokens=1)
    before = cache.stats()
    assert cache.pin(PREFIX[:15]) == 12
    assert cache.pin(PREFIX + row((3, 5))) == 32
    assert cache.pin(PREFIX[:8] + row((3, 5))) == 8
    after = cache.stats()
    assert (after.computed_tokens, after.num_calls) == (before.computed_tokens, before.num_calls)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_pin_of_nothing_is_refused_and_says_what_to_do(cache: PagedPrefixCache, is_used: bool) -> None:
    if is_used:
        ask(cache, PREFIX)
        cache.pin(PREFIX)
    before = cache.store.stats()
    with pytest.raises(CacheArgumentError, match=r"nothing of this prefix of 10 tokens is cached .* prefill"):
        cache.pin(row((3, 10)))
    for nothing, said in (
        ([], "is empty"),
        ([128], r"has token 128; the vocabulary has ids 0 to 127$"),
        ({1}, "of type set"),
    ):
        with pytest.raises(CacheArgumentError, match=f"the prefix .*{said}|the prefix {said}"):
            cache.pin(nothing)  # type: ignore[arg-type]
    for short in ([1], row((1, 3))):
        with pytest.raises(CacheArgumentError, match=rf"the prefix has {len(short)} tokens?, fewer than a block of 4"):
            cache.pin(short)
    assert cache.store.stats() == before
    cache.prefill(row((3, 10)))
    assert cache.pin(row((3, 10))) == 8


def test_tokens_pinned_twice_count_once_and_blocks_of_two_pins_stay_until_both_are_given_back(
    cache: PagedPrefixCache,
) -> None:
    ask(cache, PREFIX)
    for _ in range(2):
        assert cache.pin(PREFIX) == 32
    assert cache.pin(PREFIX[:20]) == 20
    assert cache.stats().num_pinned_blocks == 8
    assert cache.unpin(PREFIX) == 32
    assert cache.stats().num_pinned_blocks == 5
    assert cache.unpin(PREFIX) == 0
    assert cache.unpin(PREFIX[:20]) == 20
    assert cache.stats().num_pinned_blocks == cache.stats().num_blocks_in_use == 0


@pytest.mark.parametrize("num_blocks", [13, 40])
def test_right_after_a_call_its_prompt_can_be_pinned_however_full_the_pool_is(num_blocks: int) -> None:
    """What it has kept takes all blocks of a pool of 13: a pin of these takes none more."""
    cache = PagedPrefixCache(MODEL, block_size=BLOCK_SIZE, num_blocks=num_blocks)
    num_new = 1 + 4 * (min(num_blocks, 13) - 1) - 32  # of the last token nothing is held
    output = run(MODEL, cache, input_ids=torch.tensor([PREFIX]), max_new_tokens=num_new)
    assert cache.stats().num_free_blocks == max(0, num_blocks - 13)
    assert cache.pin(PREFIX) == 32
    assert cache.pin(output.sequences[0]) == 4 * (min(num_blocks, 13) - 1)
    cache.reset()
    assert cache.stats().num_pinned_blocks == min(num_blocks, 13) - 1
    cache.unpin(output.sequences[0])
    ask(cache, PREFIX + row((3, 5)), max_new_tokens=2)
    assert cache.last_call.reused_tokens == 32
    cache.check()


def test_what_a_running_call_reads_can_be_pinned_beside_it_and_stays(store: PrefixStore) -> None:
    """What the call keeps would take all 32 blocks."""
    others = PagedPrefixCache(store)
    ask(others, PREFIX)
    pinned: list[int] = []
    step = AtStep(1, lambda: pinned.append(PagedPrefixCache(store).pin(PREFIX)))
    given = {"input_ids": torch.tensor([PREFIX]), "max_new_tokens": 97}
    output = run(MODEL, others, **given, logits_processor=[step])
    assert_same(run(MODEL, **given), output)
    assert pinned == [32]
    others.reset()
    flood(others)
    assert others.stats().num_pinned_blocks == 8
    ask(others, PREFIX + row((3, 5)))
    assert others.last_call.reused_tokens == 32
    others.check()


def test_pinning_again_takes_what_has_been_computed_since(cache: PagedPrefixCache) -> None:
    ask(cache, PREFIX[:16], max_new_tokens=1)
    assert cache.pin(PREFIX) == 16
    ask(cache, PREFIX, max_new_tokens=1)
    assert cache.pin(PREFIX) == 32
    assert cache.unpin() == 32
    assert cache.stats().num_blocks_in_use == 0


def test_without_tokens_all_pins_of_the_salt_are_given_back_and_no_others(store: PrefixStore) -> None:
    caches = {salt: PagedPrefixCache(store, cache_salt=salt) for salt in ("a", "b")}
    for salt, cache in caches.items():
        ask(cache, PREFIX)
        assert cache.pin(PREFIX) == cache.pin([*PREFIX, 5]) == 32, salt
    assert caches["a"].stats().num_pinned_blocks == 8
    with pytest.raises(CacheArgumentError):
        PagedPrefixCache(store).pin(PREFIX)  # without a salt nothing was computed
    assert PagedPrefixCache(store).unpin() == 0
    assert caches["a"].unpin() == 64
    assert caches["b"].stats().num_pinned_blocks == 8
    assert caches["b"].unpin(PREFIX) == 32
    assert caches["b"].unpin() == 32
    assert caches["b"].stats().num_pinned_blocks == 0


@pytest.mark.usefixtures("switching")
def test_pins_from_other_threads_disturb_no_call(store: PrefixStore) -> None:
    prompts, is_over = [PREFIX[:length] for length in range(4, 33, 4)], threading.Event()

    def pin_and_unpin() -> None:
        pinner, number = PagedPrefixCache(store), 0
        while not is_over.is_set():
            number += 1
            with contextlib.suppress(CacheArgumentError):  # nothing of it is cached yet
                pinner.pin(prompts[number % len(prompts)])
            if number % 3 == 0:
                pinner.unpin(prompts[number * 5 % len(prompts)])
            if number % 50 == 0:
                pinner.unpin()

    def call() -> None:
        cache = PagedPrefixCache(store)
        try:
            for number in range(8):
                ask(cache, prompts[number % len(prompts)] + row((number, 3)))
                cache.check()
        finally:
            is_over.set()

    at_once(call, pin_and_unpin)
    PagedPrefixCache(store).unpin()
    assert store.stats().num_blocks_in_use == 0


def test_a_reset_drops_pins_with_everything_else(cache: PagedPrefixCache) -> None:
    ask(cache, PREFIX)
    cache.pin(PREFIX)
    cache.reset()
    assert cache.stats().num_pinned_blocks == 8
    cache.reset_prefix_cache()
    stats = cache.stats()
    assert (stats.num_pinned_blocks, stats.num_free_blocks) == (0, NUM_BLOCKS - 1)
    assert cache.unpin(PREFIX) == 0
    ask(cache, PREFIX)
    assert cache.last_call.reused_tokens == 0


@pytest.mark.parametrize("salt", [None, "alice"])
def test_a_reset_while_a_call_shares_a_pinned_prefix_is_refused_and_changes_nothing(
    salt: str | None, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_everywhere(monkeypatch)
    cache = PagedPrefixCache(store, cache_salt=salt)
    ask(cache, PREFIX)
    cache.pin(PREFIX)
    rows, refused = batch(PREFIX + row((3, 3)), PREFIX + row((4, 3))), []

    def reset() -> None:
        for act in (store.reset_prefix_cache, cache.reset_prefix_cache):
            with pytest.raises(CacheBusyError) as told:
                act()
            refused.append(told.value)

    assert_same(run(MODEL, **rows), run(MODEL, cache, **rows, logits_processor=[AtStep(1, reset)]))
    assert len(refused) == 2
    assert cache.stats().num_pinned_blocks == 8
    cache.reset()
    cache.reset_prefix_cache()
    assert cache.lookup(PREFIX).num_tokens == 0


def test_when_the_model_changes_pins_are_not_found_and_can_be_given_back_or_renewed() -> None:
    model = build("llama", seed=3)
    cache = PagedPrefixCache(model, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    ask(cache, PREFIX)
    ask(cache, row((2, 16)))
    assert (cache.pin(PREFIX), cache.pin(row((2, 16)))) == (32, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    ask(cache, PREFIX)
    assert cache.last_call.reused_tokens == 0
    assert cache.stats().num_pinned_blocks == 12
    assert cache.pin(PREFIX) == 32  # the new blocks in place of the old
    assert cache.stats().num_pinned_blocks == 12
    ask(cache, PREFIX)
    assert cache.last_call.reused_tokens == 31
    with pytest.raises(CacheArgumentError, match="nothing of this prefix"):
        cache.pin(row((2, 16)))
    assert cache.stats().num_pinned_blocks == 12  # what was pinned stays so
    assert cache.unpin(row((2, 16))) == 16
    assert cache.stats().num_pinned_blocks == 8
    assert cache.unpin() == 32
    assert cache.stats().num_blocks_in_use == 0
    cache.check()


def test_a_pin_outlives_its_cache_and_is_given_back_through_any_other(store: PrefixStore) -> None:
    cache = PagedPrefixCache(store)
    ask(cache, PREFIX)
    assert cache.pin(PREFIX) == 32
    copied = copy.deepcopy(cache)
    del cache
    gc.collect()
    assert copied.stats().num_pinned_blocks == 8
    assert PagedPrefixCache(store).unpin(PREFIX) == 32
    assert copied.stats().num_blocks_in_use == 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_of_layers_with_a_state_only_what_a_prompt_can_resume_from_is_pinned(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model, block_size=BLOCK_SIZE)
    prompt = row((1, 150))
    run(model, cache, input_ids=torch.tensor([prompt]))
    cache.reset()
    for length in (150, 147, 70, 66, 20, 5):
        known = cache.lookup([*prompt[:length], 3]).num_tokens
        if known:
            assert cache.pin(prompt[:length]) == known
        else:
            with pytest.raises(CacheArgumentError, match="no prompt can resume within them"):
                cache.pin(prompt[:length])
            cache.check()


def test_a_pin_leaves_frequencies_that_depend_on_length_as_they_are() -> None:
    model = build("llama", rope_parameters=ROPES["dynamic"], max_position_embeddings=64)
    cache = PagedPrefixCache(model, block_size=BLOCK_SIZE, num_blocks=200)

    def ask(tokens: list[int]) -> None:
        ids = torch.tensor([tokens])
        reference = run(copy.deepcopy(model), input_ids=ids)  # dynamic frequencies stay at the longest prompt so far
        assert_same(reference, run(model, cache, input_ids=ids))
        cache.reset()

    ask(PREFIX)
    assert cache.pin(PREFIX) == 32
    for length in (90, 40):  # beyond the 64 positions at which frequencies change, and below
        ask(row((1, length)))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for tokens in (PREFIX, row((1, 100)), row((1, 120)), PREFIX):
            # nothing of it is cached under the frequencies that it would have
            with contextlib.suppress(CacheArgumentError):
                cache.pin(tokens)
            assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        ask(row((1, 95)))
    ask(PREFIX + row((5, 5)))
    assert cache.last_call.reused_tokens == 32
