"""Models of a process: each gets a store with its first `generate`, each call a cache, and nothing else differs."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, UnsupportedModelError, cache_every_generate
from hf_paged_cache.every_generate import EveryGenerate

from ..reference import IDS, AtStep, assert_same, batch, row, run
from ..tiny_models import build

NEXT = [torch.tensor([row((1, 50), (seed, 9))]) for seed in range(2, 6)]
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"input_ids": IDS},
    "samples": {"input_ids": IDS, "do_sample": True, "num_return_sequences": 3},
    "beams": {"input_ids": IDS, "num_beams": 3},
    "a padded batch": batch(row((1, 50), (2, 9)), row((1, 50)), row((3, 20))),
    "prompt lookup": {"input_ids": IDS, "prompt_lookup_num_tokens": 2},
}


def plainly(model: Any, **call: Any) -> Any:
    """A call on a cache of transformers, which it brings."""
    return run(model, **call, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_what_it_gives_without(every: EveryGenerate, call: str) -> None:
    model = build("llama")
    plain = plainly(model, **CALLS[call])
    for _ in range(2):  # an empty store, and a used one
        assert_same(plain, run(model, **CALLS[call]))
    (found,) = every.counts()
    assert found["num_calls"] == 2
    assert found["reused_tokens"] > 0
    assert found["calls_without_cache"] == {"brought a DynamicCache": 1}


def test_what_is_returned_as_cache_is_the_call_s_own(every: EveryGenerate) -> None:
    model = build("llama")
    first, second = run(model, input_ids=IDS), run(model, input_ids=NEXT[0])
    assert first.past_key_values is not second.past_key_values
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    both = {"input_ids": torch.cat([first.sequences, NEXT[0][:, -3:]], dim=1)}
    again = run(model, **both, past_key_values=first.past_key_values)
    assert_same(plainly(model, **both), again)


def test_calls_that_ask_for_another_cache_run_as_ever_and_are_counted(every: EveryGenerate) -> None:
    model = build("llama")
    plain = run(model, input_ids=IDS, use_cache=False)
    run(model, input_ids=IDS, cache_implementation="static", disable_compile=True)
    (found,) = every.counts()
    assert found["num_calls"] == 0
    assert list(found["calls_without_cache"].values()) == [2]
    with PagedPrefixCache(model) as cache:  # a block of the program's own comes first
        assert_same(plain, run(model, input_ids=IDS))
    assert cache.stats().num_calls == 1
    assert every.counts()[0]["num_calls"] == 0


def test_calls_on_caches_of_the_program_s_own_run_on_them(every: EveryGenerate) -> None:
    model = build("llama")
    early, cache = model.generate, PagedPrefixCache(model)
    for generate in (model.generate, model.generate, early):
        generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, max_new_tokens=6, do_sample=False)
    run(model, input_ids=IDS)
    (found,) = every.counts()
    assert (found["num_calls"], cache.stats().num_calls) == (1, 3)
    assert cache.stats().reused_tokens > 0
    assert found["calls_without_cache"] == {}


@pytest.mark.parametrize("kind", ["mamba", "t5"])
def test_a_model_that_is_refused_runs_as_ever_and_is_counted_with_the_reason(every: EveryGenerate, kind: str) -> None:
    model = build(kind)
    for _ in range(2):
        assert run(model, input_ids=IDS, max_new_tokens=2, decoder_start_token_id=0).sequences.shape[0] == 1
    (found,) = every.counts()
    ((why, number),) = found["calls_without_cache"].items()
    assert number == 2
    assert str(every) == f"{type(model).__name__}: 2 calls without a cache: {why}"


def test_a_generate_that_was_looked_up_before_and_the_class_s_own_get_caches_too(every: EveryGenerate) -> None:
    model = build("llama")
    early = model.generate
    plain = plainly(model, input_ids=IDS).sequences
    mask = torch.ones_like(IDS)
    for generate in (early, early, lambda **given: type(model).generate(model, **given)):
        assert generate(input_ids=IDS, attention_mask=mask, max_new_tokens=6, do_sample=False).equal(plain)
    (found,) = every.counts()
    assert (found["num_calls"], found["reused_tokens"]) == (3, 2 * 48)  # a cache of its own finds whole blocks


def test_a_generate_of_the_model_s_own_runs_once_and_without_a_cache(every: EveryGenerate) -> None:
    calls = []

    class Own(type(build("llama"))):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().generate(*args, **kwargs)

    model = build("llama")
    plain = plainly(model, input_ids=IDS)
    model.__class__ = Own
    assert_same(plain, run(model, input_ids=IDS))
    assert calls == [1]
    assert every.counts()[0]["calls_without_cache"]["Own has a generate of its own"] == 1


def test_a_generate_inside_of_one_and_calls_of_several_threads_at_once(every: EveryGenerate) -> None:
    model = build("llama")
    inner: list[Any] = []
    plain = [plainly(model, input_ids=ids) for ids in (IDS, *NEXT)]
    outer = run(model, input_ids=IDS, logits_processor=[AtStep(2, lambda: inner.append(run(model, input_ids=NEXT[0])))])
    assert_same(plain[0], outer)
    assert_same(plain[1], inner[0])
    with ThreadPoolExecutor(4) as pool:
        for wanted, got in zip(plain[1:], pool.map(lambda ids: run(model, input_ids=ids), NEXT), strict=True):
            assert_same(wanted, got)
    assert every.counts()[0]["num_calls"] == 6


def test_a_model_goes_with_its_store_and_copies_get_stores_of_their_own(every: EveryGenerate) -> None:
    model = build("llama")
    plain = run(model, input_ids=IDS)
    copies: list[PreTrainedModel] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        assert_same(plain, run(each, input_ids=IDS))
    assert [found["reused_tokens"] for found in every.counts()] == [0, 0, 0]
    gone = weakref.ref(model)
    del model, plain
    gc.collect()
    assert gone() is None
    assert [found["num_calls"] for found in every.counts()] == [1, 1, 1]  # counts stay


def test_a_cache_of_the_model_is_on_the_store_of_its_calls(every: EveryGenerate) -> None:
    model = build("llama")
    run(model, input_ids=IDS)
    cache = every.cache_of(model)
    assert cache.lookup(IDS).num_tokens == 48
    with pytest.raises(UnsupportedModelError, match="its scan of several tokens"):
        every.cache_of(build("mamba"))


def test_options_are_those_of_models_that_come_and_bad_ones_change_nothing(every: EveryGenerate) -> None:
    plain = plainly(build("llama"), input_ids=IDS)
    for bad in ({"max_bytes": "much"}, {"cache_salt": ""}):
        with pytest.raises(CacheArgumentError, match=next(iter(bad))):
            cache_every_generate(**bad)  # type: ignore[arg-type]
    assert every.options == {}
    assert cache_every_generate(block_size=4, cache_salt="me") is every
    model = build("llama")
    assert_same(plain, run(model, input_ids=IDS))
    cache = every.cache_of(model)
    assert (cache.store.blocks.block_size, cache.cache_salt) == (4, b"me")


def test_hooks_see_what_they_see_without_and_reuse_goes_on_when_they_are_off(every: EveryGenerate) -> None:
    model = build("llama")
    seen: list[torch.Size] = []
    factor = [1.0]

    def steer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.shape)
        return output * factor[0]

    run(model, input_ids=IDS)
    handle = model.model.layers[0].register_forward_hook(steer)
    for factor[0] in (1.0, -2.0):
        assert_same(plainly(model, input_ids=IDS), run(model, input_ids=IDS))
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
        seen.clear()
    handle.remove()
    run(model, input_ids=IDS)
    (found,) = every.counts()
    assert (found["num_calls"], found["num_bypassed_calls"]) == (4, 2)
    assert found["reused_tokens"] == 48
    assert any(steer.__qualname__ in why for why in found["computed_because"])
    assert "2 calls reused and kept nothing" in str(every)


def test_calls_that_their_caches_refuse_run_without_and_are_counted_with_the_reason(every: EveryGenerate) -> None:
    model = build("llama")
    prompt_learning: Any = type("Wrapper", (), {"prepare": lambda self, *args, **kwargs: prepare(*args, **kwargs)})()
    prompt_learning.active_adapter, prompt_learning.active_peft_config = (
        "soft",
        SimpleNamespace(is_prompt_learning=True),
    )
    prepare, model.prepare_inputs_for_generation = model.prepare_inputs_for_generation, prompt_learning.prepare
    plain = plainly(model, input_ids=IDS)
    for _ in range(3):
        assert_same(plain, run(model, input_ids=IDS))
    without = every.counts()[0]["calls_without_cache"]
    assert [number for why, number in without.items() if "adapter 'soft' is prompt learning" in why] == [3]


def test_the_summary_has_the_words_of_the_docs_and_the_most_frequent_reasons(every: EveryGenerate) -> None:
    assert str(every) == "no generate was called"
    model = build("llama")
    run(model, input_ids=IDS, do_sample=True, num_return_sequences=3)
    run(model, input_ids=NEXT[0])
    first, *others, note = str(every).splitlines()
    tokens = 3 * IDS.shape[1] + NEXT[0].shape[1]
    found = every.counts()[0]
    shared, computed = found["shared_tokens"], found["computed_tokens"]
    assert shared >= 2 * (IDS.shape[1] - 1)
    assert first == (
        f"LlamaForCausalLM: 2 calls, {tokens} prompt tokens: "
        f"{found['reused_tokens']} reused, {shared} shared, {computed} computed"
    )
    assert others
    assert all(line.startswith("  ") and " computed: " in line for line in others)
    assert note == "  N stands for numbers that differ"
