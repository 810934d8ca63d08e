"""A `generate` of the model's class, put on the model, or looked up before; one may call another."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore

from ..internals import reused_of_chunks
from ..reference import AtStep, assert_same, row, run
from ..tiny_models import build

IDS = torch.tensor([row((1, 50))])
LONGER = torch.tensor([row((2, 90))])
NAMES = pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
Generate = Callable[..., Any]


def prompt(ids: Any) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def twice(generate: Generate, given: dict[str, Any]) -> list[Any]:
    return [generate(**given), generate(**given)]


def another(generate: Generate, given: dict[str, Any]) -> list[Any]:
    """The second prompt is longer than what the first has left, and has nothing of it."""
    return [generate(**given), generate(**{**given, **prompt(LONGER)})]


def edited(generate: Generate, given: dict[str, Any]) -> list[Any]:
    """The second goes on after the first, of which one token is another."""
    first = generate(**given)
    ids = torch.cat([first.sequences, torch.tensor([[9, 9]])], 1)
    ids[0, 10] = 5
    return [first, generate(**{**given, **prompt(ids)})]


def wrapped(model: PreTrainedModel, calls: Callable[..., list[Any]], how: str) -> None:
    plain = type(model).generate
    if how == "its class":
        own = {"generate": lambda self, **given: calls(MethodType(plain, self), given)}
        model.__class__ = type("Own", (type(model),), own)
    else:
        model.generate = lambda **given: calls(MethodType(plain, model), given)


@pytest.mark.parametrize(
    ("name", "how", "is_passed"),
    [
        *(("llama", how, is_passed) for how in ("its class", "the instance") for is_passed in (False, True)),
        ("gemma3", "its class", True),
        ("qwen3_next", "its class", True),
    ],
)
@pytest.mark.parametrize("calls", [twice, another, edited])
def test_each_generate_that_it_calls_begins_anew(name: str, how: str, is_passed: bool, calls: Any) -> None:
    plain, model = build(name), build(name)
    wrapped(plain, calls, how)
    wrapped(model, calls, how)
    cache = PagedPrefixCache(model)
    for _ in range(2):
        with nullcontext() if is_passed else cache:
            outputs = run(model, cache if is_passed else None, input_ids=IDS)
        for wanted, output in zip(run(plain, input_ids=IDS), outputs, strict=True):
            assert_same(wanted, output)
    if name != "qwen3_next" or calls is another:
        assert cache.last_call.reused_tokens >= 48
    cache.reset()
    cache.check()
    assert cache.store.blocks.allocator.num_blocks_in_use == 0


@NAMES
def test_prompts_in_chunks_are_right_and_reused_within_the_first(name: str) -> None:
    plain, model = build(name), build(name)
    for each in (plain, model):
        wrapped(each, twice, "its class")
    cache = PagedPrefixCache(model)
    for _ in range(2):
        outputs = run(model, cache, input_ids=LONGER, prefill_chunk_size=16)
    for wanted, output in zip(run(plain, input_ids=LONGER, prefill_chunk_size=16), outputs, strict=True):
        assert_same(wanted, output)
    assert cache.last_call.reused_tokens == (0 if name == "qwen3_next" else reused_of_chunks(15))


def test_what_it_has_run_by_itself_is_gone_on_with() -> None:
    """As with `DynamicCache`: the prompt's first part by a forward, then `generate` on its rows."""

    def begins(generate: Generate, given: dict[str, Any]) -> Any:
        model = generate.__self__  # type: ignore[attr-defined]
        with torch.no_grad():
            model(given["input_ids"][:, :40] + 1, past_key_values=given["past_key_values"])
        return generate(**given)

    plain, model = build("llama"), build("llama")
    for each in (plain, model):
        wrapped(each, begins, "its class")
    cache = PagedPrefixCache(model)
    for _ in range(2):
        wanted = run(plain, DynamicCache(config=plain.config), input_ids=IDS)  # type: ignore[arg-type]
        assert_same(wanted, run(model, cache, input_ids=IDS))


def test_while_one_runs_other_calls_on_the_cache_are_right() -> None:
    model, seen = build("llama"), []
    wrapped(model, twice, "its class")
    cache = PagedPrefixCache(model)
    step = AtStep(3, lambda: seen.append(run(model, cache, input_ids=LONGER)))
    outputs = run(model, cache, input_ids=IDS, logits_processor=[step])
    for wanted, output in zip(run(model, input_ids=IDS), outputs, strict=True):
        assert_same(wanted, output)
    for wanted, output in zip(run(model, input_ids=LONGER), seen[0], strict=True):
        assert_same(wanted, output)


def test_new_tokens_alone_are_refused_within() -> None:
    def goes_on(generate: Generate, given: dict[str, Any]) -> Any:
        first = generate(**given).sequences
        turn = torch.cat([first, torch.tensor([[9, 9]])], 1)
        return generate(**{**given, "input_ids": turn[:, -3:], "attention_mask": torch.ones_like(turn)})

    model = build("llama")
    wrapped(model, goes_on, "its class")
    with pytest.raises(CacheArgumentError, match="pass the whole prompt"):
        run(model, PagedPrefixCache(model), input_ids=IDS)


def test_one_that_takes_no_cache_runs_without() -> None:
    class Own(type(build("llama"))):  # type: ignore[misc]
        def generate(self, ids: Any, max_new_tokens: int) -> Any:
            return run(build("llama"), input_ids=ids, max_new_tokens=max_new_tokens)

    model = build("llama")
    model.__class__ = Own
    cache = PagedPrefixCache(model)
    with cache:
        assert_same(run(build("llama"), input_ids=IDS), model.generate(IDS, 6))
    with pytest.raises(TypeError, match="unexpected keyword argument 'past_key_values'"):
        model.generate(IDS, 6, past_key_values=cache)


PAIR = torch.tensor([row((1, 40)), row((1, 30), (2, 10))])
GIVEN: dict[str, Any] = {"input_ids": PAIR, "attention_mask": torch.ones_like(PAIR), "max_new_tokens": 20}
GIVEN["do_sample"] = False
SEEN = {"return_dict_in_generate": True, "output_logits": True}  # as `run` asks for


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
    num_rows = len(PAIR) * max(more.get("num_beams", 1), more.get("num_return_sequences", 1))
    assert cache.last_call.prompt_tokens == num_rows * PAIR.shape[1]
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
            model(PAIR[:1], past_key_values=other)
        assert other.last_call.kind == "forward"

    step = AtStep(2, forward)
    run(model, cache, **GIVEN, logits_processor=[step])
    assert step.countdown < 0
    assert other.last_call.prompt_tokens == PAIR.shape[1]


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
