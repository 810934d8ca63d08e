"""`model.generate(..., past_key_values=PagedPrefixCache(model))`: `generate` is looked up before it is attached."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore

from ..reference import AtStep, assert_same, row, run
from ..tiny_models import build

IDS = torch.tensor([row((1, 40)), row((1, 30), (2, 10))])
GIVEN: dict[str, Any] = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 20}
GIVEN["do_sample"] = False
SEEN = {"return_dict_in_generate": True, "output_logits": True}  # as `run` asks for
NAMES = pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
@NAMES
def test_it_gives_the_same_and_the_rows_are_there_for_the_next_turn(name: str, more: dict[str, Any]) -> None:
    model = build(name)
    wanted = run(build(name), **(GIVEN | more))
    torch.manual_seed(0)
    output = model.generate(**(GIVEN | more), **SEEN, past_key_values=PagedPrefixCache(model))
    assert_same(wanted, output)
    cache = output.past_key_values
    assert isinstance(cache, PagedPrefixCache)
    num_rows = len(IDS) * max(more.get("num_beams", 1), more.get("num_return_sequences", 1))
    assert cache.last_call.prompt_tokens == num_rows * IDS.shape[1]
    cache.check()
    turn = {"input_ids": torch.cat([output.sequences[:2], torch.tensor([row((3, 5))] * 2)], 1)}
    assert_same(run(build(name), **turn), run(model, cache, **turn))
    if name != "qwen3_next":  # states of generated tokens are kept at full blocks alone
        assert cache.last_call.reused_tokens >= 2 * 48


def test_what_it_computed_is_found_by_other_caches_of_the_store() -> None:
    model = build("llama")
    store = PrefixStore(model)
    cache = PagedPrefixCache(store)
    model.__dict__["generate"].model = model  # the bracket is there, and the class's own is called past it
    type(model).generate(model, **GIVEN, past_key_values=cache)
    assert_same(run(build("llama"), **GIVEN), run(model, PagedPrefixCache(store), **GIVEN))
    assert store.stats().reused_tokens >= 2 * 32
    store.check()


def test_a_plain_forward_of_another_cache_inside_of_a_generate_is_no_part_of_it() -> None:
    model = build("llama")
    cache, other = PagedPrefixCache(model), PagedPrefixCache(model)

    def forward() -> None:
        with torch.no_grad():
            model(IDS[:1], past_key_values=other)
        assert other.last_call.kind == "forward"

    step = AtStep(2, forward)
    run(model, cache, **GIVEN, logits_processor=[step])
    assert step.countdown < 0
    assert other.last_call.prompt_tokens == IDS.shape[1]


@NAMES
@pytest.mark.parametrize("kept", [lambda model: model.generate, lambda model: partial(type(model).generate, model)])
def test_one_that_was_looked_up_before_begins_each_prompt_anew(name: str, kept: Callable[[Any], Any]) -> None:
    model = build(name)
    generate, cache = kept(model), PagedPrefixCache(model)
    prompts = [row((1, 20)), row((2, 40)), row((1, 20), (3, 60)), row((2, 9))]  # longer than the rows, and shorter
    for prompt in prompts:
        given = GIVEN | {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt)).long()}
        assert_same(run(build(name), **given), generate(**given, **SEEN, past_key_values=cache))
        assert cache.last_call.prompt_tokens == len(prompt)
    cache.check()


def test_one_that_was_looked_up_before_is_refused_new_tokens_alone_and_goes_on_with_the_whole_prompt() -> None:
    model = build("llama")
    generate, cache = model.generate, PagedPrefixCache(model)
    first = generate(**GIVEN, past_key_values=cache)
    turn = torch.cat([first, torch.tensor([row((3, 5))] * 2)], 1)
    mask = torch.ones_like(turn)
    wanted = run(build("llama"), input_ids=turn, attention_mask=mask, max_new_tokens=5)
    given = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **SEEN, "past_key_values": cache}
    with pytest.raises(CacheArgumentError, match="pass the whole prompt"):
        generate(input_ids=turn[:, cache.get_seq_length() :], **given)
    assert_same(wanted, generate(input_ids=turn, **given))


@pytest.mark.parametrize("used", [False, True])
def test_one_that_is_to_use_no_cache_is_refused(used: bool) -> None:
    model = build("llama")
    generate, cache = model.generate, PagedPrefixCache(model)
    if used:
        generate(**GIVEN, past_key_values=cache)
    with pytest.raises(CacheArgumentError, match="pass use_cache=True, or no cache"):
        generate(**GIVEN, use_cache=False, past_key_values=cache)
    assert_same(run(build("llama"), **GIVEN), generate(**GIVEN, **SEEN, past_key_values=cache))
