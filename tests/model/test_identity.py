"""What a model is, for other processes: equal where keys and values are, another where they are not, and refused where nobody can say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged_cache import NotPortableError, PagedPrefixCache
from hf_paged_cache.model.conditioning import Conditioning
from hf_paged_cache.model.identity import ModelIdentity, digest_of_weights

from ..tiny_models import tiny


def fresh() -> Any:
    """A model of the test's own."""
    return copy.deepcopy(tiny("llama"))


def identity(model: Any) -> ModelIdentity:
    return Conditioning(model).identity()


def test_two_models_with_the_same_weights_are_the_same() -> None:
    model = fresh()
    there = identity(model)
    twin = copy.deepcopy(model)
    twin.config._name_or_path = "elsewhere"
    here = identity(twin)
    assert here == there
    assert here.digest == there.digest
    assert here.why_other(there.facts, there.settings) is None


def test_a_cache_on_the_model_changes_nothing() -> None:
    model = fresh()
    before = identity(model)
    cache = PagedPrefixCache(model)
    assert cache.store.conditioning.identity() == before


def one_value(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.view(-1)[17] += 1e-3


def a_setting(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


def rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq[1] *= 2


def dtype(model: Any) -> None:
    model.to(torch.bfloat16)


def attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def modules(model: Any) -> None:
    model.model.norm = nn.Sequential(model.model.norm)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (one_value, "it was computed by another model: other weights"),
        (a_setting, "rms_norm_eps is 1e-06, here 0.001"),
        (rope, "other rotary frequencies"),
        (dtype, "dtype is torch.float32, here torch.bfloat16"),
        (attention, "_attn_implementation_internal is 'sdpa', here 'eager'"),
        (modules, "other modules or shapes"),
    ],
)
def test_a_model_that_computes_otherwise_is_another_and_it_is_said_why(change: Callable[[Any], None], why: str) -> None:
    model = fresh()
    conditioning = Conditioning(model)
    before = conditioning.identity()
    change(model)
    after = conditioning.identity()
    assert after.digest != before.digest
    assert why in str(after.why_other(before.facts, before.settings))


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_another_version_is_another_model(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    before = identity(model)
    monkeypatch.setattr(f"{ModelIdentity.__module__}._version", lambda name: "0.1" if name == package else "x")
    told = str(identity(model).why_other(before.facts, before.settings))
    assert f"{package} is {before.facts[package]}, here 0.1" in told


def test_a_hook_and_a_forward_that_was_replaced_have_no_name() -> None:
    model = fresh()
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(NotPortableError, match="<lambda> hooks or replaces the forward of a LlamaMLP"):
        identity(model)
    handle.remove()
    model.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(NotPortableError, match="take it off"):
        identity(model)


class DoubledMLP(nn.Module):
    """A module whose class is not of a package with a version."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def test_code_of_its_own_is_told_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    model.model.layers[0].mlp = DoubledMLP(model.model.layers[0].mlp)
    conditioning = Conditioning(model)
    before = conditioning.identity()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 3

    monkeypatch.setattr(DoubledMLP, "forward", forward)
    with pytest.raises(NotPortableError, match="is defined inside another function"):
        conditioning.identity()
    monkeypatch.setattr(DoubledMLP, "forward", Elsewhere.forward)
    assert "other code of its own" in str(conditioning.identity().why_other(before.facts, before.settings))


class Elsewhere:
    """Another forward, of another name."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 3


def test_weights_are_read_once_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = fresh(), []

    def counting(weights: Any) -> str:
        read.append(1)
        return digest_of_weights(weights)

    monkeypatch.setattr(f"{Conditioning.__module__}.digest_of_weights", counting)
    conditioning = Conditioning(model)
    conditioning.identity()
    conditioning.identity()
    assert len(read) == 1
    one_value(model)
    conditioning.identity()
    assert len(read) == 2


def test_the_digest_of_weights_sees_every_value_their_order_shapes_and_dtypes() -> None:
    one, two = torch.arange(6.0).view(2, 3), torch.arange(4.0)
    found = digest_of_weights([one, two])
    assert digest_of_weights([one.clone(), two.clone()]) == found
    assert digest_of_weights([one.t().contiguous().t(), two]) == found  # as it lies in memory does not count
    changed = [
        digest_of_weights([two, one]),
        digest_of_weights([one.view(3, 2), two]),
        digest_of_weights([one, two.half()]),
    ]
    for number in range(6):
        other = one.clone()
        other.view(-1)[number] += 1
        changed.append(digest_of_weights([other, two]))
    assert found not in changed
    assert len(set(changed)) == len(changed)
