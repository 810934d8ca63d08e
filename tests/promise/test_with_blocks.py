"""`with cache:`: calls of `generate` that bring no cache run on it, here or in all threads, and nothing else does."""

import asyncio
import contextvars
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import CacheBusyError, PagedPrefixCache, PrefixStore

from ..internals import ran_on
from ..reference import IDS, AtStep, assert_same, at_once, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("switching")


def questions(*seeds: int) -> list[torch.Tensor]:
    return [torch.tensor([row((1, 50), (seed, 6))]) for seed in seeds]


def num_in_use(cache: PagedPrefixCache) -> int:
    cache.check()
    return cache.stats().num_blocks_in_use


def test_calls_inside_the_block_run_on_the_cache_and_those_outside_do_not(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    references = [run(model, input_ids=ids) for ids in questions(2, 3, 4)]
    with cache as entered:
        assert entered is cache
        for number, (ids, reference) in enumerate(zip(questions(2, 3, 4), references, strict=True)):
            output = run(model, input_ids=ids)
            assert ran_on(output, cache)
            assert_same(reference, output)
            assert cache.last_call.reused_tokens == (50 if number else 0)
        assert num_in_use(cache) == 0  # rows of a call are its own
    assert num_in_use(cache) == 0
    assert cache.stats().num_cached_blocks > 0
    num_calls = cache.stats().num_calls
    assert not ran_on(run(model, input_ids=IDS), cache)
    assert cache.stats().num_calls == num_calls


def test_a_mask_of_more_columns_than_ids_does_not_resume_rows_that_the_call_was_not_passed(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    new = {"input_ids": torch.tensor([row((7, 4))]), "attention_mask": torch.ones(1, 27, dtype=torch.long)}
    reference = run(model, **new)
    with cache:
        run(model, input_ids=torch.tensor([row((1, 18))]))
        assert cache.get_seq_length() == 23  # the mask would fit
        assert_same(reference, run(model, **new))


def test_blocks_nest_may_end_in_any_order_and_a_cache_given_by_hand_wins(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    inner, by_hand = PagedPrefixCache(model), PagedPrefixCache(model)
    with cache:
        assert ran_on(run(model, input_ids=IDS), cache)
        with inner:
            assert ran_on(run(model, input_ids=IDS), inner)
            with cache:
                assert ran_on(run(model, input_ids=IDS), cache)
            assert ran_on(run(model, by_hand, input_ids=IDS), by_hand)
            assert ran_on(run(model, input_ids=IDS), inner)
        assert ran_on(run(model, input_ids=IDS), cache)
        inner.__enter__()
    assert ran_on(run(model, input_ids=IDS), inner)
    inner.__exit__(None, None, None)
    output = run(model, input_ids=IDS)
    assert not ran_on(output, cache)
    assert not ran_on(output, inner)


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("option", [{"cache_implementation": "dynamic"}, {"use_cache": False}])
def test_a_call_that_asks_for_another_cache_or_none_gets_it(
    model: PreTrainedModel, cache: PagedPrefixCache, option: dict[str, Any], in_config: bool
) -> None:
    reference = run(model, input_ids=IDS)
    arguments: dict[str, Any] = option
    if in_config:
        config = model.generation_config.from_dict({**model.generation_config.to_dict(), **option})
        arguments = {"generation_config": config}
    with cache:
        output = run(model, input_ids=IDS, **arguments)
    assert_same(reference, output)
    assert not ran_on(output, cache)
    assert cache.stats().num_calls == 0


def test_an_assistant_s_calls_do_not_run_on_the_cache_of_the_model_it_drafts_for(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    assistant = build("llama", num_hidden_layers=1)
    assistants = PagedPrefixCache(assistant)
    reference = run(model, input_ids=IDS, assistant_model=assistant)
    with cache, assistants:
        for _ in range(2):
            assert_same(reference, run(model, input_ids=IDS, assistant_model=assistant))
        assert cache.last_call.reused_tokens == 49
    assert assistants.stats().num_calls == 0
    early = run(model, input_ids=IDS, assistant_early_exit=1)
    with cache:
        assert_same(early, run(model, input_ids=IDS, assistant_early_exit=1))


def test_only_the_block_s_model_runs_on_the_cache(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    other = build("llama", seed=1)
    PagedPrefixCache(other)
    reference = run(other, input_ids=IDS)
    with cache:
        output = run(other, input_ids=IDS)
    assert_same(reference, output)
    assert not isinstance(output.past_key_values, PagedPrefixCache)


def test_a_block_holds_its_cache_and_the_model_holds_it_no_longer_after(model: PreTrainedModel) -> None:
    with PagedPrefixCache(model) as cache:
        run(model, input_ids=IDS)
        store = cache.store
        held = weakref.ref(cache)
        del cache
        gc.collect()
        assert held() is not None
    gc.collect()
    assert held() is None
    assert store.stats().num_blocks_in_use == 0


def test_an_interrupted_entry_holds_no_cache_for_ever(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model)
    cache.__enter__()
    assert ran_on(run(model, input_ids=IDS), cache)
    del cache
    gc.collect()
    assert not isinstance(run(model, input_ids=IDS).past_key_values, PagedPrefixCache)


def tenants(model: PreTrainedModel) -> list[PagedPrefixCache]:
    store = PrefixStore(model)
    return [PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob")]


def test_tenants_of_asyncio_tasks_never_meet_and_to_thread_takes_the_block_along(model: PreTrainedModel) -> None:
    caches, prompts = tenants(model), questions(2, 2)
    reference = run(model, input_ids=prompts[0])

    async def serve(number: int, both: asyncio.Barrier) -> None:
        for turn in range(2):
            await both.wait()
            with caches[number] as cache:
                await both.wait()
                output = run(model, input_ids=prompts[number])
                assert ran_on(output, cache)
                assert_same(reference, output)
                assert cache.last_call.reused_tokens == (48 if turn else 0)
                del output
                await both.wait()
                output = await asyncio.to_thread(run, model, input_ids=prompts[number])
                assert ran_on(output, cache)
                assert_same(reference, output)
                task = asyncio.create_task(asyncio.to_thread(run, model, input_ids=prompts[number]))
                assert ran_on((await task), cache)

    async def main() -> None:
        both = asyncio.Barrier(2)
        await asyncio.gather(serve(0, both), serve(1, both))

    asyncio.run(main())


def test_another_thread_s_calls_are_its_own_and_a_context_that_a_block_started_ends_with_it(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    with cache:
        output = at_once(lambda: run(model, input_ids=IDS))[0]
        assert not isinstance(output.past_key_values, PagedPrefixCache)
        assert cache.stats().num_calls == 0
        context = contextvars.copy_context()
        assert ran_on(context.run(run, model, input_ids=IDS), cache)
    assert not ran_on(context.run(run, model, input_ids=IDS), cache)


def test_in_all_threads_every_call_without_a_cache_runs_on_it(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    reference = run(model, input_ids=IDS)
    with cache.in_all_threads() as entered:
        assert entered is cache
        for number in range(2):
            output = at_once(lambda: run(model, input_ids=IDS))[0]
            assert ran_on(output, cache)
            assert_same(reference, output)
            assert cache.last_call.reused_tokens == (49 if number else 0)
        assert ran_on(run(model, input_ids=IDS), cache)
    assert num_in_use(cache) == 0
    assert not ran_on(at_once(lambda: run(model, input_ids=IDS))[0], cache)


def test_a_thread_s_own_block_comes_before_the_one_of_all_threads(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    own = PagedPrefixCache(model)

    def inside_its_own_block() -> tuple[Any, Any]:
        with own:
            inside = run(model, input_ids=IDS)
        return inside, run(model, input_ids=IDS)

    with cache.in_all_threads():
        for inside, after in (*at_once(inside_its_own_block), inside_its_own_block()):
            assert ran_on(inside, own)
            assert ran_on(after, cache)
    with own, cache.in_all_threads():
        assert ran_on(run(model, input_ids=IDS), cache)


def test_a_second_cache_in_all_threads_is_refused_and_changes_nothing(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    second, other = PagedPrefixCache(model), PagedPrefixCache(build("llama", seed=1))
    with cache.in_all_threads():
        with pytest.raises(CacheBusyError, match="another cache is this model's in all threads"):
            second.in_all_threads().__enter__()
        with cache.in_all_threads(), other.in_all_threads():
            pass
        assert ran_on(at_once(lambda: run(model, input_ids=IDS))[0], cache)
    with second.in_all_threads():
        assert ran_on(at_once(lambda: run(model, input_ids=IDS))[0], second)


def test_a_generator_closed_in_another_thread_closes_a_block(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    def stream() -> Iterator[Any]:
        with cache:
            yield run(model, input_ids=IDS)

    streamed = stream()
    assert ran_on(next(streamed), cache)
    assert ran_on(run(model, input_ids=IDS), cache)  # a generator holds its block open for its caller, too
    with ThreadPoolExecutor(1) as pool:  # whose thread has a block of the same cache open, entered last
        pool.submit(cache.__enter__).result(timeout=60)
        pool.submit(at_once, streamed.close).result(timeout=60)
        pool.submit(cache.__exit__, None, None, None).result(timeout=60)
        assert not ran_on(run(model, input_ids=IDS), cache)
        assert not ran_on(pool.submit(run, model, input_ids=IDS).result(timeout=60), cache)


def test_a_model_copied_inside_a_block_takes_no_cache_along(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    with cache, cache.in_all_threads():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for copied in copies:
            assert not isinstance(run(copied, input_ids=IDS).past_key_values, PagedPrefixCache)
            with PagedPrefixCache(copied) as own:
                assert ran_on(run(copied, input_ids=IDS), own)
        assert ran_on(run(model, input_ids=IDS), cache)


def test_detached_inside_a_block_calls_run_without_a_cache_until_another_attaches(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    with cache:
        cache.detach()
        assert not ran_on(run(model, input_ids=IDS), cache)
        with cache:
            assert ran_on(run(model, input_ids=IDS), cache)
        assert ran_on(run(model, input_ids=IDS), cache)
    assert not ran_on(run(model, input_ids=IDS), cache)


def test_a_block_holds_no_model(cache: PagedPrefixCache) -> None:
    model = build("llama", seed=1)
    held = weakref.ref(model)
    with PagedPrefixCache(model):
        run(model, input_ids=IDS)
    del model
    gc.collect()
    assert held() is None


def test_a_block_that_ends_inside_a_call_on_its_cache_leaves_that_its_rows(model: PreTrainedModel) -> None:
    """A tool that is called back with a block of its own; and an abandoned generator that the collector finds."""
    cache, inner = PagedPrefixCache(model, block_size=4), torch.tensor([row((5, 20))])
    wanted, wanted_inside = run(model, input_ids=IDS), run(model, input_ids=inner)
    inside: list[Any] = []

    def tool() -> None:
        with cache:
            inside.append(run(model, input_ids=inner))
        with cache.in_all_threads():
            pass

    for step in (1, 2, 4):
        with cache:
            assert_same(wanted, run(model, input_ids=IDS, logits_processor=[AtStep(step, tool)]))
        assert_same(wanted_inside, inside.pop())

    def abandoned() -> Iterator[None]:
        with cache:
            yield

    held = abandoned()
    next(held)
    assert_same(wanted, run(model, cache, input_ids=IDS, logits_processor=[AtStep(3, held.close)]))
    cache.reset()
    cache.check()
    assert cache.stats().num_blocks_in_use == 0
