"""Weights that change between calls, by every way to change them and as little as one value, against `DynamicCache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import IDS, PROMPT, assert_same, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = (
    "model.embed_tokens",
    *(f"model.layers.0.{name}" for name in ("input_layernorm", "self_attn.k_proj", "mlp.up_proj")),
)


def in_place(module: Any, change: Tensor) -> None:
    with torch.no_grad():
        changed = change.nonzero(as_tuple=True)
        module.weight[changed] += change[changed]


def in_inference_mode(module: Any, change: Tensor) -> None:
    with torch.inference_mode():
        module.weight.add_(change)


def copied(module: Any, change: Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(module.weight + change)


def loaded(module: Any, change: Tensor) -> None:
    module.load_state_dict({"weight": module.weight.detach() + change})


def assigned(module: Any, change: Tensor) -> None:
    module.load_state_dict({"weight": module.weight.detach() + change}, assign=True)


def replaced(module: Any, change: Tensor) -> None:
    module.weight = nn.Parameter(module.weight.detach() + change)


def other_data(module: Any, change: Tensor) -> None:
    module.weight.data = module.weight.data + change


def step(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Any, Tensor], None]:
    """A step on gradients that are zero where nothing is to change."""

    def change_by(module: Any, change: Tensor) -> None:
        module.weight.grad = -change.sign()
        make([module.weight], lr=float(change.abs().max()), **options).step()
        module.weight.grad = None

    return change_by


WAYS: dict[str, Callable[[Any, Tensor], None]] = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "copy_": copied,
    "load_state_dict": loaded,
    "load_state_dict, assign=True": assigned,
    "another parameter": replaced,
    "p.data = ...": other_data,
    "SGD": step(torch.optim.SGD, foreach=False),
    "SGD, foreach": step(torch.optim.SGD, foreach=True),
    "SGD, fused": step(torch.optim.SGD, fused=True),
    "Adam": step(torch.optim.Adam, foreach=False),
    "AdamW, foreach": step(torch.optim.AdamW, foreach=True, weight_decay=0.0),
    "AdamW, fused": step(torch.optim.AdamW, fused=True, weight_decay=0.0),
}


def some_change(weight: Tensor, extent: str, place: int) -> Tensor:
    """What is added to a weight: everywhere, in one row, which in an embedding is that of a token, or to one value."""
    change = torch.zeros_like(weight)
    row = PROMPT[place % 48] if weight.shape[0] == 128 else place % weight.shape[0]
    if extent == "all values":
        change[:] = 0.1
    elif extent == "a row":
        change[row] = 0.3
    else:
        change.view(weight.shape[0], -1)[row, place % (weight.numel() // weight.shape[0])] = 1.0
    return change


changes = st.tuples(
    st.sampled_from(list(WAYS)),
    st.sampled_from(WEIGHTS),
    st.sampled_from(["all values", "a row", "one value"]),
    st.integers(0, 10_000),
)


@settings(max_examples=40)
@given(st.lists(changes, min_size=1, max_size=6))
def test_after_every_change_the_result_is_that_of_a_dynamic_cache(drawn: list[tuple[str, str, str, int]]) -> None:
    model: PreTrainedModel = build("llama")
    cache = PagedPrefixCache(model)
    run(model, cache, input_ids=IDS)
    for way, name, extent, place in drawn:
        module: Any = model.get_submodule(name)
        before = module.weight.detach().clone()
        WAYS[way](module, some_change(before, extent, place))
        assert not torch.equal(module.weight, before)
        reference = run(model, input_ids=IDS)
        for reused in (0, 49):  # and then, unchanged, it loses no hit
            assert_same(reference, run(model, cache, input_ids=IDS))
            assert cache.last_call.reused_tokens == reused
