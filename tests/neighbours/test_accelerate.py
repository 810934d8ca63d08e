"""accelerate: wherever it keeps a model's weights, calls are right, find their blocks again, and see a change of the weights."""

from __future__ import annotations

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

from ..reference import IDS, assert_same, batch, is_same, row, run, zero_blocks
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


def in_host_memory_by_layer(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """One hook loads all weights of a layer."""
    return accelerate.cpu_offload(model, execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"])


def on_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.disk_offload(model, str(folder), execution_device=CPU)


def on_disk_by_layer(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.disk_offload(
        model, str(folder), execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"]
    )


PLACES: dict[str, Callable[[PreTrainedModel, Path], PreTrainedModel]] = {
    "device_map with a disk": dispatched,
    "from_pretrained with a device_map": loaded,
    "cpu_offload": in_host_memory,
    "cpu_offload, layer by layer": in_host_memory_by_layer,
    "disk_offload": on_disk,
    "disk_offload, layer by layer": on_disk_by_layer,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_whose_weights_are_kept_elsewhere(model: PreTrainedModel, tmp_path: Path, place: str) -> None:
    plain = copy.deepcopy(model)
    offloaded = PLACES[place](model, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in offloaded.parameters())
    cache = PagedPrefixCache(offloaded)
    for reused in (0, 49):
        reference = run(plain, input_ids=IDS)
        assert_same(reference, run(offloaded, input_ids=IDS))
        assert_same(reference, run(offloaded, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused
    inputs = batch(row((1, 40), (2, 8)), row((3, 20)))
    assert_same(run(plain, **inputs, num_beams=2), run(offloaded, cache, **inputs, num_beams=2))
    zero_blocks(cache)
    assert not is_same(reference, run(offloaded, cache, input_ids=IDS))


@pytest.mark.parametrize("place", PLACES)
def test_forwards_of_our_own_run_where_weights_are_kept_elsewhere(
    model: PreTrainedModel, tmp_path: Path, place: str
) -> None:
    """A trial, the measure of a block's bytes, the recomputation of blocks, a score: none is given ids by the user."""
    plain = PagedPrefixCache(copy.deepcopy(model))
    offloaded = PLACES[place](model, tmp_path)
    assert check_model(offloaded).is_supported
    cache = PagedPrefixCache(offloaded, max_bytes=2**20)
    for reused in (0, 49):
        run(offloaded, cache, input_ids=IDS)
        assert cache.last_call.reused_tokens == reused
        assert cache.verify() == (3, 0, ())
    continuations = [[3, 4, 5], [7]]
    for score, expected in zip(cache.score(IDS, continuations), plain.score(IDS, continuations), strict=True):
        assert score.log_probs == pytest.approx(expected.log_probs)


def change_in_host_memory(model: PreTrainedModel, folder: Path) -> None:
    """In place, where the first layer's hook, or that of one of its parts, loads its weights from."""
    for module in model.model.layers[0].modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name in [] if weights is None else [name for name, _ in module.named_parameters() if "up_proj" in name]:
            weights[name].mul_(2)
        if isinstance(module, torch.nn.Linear) and weights is not None:
            weights["weight"].mul_(1.5)


def change_files(model: PreTrainedModel, folder: Path) -> None:
    offload_state_dict(str(folder), build("llama", seed=7, max_position_embeddings=2048).state_dict())


def change_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    build("llama", seed=7, max_position_embeddings=2048).save_pretrained(folder / "model")


CHANGES: dict[str, Callable[[PreTrainedModel, Path], None]] = {
    "device_map with a disk": change_files,
    "from_pretrained with a device_map": change_checkpoint,
    "cpu_offload": change_in_host_memory,
    "cpu_offload, layer by layer": change_in_host_memory,
    "disk_offload": change_files,
    "disk_offload, layer by layer": change_files,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_change_of_weights_that_are_kept_elsewhere_is_seen(
    model: PreTrainedModel, tmp_path: Path, place: str
) -> None:
    offloaded = PLACES[place](model, tmp_path)
    cache = PagedPrefixCache(offloaded)
    before = run(offloaded, cache, input_ids=IDS)
    CHANGES[place](offloaded, tmp_path)
    reference = run(offloaded, input_ids=IDS)
    assert not is_same(before, reference)
    for reused in (0, 49):
        assert_same(reference, run(offloaded, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused


def test_a_model_that_is_put_on_disk_with_other_weights_reuses_nothing(
    model: PreTrainedModel, cache: PagedPrefixCache, tmp_path: Path
) -> None:
    results = []
    for seed in (1, 2):
        model.load_state_dict(build("llama", seed=seed, max_position_embeddings=2048).state_dict())
        results.append(run(model, input_ids=IDS))
        on_disk(model, tmp_path / str(seed))
        for reused in (0, 49):
            assert_same(results[-1], run(model, cache, input_ids=IDS))
            assert cache.last_call.reused_tokens == reused
        remove_hook_from_module(model, recurse=True)
    assert not is_same(*results)


def test_a_weight_whose_place_is_unknown_is_not_trusted(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    """Somebody else's way to keep a weight elsewhere: nobody could see it change."""
    projection = model.model.layers[1].mlp.up_proj
    held = projection.weight.detach().clone()
    projection.weight = torch.nn.Parameter(held.to("meta"))
    projection.forward = lambda states: torch.nn.functional.linear(states, held)
    for _ in range(2):
        assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == 0
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
        for reused in (None, 49):
            assert_same(reference, run(model, cache, input_ids=IDS))
            assert reused in (None, cache.last_call.reused_tokens)
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


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_prepared_model_is_itself_behind_a_cache(model: PreTrainedModel, mixed_precision: str) -> None:
    assert check_model(prepared(model, mixed_precision)).is_supported


def test_mixed_precision_of_a_prepared_model_has_blocks_of_its_own(model: PreTrainedModel) -> None:
    """It begins inside the forward, which accelerate replaces, so no flag shows it when a call begins."""
    before = run(model, PagedPrefixCache(model), input_ids=IDS)
    plain_cache = PagedPrefixCache(model)
    run(model, plain_cache, input_ids=IDS)
    model = prepared(model, "bf16")
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
