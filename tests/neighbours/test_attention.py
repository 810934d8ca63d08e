"""Attention implementations and gradient modes of torch, also switched between calls on one cache."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import assert_near, assert_right, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
IDS = torch.tensor([row((1, 50))])


@pytest.fixture
def not_compiled() -> Iterator[None]:
    """Flex attention, which transformers compiles, as torch runs it step by step."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(
    ("name", "implementation"), [*(("llama", each) for each in IMPLEMENTATIONS), ("mistral", "eager")]
)
def test_every_implementation_is_right_and_reuses(name: str, implementation: str) -> None:
    model = build(name)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    cache = PagedPrefixCache(model)
    for seed in (2, 3):
        inputs = batch(row((1, 40), (seed, 8)), row((1, 35)), row((4, 20)))
        assert_right(model, cache, **inputs)
    assert cache.last_call.reused_tokens > 32
    for reused in (32, 49):
        assert_right(model, cache, input_ids=IDS)
        assert cache.last_call.reused_tokens >= reused
    assert_right(model, cache, **inputs, num_beams=2)
    reference = run(model, input_ids=IDS)
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=IDS))


@pytest.mark.usefixtures("not_compiled")
def test_implementations_switched_between_calls_each_find_their_own(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    for turn in range(2):
        for implementation in IMPLEMENTATIONS:
            model.set_attn_implementation(implementation)
            assert_right(model, cache, reused=48 if turn else 0, input_ids=IDS)
    reference = run(model, input_ids=IDS)
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=IDS))


@pytest.mark.slow
def test_compiled_flex_attention_reads_what_is_reused() -> None:
    """As transformers runs it, which on a CPU needs a C++ compiler.

    One kernel is compiled: of a token after a known prompt.
    """
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    cache = PagedPrefixCache(model)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        reference = run(model, cache, input_ids=IDS, max_new_tokens=1)
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=1))
    assert cache.last_call.reused_tokens == 49
    torch._dynamo.reset()


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "gradients": nullcontext,
}


@pytest.mark.parametrize("order", list(permutations(MODES, 2)), ids=" then ".join)
def test_gradient_modes_mixed_between_plain_forwards_of_a_row(
    model: PreTrainedModel, cache: PagedPrefixCache, order: tuple[str, str]
) -> None:
    for _ in range(2):
        theirs = DynamicCache()
        for mode, ids in zip(order, (IDS[:, :30], IDS[:, 30:]), strict=True):
            with MODES[mode]():
                wanted = model(ids, past_key_values=theirs, logits_to_keep=1).logits
                got = model(ids, past_key_values=cache, logits_to_keep=1).logits
            assert_near(got, wanted)
        cache.reset()
    # a forward with gradients is bypassed, and so are those after it
    assert bool(cache.stats().reused_tokens) == (order[0] != "gradients")
