"""What layers hold of a row, against what a `DynamicCache` holds after a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PrefixStore
from hf_paged_cache.model.sizes import StateSizes, measure_bytes_per_token, measure_states

from ..conformance.zoo import build as build_type
from .test_support import FROM_5_23


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
