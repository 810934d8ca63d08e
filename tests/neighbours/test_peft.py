"""PEFT: no call ever gets the keys and values of another adapter, and each adapter finds its own again."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, UnsupportedModelError

from ..internals import capture_everywhere
from ..reference import AtStep, assert_same, batch, is_same, row, run, zero_blocks

PROMPT = row((1, 50))
IDS = torch.tensor([PROMPT])
LAYERS = ["q_proj", "k_proj", "v_proj", "up_proj"]


def lora(seed: int, **settings: Any) -> peft.LoraConfig:
    """An adapter that changes the result: not the zeros that training starts with."""
    torch.manual_seed(seed)
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LAYERS, init_lora_weights=False, **settings)


@pytest.fixture
def adapted(model: PreTrainedModel) -> peft.PeftModel:
    """Two adapters, `default` active, and `other`."""
    wrapped = peft.get_peft_model(model, lora(1))
    wrapped.add_adapter("other", lora(2))
    return wrapped.eval()


def check(caller: Any, cache: PagedPrefixCache, reused: int | None, **arguments: Any) -> Any:
    """One call, the same as without the cache; and so many prompt tokens were reused."""
    arguments = {"input_ids": IDS, **arguments}
    reference = run(caller, **arguments)
    assert_same(reference, run(caller, cache, **arguments))
    if reused is not None:
        assert cache.last_call.reused_tokens == reused
    return reference


def assert_seen(caller: Any, cache: PagedPrefixCache, **arguments: Any) -> None:
    """What is reused next shows in the result."""
    arguments = {"input_ids": IDS, **arguments}
    reference = run(caller, **arguments)
    zero_blocks(cache)
    assert not is_same(reference, run(caller, cache, **arguments))


@pytest.mark.parametrize("through_wrapper", [True, False])
def test_a_cache_of_a_wrapper_is_attached_where_the_forwards_run(
    adapted: peft.PeftModel, through_wrapper: bool
) -> None:
    cache = PagedPrefixCache(adapted)
    assert cache.store.model is adapted.get_base_model()
    caller = adapted if through_wrapper else adapted.get_base_model()
    check(caller, cache, 0)
    check(caller, cache, 49)
    logits = adapted(IDS, past_key_values=cache, logits_to_keep=1).logits
    assert logits.shape[1] == 1
    cache.reset()
    assert_seen(caller, cache)


def test_a_block_of_a_wrapper_s_cache_serves_the_wrapper_s_calls(adapted: peft.PeftModel) -> None:
    reference = run(adapted, input_ids=IDS)
    with PagedPrefixCache(adapted) as cache:
        for reused in (0, 49):
            assert_same(reference, run(adapted, input_ids=IDS))
            assert cache.last_call.reused_tokens == reused
        assert_seen(adapted, cache)


def test_an_adapter_added_after_the_cache_reuses_nothing(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    before = run(model, cache, input_ids=IDS)
    wrapped = peft.get_peft_model(model, lora(1)).eval()
    assert not is_same(before, check(wrapped, cache, 0))
    assert_same(before, run(wrapped.unload(), cache, input_ids=IDS))
    check(model, cache, 49)


def test_each_adapter_has_blocks_of_its_own_and_finds_them_again(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    results = []
    for turn in range(2):
        for name in ("default", "other", ["default", "other"]):
            adapted.base_model.set_adapter(name)
            results.append(check(adapted, cache, 48 if turn else 0))
    check(adapted, cache, 49)  # the same one again
    assert not any(is_same(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert_seen(adapted, cache)


def test_a_disabled_adapter_reuses_nothing_of_the_enabled_one(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    for reused in (0, 48):
        check(adapted, cache, reused)
        with adapted.disable_adapter():
            check(adapted, cache, reused)
    assert_seen(adapted, cache)


def scale(adapted: peft.PeftModel, folder: str) -> None:
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(0.3)


def load_again(adapted: peft.PeftModel, folder: str) -> None:
    """Another one under the same name."""
    adapted.set_adapter("other")
    adapted.delete_adapter("default")
    adapted.add_adapter("default", lora(5))
    adapted.set_adapter("default")
    adapted.eval()


def swap_in_place(adapted: peft.PeftModel, folder: str) -> None:
    adapted.save_pretrained(folder, selected_adapters=["other"])
    hotswap_adapter(adapted, f"{folder}/other", "default", torch_device="cpu")


def train(adapted: peft.PeftModel, folder: str) -> None:
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2, fused=True)
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("change", [scale, load_again, swap_in_place, train])
def test_an_adapter_that_is_changed_reuses_nothing(adapted: peft.PeftModel, change: Any, tmp_path: Any) -> None:
    cache = PagedPrefixCache(adapted)
    before = check(adapted, cache, 0)
    change(adapted, str(tmp_path))
    assert not is_same(before, check(adapted, cache, 0))
    check(adapted, cache, 49)


def test_a_merged_adapter_is_right_and_so_is_the_unmerged_one(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    check(adapted, cache, 0)
    adapted.merge_adapter()
    check(adapted, cache, 0)
    check(adapted, cache, 49)
    assert_seen(adapted, cache)
    cache.reset_prefix_cache()
    check(adapted, cache, 0)
    adapted.unmerge_adapter()
    check(adapted, cache, 0)  # but for rounding it is the adapter of before
    adapted.set_adapter("other")
    adapted.merge_adapter()
    check(adapted, cache, 0)
    merged = adapted.merge_and_unload()
    check(merged, cache, None)


def test_transformers_own_adapters_take_turns(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    """`model.add_adapter` and its kin, without PEFT's wrapper."""
    check(model, cache, 0)
    model.add_adapter(lora(1), "one")
    model.add_adapter(lora(2), "two")
    model.eval()
    for turn in range(2):
        for name in ("one", "two"):
            model.set_adapter(name)
            check(model, cache, 48 if turn else 0)
    model.disable_adapters()
    check(model, cache, 0)
    model.enable_adapters()
    check(model, cache, 48)
    assert_seen(model, cache)


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "DoRA": lambda: lora(3, use_dora=True),
    "LoRA with trainable tokens": lambda: lora(3, trainable_token_indices={"embed_tokens": PROMPT[:5]}),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=LAYERS, feedforward_modules=["up_proj"], init_ia3_weights=False
    ),
    "VeRA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["k_proj", "v_proj"], d_initial=1.0),
    "trained norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
}


def shake(wrapped: peft.PeftModel, seed: int) -> None:
    """Change all that an adapter would train, as training does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_that_changes_layers(model: PreTrainedModel, cache: PagedPrefixCache, kind: str) -> None:
    plain = check(model, cache, 0)
    wrapped = peft.get_peft_model(model, KINDS[kind]()).eval()
    shake(wrapped, 1)
    first = check(wrapped, cache, 0)
    check(wrapped, cache, 49)
    shake(wrapped, 2)
    second = check(wrapped, cache, 0)
    with wrapped.disable_adapter():
        disabled = check(wrapped, cache, 0)
    assert not any(is_same(one, other) for one, other in ((plain, first), (first, second), (second, disabled)))
    check(wrapped, cache, 48)
    assert_seen(wrapped, cache)


def test_rows_of_several_adapters_in_a_batch_each_reuse_their_own(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    inputs = batch(PROMPT, PROMPT, PROMPT)
    for names, reused in (
        (["default", "other", "__base__"], 0),
        (["default", "other", "__base__"], 3 * 49),
        (["other", "__base__", "default"], 3 * 49),
        (["other", "other", "default"], 3 * 49),
    ):
        reference = check(adapted, cache, reused, **inputs, adapter_names=names)
    rows = [reference.sequences[number].tolist() for number in (0, 2)]
    assert rows[0] != rows[1]
    assert_seen(adapted, cache, **inputs, adapter_names=names)


def test_padded_rows_of_several_adapters_and_lengths(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    for seed in (2, 3):
        inputs = batch(row((1, 40), (seed, 5)), row((1, 32), (seed, 9)), row((4, 20)), row((1, 40), (seed, 7)))
        check(adapted, cache, None, **inputs, adapter_names=["default", "other", "other", "__base__"])
    assert [each.matched_tokens >= 16 for each in cache.last_call.rows] == [True] * 4
    check(adapted, cache, None, **inputs, adapter_names=["other", "default", "__base__", "default"])
    assert [each.matched_tokens >= 16 for each in cache.last_call.rows] == [True, True, False, True]


def test_beams_of_rows_of_several_adapters(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    inputs = batch(PROMPT, PROMPT)
    for names in (["default", "other"], ["other", "default"]):
        check(adapted, cache, None, **inputs, adapter_names=names, num_beams=3)
    assert cache.last_call.reused_tokens > 0
    assert_seen(adapted, cache, **inputs, adapter_names=names, num_beams=3)


def test_adapter_names_and_the_active_adapter_are_never_confused(adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted)
    for arguments in (
        {},
        {"adapter_names": ["other"]},
        {"adapter_names": ["default"]},
        {},
        {"adapter_names": ["__base__"]},
    ):
        check(adapted, cache, None, **arguments)


@pytest.mark.parametrize("way", ["a loop", "a generate that goes on"])
def test_rows_that_go_on_under_another_adapter_are_kept_up_to_there(way: str, adapted: peft.PeftModel) -> None:
    cache = PagedPrefixCache(adapted, block_size=4)
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        adapted(IDS[:, :20], past_key_values=cache, logits_to_keep=1, adapter_names=["default"])
        if way == "a loop":
            adapted(IDS[:, 20:], past_key_values=cache, logits_to_keep=1, adapter_names=["other"])
        else:
            run(adapted, cache, input_ids=IDS[:, 20:], attention_mask=mask, adapter_names=["other"])
    check(adapted, cache, 20, adapter_names=["default"])


def test_rows_that_change_places_take_their_adapters_along(adapted: peft.PeftModel) -> None:
    inputs, names = torch.cat([IDS, IDS.flip(1)]), ["default", "other"]
    for after, kept in ((names, 20), (names[::-1], 49)):
        cache = PagedPrefixCache(adapted, block_size=1)
        with torch.no_grad():
            adapted(inputs[:, :20], past_key_values=cache, logits_to_keep=1, adapter_names=names)
            cache.reorder_cache(torch.tensor([1, 0]))
            adapted(inputs.flip(0)[:, 20:], past_key_values=cache, logits_to_keep=1, adapter_names=after)
        check(adapted, cache, 2 * kept, input_ids=inputs, adapter_names=names)


def test_activated_lora_is_right_and_not_reused(model: PreTrainedModel) -> None:
    """It begins to work at an offset of each row, so keys and values hang on where its tokens stand."""
    wrapped = peft.get_peft_model(model, lora(1, alora_invocation_tokens=PROMPT[20:22])).eval()
    cache = PagedPrefixCache(wrapped)
    for _ in range(2):
        check(wrapped, cache, 0)
    assert "activated LoRA" in cache.last_call.rows[0].stopped


def test_poly_s_tasks_are_right_and_not_reused(model: PreTrainedModel) -> None:
    """A task is an argument of a call, which PEFT hands to its layers itself."""
    few = {"r": 4, "target_modules": LAYERS, "n_tasks": 2, "n_skills": 2, "init_weights": False}
    wrapped = peft.get_peft_model(model, peft.PolyConfig(task_type="CAUSAL_LM", **few)).eval()
    shake(wrapped, 1)
    cache = PagedPrefixCache(wrapped)
    results = [check(wrapped, cache, 0, task_ids=torch.tensor([task])) for task in (0, 1)]
    assert not is_same(*results)
    assert "PEFT" in cache.last_call.rows[0].stopped


def test_a_shadow_network_is_refused_by_name(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    """It runs a network of its own beside the model, with a cache of its own that ours would leave behind."""
    wrapped = peft.get_peft_model(model, peft.ShadowConfig(task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedModelError, match="ShadowModel"):
        PagedPrefixCache(wrapped)
    with pytest.raises(UnsupportedModelError, match="ShadowModel"):
        run(wrapped.eval(), cache, input_ids=IDS)
    run(wrapped, input_ids=IDS)


@pytest.mark.parametrize("config_class", [peft.PrefixTuningConfig, peft.PromptTuningConfig])
def test_prompt_learning_is_refused_by_name_also_round_a_model_that_has_a_cache(
    model: PreTrainedModel, cache: PagedPrefixCache, config_class: Any
) -> None:
    check(model, cache, 0)
    wrapped = peft.get_peft_model(model, config_class(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    said = f"prompt learning \\({config_class.__name__}\\)"
    with pytest.raises(UnsupportedModelError, match=said):
        PagedPrefixCache(wrapped)
    with pytest.raises(UnsupportedModelError, match=said):
        run(wrapped, cache, input_ids=IDS)
    with cache, pytest.raises(UnsupportedModelError, match=said):
        run(wrapped, input_ids=IDS)
    run(wrapped, input_ids=IDS)  # without the cache as ever
    check(model, cache, 48)


def test_a_callback_that_switches_the_adapter_has_the_rest_of_a_captured_call_run_eagerly(
    adapted: peft.PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cuda = torch.cuda.is_available()
    capture_everywhere(monkeypatch)
    cache = PagedPrefixCache(adapted.to("cuda" if is_cuda else "cpu"), capture="auto" if is_cuda else "dry")
    for _ in range(2):
        check(adapted, cache, None, max_new_tokens=10)
    assert cache.last_call.captured == "10 of 10 forwards were captured"
    outputs = []
    for each in (None, cache):
        adapted.set_adapter("default")
        switch = AtStep(5, lambda: adapted.set_adapter("other"))
        outputs.append(run(adapted, each, input_ids=IDS, max_new_tokens=10, logits_processor=[switch]))
    assert_same(*outputs)
    assert cache.last_call.captured == "5 of 10 forwards were captured; adapters changed after the capture"
    for name in ("other", "default"):
        adapted.set_adapter(name)
        check(adapted, cache, None, max_new_tokens=10)
    assert_seen(adapted, cache)
