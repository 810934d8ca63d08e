"""A `generate` of the model's class, or put on the model, round transformers'; it may call that several times."""

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache

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
