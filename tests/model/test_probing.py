"""What forwards of our own ask of a model."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PrefixStore
from hf_paged_cache.model.probing import (
    StateSizes,
    TiesByPosition,
    eps_computed_in,
    input_device,
    measure_bytes_per_token,
    measure_states,
    types_of_logits,
    undisturbed,
)

from ..conformance.zoo import build as build_type
from .test_support import FROM_5_23


def test_ids_are_made_where_the_weights_are_and_on_the_host_where_these_are_offloaded(tiny_llama: Any) -> None:
    assert input_device(tiny_llama) == torch.device("cpu")
    assert input_device(tiny_llama.to("meta")) == torch.device("cpu")


def test_the_coarsest_type_counts_of_weights_of_autocast_and_of_what_was_computed(tiny_llama: Any) -> None:
    fine, coarse = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    assert eps_computed_in(tiny_llama) == fine
    assert eps_computed_in(tiny_llama, {torch.float32, torch.bfloat16}) == coarse
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert eps_computed_in(tiny_llama) == coarse
    assert eps_computed_in(tiny_llama.to(torch.bfloat16), {torch.float32}) == coarse


def test_the_type_of_logits_is_seen_inside_a_forward_that_converts_its_output(tiny_llama: Any) -> None:
    mixed = torch.autocast("cpu", dtype=torch.bfloat16)(tiny_llama.forward)
    tiny_llama.forward = accelerate.utils.convert_outputs_to_fp32(mixed)
    hooks = len(tiny_llama.lm_head._forward_hooks)
    with types_of_logits(tiny_llama) as seen:
        assert tiny_llama(torch.ones((1, 4), dtype=torch.int64)).logits.dtype == torch.float32
    assert seen == {torch.bfloat16}
    assert len(tiny_llama.lm_head._forward_hooks) == hooks


def test_modules_train_as_they_did(tiny_llama: Any) -> None:
    tiny_llama.train()
    tiny_llama.lm_head.eval()
    before = [module.training for module in tiny_llama.modules()]
    with undisturbed(tiny_llama):
        assert not any(module.training for module in tiny_llama.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in tiny_llama.modules()] == before


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, -1])
def test_of_equal_scores_the_first_ones_are_chosen(dim: int, largest: bool) -> None:
    scores = torch.zeros(40, 40)
    scores[3, 5] = scores[7, 2] = 1.0 if largest else -1.0
    with TiesByPosition():
        for found in (
            scores.topk(4, dim, largest),
            torch.topk(scores, k=4, dim=dim, largest=largest, sorted=False),
        ):
            line = found.indices.select(1 - dim % 2, 3 if dim else 5)
            assert line.tolist() == ([5, 0, 1, 2] if dim else [3, 0, 1, 2])
            assert found.values.shape == ((40, 4) if dim else (4, 40))
            assert found[0] is found.values
    plain = torch.rand(5, 9)
    with TiesByPosition():
        found = plain.topk(3)
    assert all(map(torch.equal, found, plain.topk(3)))


# What layers hold of a row, against a `DynamicCache` after a forward.


def test_bytes_are_measured_of_a_model_that_trains_with_checkpoints(tiny_llama: Any) -> None:
    expected = measure_bytes_per_token(tiny_llama)
    tiny_llama.train()
    tiny_llama.gradient_checkpointing_enable()
    assert measure_bytes_per_token(tiny_llama) == expected > 0
    assert tiny_llama.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_token_are_those_of_all_its_keys_and_values(tiny_llama: Any, dtype: torch.dtype) -> None:
    config = tiny_llama.config
    heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    expected = config.num_hidden_layers * 2 * heads * head_dim * dtype.itemsize
    assert measure_bytes_per_token(tiny_llama.to(dtype)) == expected


def test_index_keys_count_among_the_bytes_of_a_token() -> None:
    """Such layers can be measured with no other cache than the one made for them."""
    model = build_type("deepseek_v32")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[1]]), past_key_values=cache)
    held = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values", "indexer_keys")]
    assert any(layer.indexer_keys is not None for layer in cache.layers)
    assert measure_bytes_per_token(model) == sum(states.nbytes for states in held if states is not None)
    assert PrefixStore(model, block_size=4, max_bytes=10**6).blocks.max_num_blocks


def test_a_model_without_states_has_no_sizes_of_them_and_runs_nothing(tiny_llama: Any) -> None:
    tiny_llama.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    assert measure_states(tiny_llama) is None


@FROM_5_23
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next"])
def test_the_sizes_of_states_are_those_of_all_that_layers_carry(name: str) -> None:
    model = build_type(name)
    cache = DynamicCache(config=model.config)
    argument = "cache_params" if name == "mamba2" else "past_key_values"
    with torch.no_grad():
        model(torch.tensor([[1]]), use_cache=True, **{argument: cache})
    inputs = [state for layer in cache.layers for state in getattr(layer, "conv_states", {}).values()]
    others = [state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values()]
    inputs, others = ([state for state in states if state is not None] for states in (inputs, others))
    num_bytes = sum(state.nbytes for state in (*inputs, *others))
    assert measure_states(model) == StateSizes(num_bytes, max(state.shape[-1] for state in inputs), not others)
