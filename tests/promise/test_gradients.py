"""Gradients through a cached forward are those that a `DynamicCache` gives, also through what earlier ones computed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import ForwardMismatchError, PagedPrefixCache

from ..reference import row
from ..tiny_models import build

IDS = torch.tensor([row((1, 40)), row((2, 40))])


def gradient(
    model: PreTrainedModel, cache: Any, script: Callable[[PreTrainedModel, Any], torch.Tensor]
) -> torch.Tensor:
    """All gradients of one number that a script computes, one after the other."""
    model.zero_grad()
    script(model, cache).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def forward(model: PreTrainedModel, cache: Any, start: int, stop: int, ids: torch.Tensor = IDS) -> torch.Tensor:
    logits: torch.Tensor = model(ids[:, start:stop], past_key_values=cache).logits
    return logits.logsumexp(-1).sum()


def in_two(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    forward(model, cache, 0, 25)
    return forward(model, cache, 25, 40)


def without_gradients_first(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        forward(model, cache, 0, 10)
    forward(model, cache, 10, 25)
    return forward(model, cache, 25, 40)


def a_draft_without_gradients_taken_back(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    forward(model, cache, 0, 10)
    cache.activate_past_recording()
    with torch.no_grad():
        forward(model, cache, 10, 25)
        cache.crop(-15)
    return forward(model, cache, 10, 40)


def multiplied(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    forward(model, cache, 0, 25)
    cache.batch_repeat_interleave(2)
    return forward(model, cache, 25, 40, IDS[[0, 1, 0, 1]])


SCRIPTS = (in_two, without_gradients_first, a_draft_without_gradients_taken_back, multiplied)


@pytest.mark.parametrize(
    "settings", [{"name": "llama"}, {"name": "gemma3", "sliding_window": 9}], ids=["llama", "gemma3"]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_gradients_are_those_of_a_dynamic_cache(script: Any, settings: Any) -> None:
    model = build(**settings)
    wanted = gradient(model, DynamicCache(config=model.config), script)
    cache = PagedPrefixCache(model)
    torch.testing.assert_close(gradient(model, cache, script), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    cache.reset()
    cache.check()


@pytest.mark.parametrize("trained", ["all", "queries", "a hook's tensor"])
def test_a_known_prompt_gives_the_gradients_of_an_unknown_one(trained: str) -> None:
    """With one logit kept, only the last token would run; gradients flow through all of them."""
    model = build("llama")
    steering = torch.zeros(64, requires_grad=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or (trained == "queries" and "q_proj" in name))
    if trained == "a hook's tensor":
        model.model.layers[0].register_forward_hook(lambda module, args, output: output + steering)
    cache = PagedPrefixCache(model, trust_hooks=True)

    def script(cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(IDS, past_key_values=cache, logits_to_keep=1).logits
        inputs = [steering] if trained == "a hook's tensor" else [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(logits.pow(2).sum(), inputs, allow_unused=True)
        return torch.cat([grad.flatten() for grad in grads if grad is not None])

    wanted = script(None)
    for _ in range(2):
        got = script(cache)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        cache.reset()
    assert "gradients are on" in cache.last_call.rows[0].stopped


def test_a_forward_that_fails_takes_no_gradient_of_those_before_it_along() -> None:
    model = build("llama")

    def script(model: PreTrainedModel, cache: Any) -> torch.Tensor:
        forward(model, cache, 0, 25)
        if isinstance(cache, PagedPrefixCache):
            handle = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                forward(model, cache, 25, 30)
            handle.remove()
            with pytest.raises(ForwardMismatchError, match="a forward died in the middle of it"):
                forward(model, cache, 25, 40)
            cache.reset()
            forward(model, cache, 0, 25)
        return forward(model, cache, 25, 40)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    wanted = gradient(model, DynamicCache(config=model.config), script)
    got = gradient(model, PagedPrefixCache(model), script)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_rows_that_a_gradient_flows_through_are_not_copied() -> None:
    """Nor can a `DynamicCache` be: torch copies no tensor with a graph."""
    model = build("llama")
    cache, theirs = PagedPrefixCache(model), DynamicCache(config=model.config)
    for each in (cache, theirs):
        forward(model, each, 0, 25)
        with pytest.raises(RuntimeError):
            copy.deepcopy(each)
    with torch.no_grad():
        forward(model, cache, 25, 30)
    assert copy.deepcopy(cache).get_seq_length() == 30
