"""accelerate: wherever it keeps weights, calls are right, find their blocks again, and see a change of the weights."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import offload_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_paged_cache import PagedPrefixCache, check_model

from ..reference import IDS, assert_right, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build

CPU = torch.device("cpu")
DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def dispatched(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.dispatch_model(model, DEVICE_MAP, offload_dir=str(folder))


def loaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """As `from_pretrained(device_map=...)` places it: its weights on disk are those of the checkpoint."""
    model.save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=DEVICE_MAP, offload_folder=folder / "offloaded"
    )


def in_host_memory(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.cpu_offload(model, execution_device=CPU)


def on_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.disk_offload(model, str(folder), execution_device=CPU)


def by_layer(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """One hook loads all weights of a layer, from a disk."""
    return accelerate.disk_offload(
        model, str(folder), execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"]
    )


def change_in_host_memory(model: PreTrainedModel) -> None:
    """In place, where the first layer's hook, or that of one of its parts, loads its weights from."""
    for module in model.model.layers[0].modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name in [] if weights is None else [name for name, _ in module.named_parameters() if "up_proj" in name]:
            weights[name].mul_(2)
        if isinstance(module, torch.nn.Linear) and weights is not None:
            weights["weight"].mul_(1.5)


@pytest.mark.parametrize("offload", [dispatched, loaded, on_disk, by_layer])
def test_a_model_with_weights_on_a_disk_reuses_nothing(
    model: PreTrainedModel, tmp_path: Path, offload: Callable[[PreTrainedModel, Path], PreTrainedModel]
) -> None:
    plain = PagedPrefixCache(copy.deepcopy(model))
    offloaded = offload(model, tmp_path)
    cache = PagedPrefixCache(offloaded, max_bytes=2**20)
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS}, {**batch(row((1, 40)), row((3, 20))), "num_beams": 2}):
        assert_same(run(plain.store.model, **inputs), run(offloaded, cache, **inputs))
        assert cache.last_call.reused_tokens == 0
        assert "such as on a disk" in cache.last_call.rows[0].stopped
    for score, expected in zip(cache.score(IDS, [[3, 4, 5], [7]]), plain.score(IDS, [[3, 4, 5], [7]]), strict=True):
        assert score.log_probs == pytest.approx(expected.log_probs)
    offload_state_dict(str(tmp_path), build("llama", seed=7, max_position_embeddings=2048).state_dict())
    assert_same(run(offloaded, input_ids=IDS), run(offloaded, cache, input_ids=IDS))


def test_weights_in_host_memory_reuse_and_a_change_of_them_is_seen(model: PreTrainedModel, tmp_path: Path) -> None:
    """A trial, the measure of a block's bytes, the recomputation of blocks and a score run our own forwards there."""
    plain = PagedPrefixCache(copy.deepcopy(model))
    offloaded, reference = in_host_memory(model, tmp_path), run(plain.store.model, input_ids=IDS)
    assert any(parameter.device.type == "meta" for parameter in offloaded.parameters())
    assert check_model(offloaded).is_supported
    cache = PagedPrefixCache(offloaded, max_bytes=2**20)
    for reused in (0, 49):
        assert_same(reference, run(offloaded, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused
        assert cache.verify() == (3, 0, ())
    for score, expected in zip(cache.score(IDS, [[3, 4, 5], [7]]), plain.score(IDS, [[3, 4, 5], [7]]), strict=True):
        assert score.log_probs == pytest.approx(expected.log_probs)
    inputs = {**batch(row((1, 40), (2, 8)), row((3, 20))), "num_beams": 2}
    assert_same(run(plain.store.model, **inputs), run(offloaded, cache, **inputs))
    change_in_host_memory(offloaded)
    changed = run(offloaded, input_ids=IDS)
    assert not is_same(reference, changed)
    for reused in (0, 49):
        assert_same(changed, run(offloaded, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused
    zero_blocks(cache)
    assert not is_same(changed, run(offloaded, cache, input_ids=IDS))


def test_a_weight_whose_place_is_unknown_is_not_trusted(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    """Somebody else's way to keep a weight elsewhere: nobody could see it change."""
    projection = model.model.layers[1].mlp.up_proj
    held = projection.weight.detach().clone()
    projection.weight = torch.nn.Parameter(held.to("meta"))
    projection.forward = lambda states: torch.nn.functional.linear(states, held)
    for _ in range(2):
        assert_right(model, cache, reused=0, input_ids=IDS)
    assert "weight" in cache.last_call.rows[0].stopped


def test_hooks_that_only_move_lose_no_hits(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    reference = run(model, input_ids=IDS)
    run(model, cache, input_ids=IDS)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(CPU, io_same_device=True))
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 49
    _, hook = accelerate.cpu_offload_with_hook(model, CPU)
    assert_same(reference, run(model, cache, input_ids=IDS))
    hook.offload()
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 49
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=IDS))
    cache.detach()
    remove_hook_from_module(model, recurse=True)
    assert_same(reference, run(model, input_ids=IDS))


def test_offloading_a_model_in_use_and_taking_it_back(
    model: PreTrainedModel, cache: PagedPrefixCache, tmp_path: Path
) -> None:
    reference = run(model, input_ids=IDS)
    assert_same(reference, run(model, cache, input_ids=IDS))
    for offload in (in_host_memory, on_disk):
        offload(model, tmp_path)
        for reused in (0, 0 if offload is on_disk else 49):
            assert_same(reference, run(model, cache, input_ids=IDS))
            assert cache.last_call.reused_tokens == reused
        remove_hook_from_module(model, recurse=True)
    assert_same(reference, run(model, cache, input_ids=IDS))


@pytest.fixture(autouse=True)
def forgotten_state() -> Iterator[None]:
    """accelerate shares one state between all its objects, also with those of later tests."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(model: PreTrainedModel, mixed_precision: str) -> Any:
    """As a trainer prepares it."""
    return accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision).prepare_model(model)


def test_a_prepared_model_keeps_its_hits(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    reference = run(model, cache, input_ids=IDS)
    model = prepared(model, "no")
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 49


def test_mixed_precision_of_a_prepared_model_has_blocks_of_its_own(model: PreTrainedModel) -> None:
    """It begins inside the forward, which accelerate replaces, so no flag shows it when a call begins."""
    plain_cache = PagedPrefixCache(model)
    before = run(model, plain_cache, input_ids=IDS)
    model = prepared(model, "bf16")
    assert check_model(model).is_supported
    reference = run(model, input_ids=IDS)
    assert not is_same(before, reference)
    cache = PagedPrefixCache(model)
    for reused in (0, 49):
        assert_same(reference, run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=IDS))
    assert_same(reference, run(model, plain_cache, input_ids=IDS))
    assert plain_cache.last_call.reused_tokens == 0
