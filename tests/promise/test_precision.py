"""Below fp32, and under autocast: a hit is as near to `DynamicCache` as `DynamicCache` continued from the same prefix.

How often that changes a token is measured on the real model by `benchmarks/precision.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..internals import held_tensors
from ..reference import assert_near, assert_same, batch, row, run, zero_blocks
from ..tiny_models import build

NUM_BLOCKS_KNOWN, NUM_KNOWN = 48, 53  # tokens of the prefix: whole blocks, and one that ends inside a block
PROMPTS = batch(row((1, NUM_KNOWN), (2, 9)), row((3, NUM_KNOWN), (4, 9)), row((5, NUM_KNOWN), (6, 9)))
OTHERS = batch(row((1, NUM_KNOWN), (7, 5)), row((3, NUM_KNOWN), (8, 5)), row((5, NUM_KNOWN), (9, 5)))
IDS = PROMPTS["input_ids"]

# name -> dtype of the weights, of autocast
REGIMES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "autocast bf16": (torch.float32, torch.bfloat16),
    "autocast fp16": (torch.float32, torch.float16),
}


def regime(autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if autocast is None else torch.autocast("cpu", autocast)


@pytest.fixture(params=REGIMES)
def precision(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """(dtype of the weights, the lowest that anything is computed in); autocast is on for the test where it is part."""
    weights, autocast = REGIMES[request.param]
    with regime(autocast):
        yield weights, autocast or weights


def continued(model: PreTrainedModel, num_known: int) -> Any:
    """The recipe: fill a `DynamicCache` with the prefix, then generate."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :num_known], past_key_values=cache, use_cache=True)
    return run(model, cache, **PROMPTS)


def distance(reference: Any, output: Any) -> float:
    """The largest difference of any logit as a share of the largest, in each row as long as its tokens are the same."""
    scale = max(float(step.abs().max()) for step in reference.logits)
    same = torch.ones(len(IDS), dtype=torch.bool)
    largest = 0.0
    for number, (wanted, got) in enumerate(zip(reference.logits, output.logits, strict=True)):
        largest = max(largest, float((got - wanted)[same].abs().max()))
        tokens = [sequences[:, IDS.shape[1] + number] for sequences in (reference.sequences, output.sequences)]
        same &= tokens[0] == tokens[1]
        if not same.any():
            break
    return largest / scale


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_hit_is_as_near_as_dynamic_cache_continued(name: str, precision: tuple[torch.dtype, torch.dtype]) -> None:
    weights, lowest = precision
    model = build(name).to(weights)
    reference = run(model, **PROMPTS)
    for num_known in (NUM_BLOCKS_KNOWN, NUM_KNOWN):
        allowed = max(2 * distance(reference, continued(model, num_known)), torch.finfo(lowest).eps)
        for zeros in (False, True):
            store = PrefixStore(model)
            cache = PagedPrefixCache(store)
            run(model, cache, **OTHERS)
            if num_known == NUM_BLOCKS_KNOWN:  # another cache of the store finds whole blocks only
                cache = PagedPrefixCache(store)
            if zeros:
                zero_blocks(store)
            output = run(model, cache, **PROMPTS)
            assert {each.reused_tokens for each in cache.last_call.rows} == {num_known}
            got = distance(reference, output)
            assert (got > allowed) if zeros else (got <= allowed), (
                f"{got:.1e} of the logits' scale, {allowed:.1e} allowed"
            )


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
def test_keys_and_values_are_held_in_the_models_precision(weights: torch.dtype) -> None:
    model = build("llama").to(weights)
    cache = PagedPrefixCache(model)
    run(model, cache, **PROMPTS)
    for layer in cache.layers:
        assert layer.keys.dtype == layer.values.dtype == weights


@pytest.mark.parametrize("name", ["bf16", "autocast bf16", "fp32"])
def test_verify_allows_for_the_rounding_of_what_was_computed_in(name: str) -> None:
    """Keys under autocast are held in fp32, having been multiplied in bf16; so are those of a model cast later."""
    weights, autocast = REGIMES.get(name, (torch.float32, None))
    model = build("llama")
    store = PrefixStore(model)
    run(model, PagedPrefixCache(store), **PROMPTS)  # makes a pool of float32
    model.to(weights)
    with regime(autocast):
        cache = PagedPrefixCache(store)
        run(model, cache, **PROMPTS)
        for tensor in held_tensors(store):
            assert tensor.dtype == torch.float32
            tensor.mul_(1 + 1e-3)  # more than what rounds in fp32, less than in bf16
        found = cache.verify()
    assert found.num_blocks >= 3
    assert bool(found.differing) == (name == "fp32")


def test_what_autocast_computed_is_reused_under_the_same_autocast_alone() -> None:
    model = build("llama")
    dtypes = (None, torch.bfloat16, torch.float16)
    references = {}
    for dtype in dtypes:
        with regime(dtype):
            references[dtype] = run(model, **PROMPTS)
    for dtype in dtypes[1:]:  # or nothing here could see blocks of the wrong kind
        assert distance(references[None], references[dtype]) > 1e-3
    store = PrefixStore(model)
    for number, dtype in enumerate((None, torch.bfloat16, None, torch.float16, torch.bfloat16, None, torch.float16)):
        cache = PagedPrefixCache(store)
        with regime(dtype):
            output = run(model, cache, **PROMPTS)
        first = number in (0, 1, 3)
        assert cache.last_call.reused_tokens == (0 if first else 3 * NUM_BLOCKS_KNOWN), f"call {number}, {dtype}"
        if dtype is None:
            assert_same(references[None], output)
        else:
            assert distance(references[dtype], output) <= torch.finfo(dtype).eps
    zero_blocks(store)
    cache = PagedPrefixCache(store)
    assert distance(references[None], run(model, cache, **PROMPTS)) > 0.1


@pytest.mark.parametrize("other_cache", [True, False])
def test_rows_that_went_on_under_autocast_leave_nothing_behind_for_calls_without(other_cache: bool) -> None:
    model = build("llama")
    reference = run(model, **PROMPTS)
    store = PrefixStore(model)
    cache = PagedPrefixCache(store)
    with torch.no_grad():
        model(IDS[:, :20], past_key_values=cache)
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS[:, 20:40], past_key_values=cache)
        model(IDS[:, 40:], past_key_values=cache)
    again = PagedPrefixCache(store) if other_cache else cache  # finds whole blocks, or its own rows as well
    output = run(model, again, **PROMPTS)
    assert {each.reused_tokens for each in again.last_call.rows} == {16}  # rows that hold two dtypes lend nothing
    assert_same(reference, output)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("num_blocks", [16, 4])  # the pool keeps all, one row's
def test_rows_go_on_after_autocast_with_what_they_held_before_it(num_blocks: int, name: str) -> None:
    model = build(name)
    outputs = []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model, num_blocks=num_blocks)):
        with torch.no_grad():
            model(IDS[:, :20], past_key_values=cache)
            with torch.autocast("cpu", torch.bfloat16):
                model(IDS[:, 20:40], past_key_values=cache)
            pieces = [model(ids, past_key_values=cache).logits for ids in (IDS[:, 40:50], IDS[:, 50:51])]
        outputs.append(torch.cat(pieces, dim=1))
    assert_near(outputs[1], outputs[0])
