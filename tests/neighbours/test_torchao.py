"""torchao's quantised linear layers, as far as they run on a CPU: right, reused, and a change of them is seen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, TorchAoConfig

from hf_paged_cache import PagedPrefixCache, check_model

from ..reference import IDS, assert_right, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build

WEIGHT_ONLY: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "intx": IntxWeightOnlyConfig,
    "float8": Float8WeightOnlyConfig,
}


def distance(reference: Any, output: Any) -> float:
    """Of the logits, as a part of their scale."""
    scale = max(float(step.abs().max()) for step in reference.logits)
    return max(float((a - b).abs().max()) / scale for a, b in zip(reference.logits, output.logits, strict=True))


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_weights_quantised_between_calls(model: PreTrainedModel, cache: PagedPrefixCache, kind: str) -> None:
    before = run(model, cache, input_ids=IDS)
    quantize_(model, WEIGHT_ONLY[kind]())
    reference = run(model, input_ids=IDS)
    assert not is_same(before, reference)
    for reused in (0, 49):
        assert_same(reference, run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused
    inputs = batch(row((1, 40), (2, 8)), row((3, 20)))
    assert_right(model, cache, **inputs, num_beams=2)
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=IDS))


@pytest.mark.parametrize("make_config", [*WEIGHT_ONLY.values(), Int8DynamicActivationInt8WeightConfig])
def test_a_quantised_model_is_itself_behind_a_cache(model: PreTrainedModel, make_config: Callable[[], Any]) -> None:
    quantize_(model, make_config())
    report = check_model(model)
    if make_config is Int8DynamicActivationInt8WeightConfig and not report.is_supported:
        # activations are rounded to whole steps, so on some processors the model without a cache differs from itself by
        # more than 1e-4
        assert report.reason.startswith("continued after 20 cached tokens")
        prefix = DynamicCache(config=model.config)
        run(model, prefix, input_ids=IDS[:, :9], max_new_tokens=1)
        own = distance(run(model, input_ids=IDS), run(model, prefix, input_ids=IDS))
        assert own > 1e-4
        return
    assert report.is_supported


def test_quantised_weights_that_change_are_seen(model: PreTrainedModel) -> None:
    other = build("llama", seed=7, max_position_embeddings=2048)
    quantize_(model, Int8WeightOnlyConfig())
    quantize_(other, Int8WeightOnlyConfig())
    weights, cache = copy.deepcopy(model.state_dict()), PagedPrefixCache(model)
    before = run(model, cache, input_ids=IDS)
    model.load_state_dict(other.state_dict())
    reference = run(model, input_ids=IDS)
    assert not is_same(before, reference)
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.scale.mul_(1.5)  # one of the tensors that a weight is made of
    reference = run(model, input_ids=IDS)
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0
    model.load_state_dict(weights)
    assert_same(before, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0


def test_activations_quantised_as_they_come(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    """They are rounded to whole steps, so a difference in the last bit may become one of a step: no cache keeps 1e-4.

    The measure is `DynamicCache` continued from its own prefix.
    """
    before = run(model, cache, input_ids=IDS)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    reference = run(model, input_ids=IDS)
    assert distance(before, reference) > 0.05
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0
    prefix = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :49], past_key_values=prefix)
    continued = run(model, input_ids=IDS, past_key_values=prefix)
    output = run(model, cache, input_ids=IDS)
    assert cache.last_call.reused_tokens == 49
    assert distance(reference, output) <= max(1e-4, 5 * distance(reference, continued))
    assert torch.equal(output.sequences, reference.sequences)
    zero_blocks(cache)
    assert distance(reference, run(model, cache, input_ids=IDS)) > 0.05


def test_a_model_that_transformers_quantises_as_it_loads_it(model: PreTrainedModel, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map="cpu"
    )
    assert type(quantised.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    reference = run(quantised, input_ids=IDS)
    assert not is_same(reference, run(model, input_ids=IDS))
    cache = PagedPrefixCache(quantised)
    for reused in (0, 49):
        assert_same(reference, run(quantised, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused
    zero_blocks(cache)
    assert not is_same(reference, run(quantised, cache, input_ids=IDS))


@pytest.mark.filterwarnings("ignore")  # torch warns that torchao has this now
def test_layers_that_are_packed_by_torch_itself_are_computed_whole() -> None:
    """Their scales are those of a whole call, and their weights are no tensors that could be watched or named."""
    quantize_dynamic: Any = torch.ao.quantization.quantize_dynamic
    model = quantize_dynamic(build("llama"), {torch.nn.Linear})
    cache = PagedPrefixCache(model)
    for _ in range(2):
        assert_right(model, cache, input_ids=IDS, reused=0)
    assert "a Linear (torch.ao.nn.quantized.dynamic.modules.linear) is round a layer" in cache.last_call.rows[0].stopped
