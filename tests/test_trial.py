"""The trial of a model: what it finds, and that the model is afterwards what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache.trial import (
    NUM_CACHED,
    NUM_COLUMNS,
    distance,
    tolerance,
    trial_inputs,
    undisturbed,
    why_it_fails,
)

from .tiny_models import build


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "opt", "bloom", "bert_decoder"])
def test_a_decoder_is_itself_behind_a_cache(name: str) -> None:
    assert why_it_fails(build(name)) == ""


def test_attention_to_later_tokens_is_seen() -> None:
    assert "depend on more than the tokens before them" in why_it_fails(build("bert"))


def test_a_model_that_is_wrong_behind_a_past_in_padded_rows_alone_is_seen(tiny_llama: Any) -> None:
    def forget_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
        return args, kwargs

    tiny_llama.register_forward_pre_hook(forget_padding, with_kwargs=True)
    assert "differ in a row with padding by" in why_it_fails(tiny_llama)


def test_a_cache_with_other_columns_than_the_tokens_is_seen(tiny_llama: Any) -> None:
    def repeat_tokens(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None:
            for name in ("input_ids", "attention_mask", "position_ids"):
                kwargs[name] = torch.cat((kwargs[name][:, :1], kwargs[name]), dim=1)
        return args, kwargs

    tiny_llama.register_forward_pre_hook(repeat_tokens, with_kwargs=True)
    assert f"after {NUM_CACHED} tokens its cache holds {NUM_CACHED + 1}" in why_it_fails(tiny_llama)


def test_a_model_that_raises_is_seen_by_its_error(tiny_llama: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no cache today")

    tiny_llama.register_forward_pre_hook(fail)
    assert "(RuntimeError: no cache today)" in why_it_fails(tiny_llama)


def test_a_model_is_tried_once(tiny_llama: Any) -> None:
    calls: list[int] = []
    tiny_llama.register_forward_pre_hook(lambda *_: calls.append(1))
    assert why_it_fails(tiny_llama) == why_it_fails(tiny_llama) == ""
    assert len(calls) == 3


def test_memory_that_runs_out_is_no_property_of_the_model(tiny_llama: Any) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = tiny_llama.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        why_it_fails(tiny_llama)
    handle.remove()
    assert why_it_fails(tiny_llama) == ""


def test_the_inputs_are_two_rows_of_plain_tokens_one_of_them_padded(tiny_llama: Any) -> None:
    tiny_llama.config.image_token_id, tiny_llama.config.bos_token_id = 9, 11
    inputs = trial_inputs(tiny_llama)
    assert {tuple(value.shape) for value in inputs.values()} == {(2, NUM_COLUMNS)}
    assert not {9, 11} & set(inputs["input_ids"].flatten().tolist())
    assert int(inputs["input_ids"].max()) < tiny_llama.config.vocab_size
    assert inputs["attention_mask"].sum(1).tolist() == [NUM_COLUMNS, NUM_COLUMNS - 5]
    assert inputs["position_ids"][1].tolist() == [0] * 5 + list(range(NUM_COLUMNS - 5))


def test_modules_train_as_they_did(tiny_llama: Any) -> None:
    tiny_llama.train()
    tiny_llama.lm_head.eval()
    before = [module.training for module in tiny_llama.modules()]
    with undisturbed(tiny_llama):
        assert not any(module.training for module in tiny_llama.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in tiny_llama.modules()] == before


def test_a_distance_is_a_share_of_the_references_largest() -> None:
    reference = torch.tensor([1.0, -4.0, float("-inf")])
    assert distance(reference, torch.tensor([1.0, -2.0, float("-inf")])) == 0.5
    assert distance(reference, torch.tensor([float("nan"), -4.0, float("-inf")])) == float("inf")


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 1e-4, 1e-2), (torch.bfloat16, 0.05, 0.2)])
def test_more_is_allowed_where_numbers_are_rounded_more(
    tiny_llama: Any, dtype: torch.dtype, least: float, most: float
) -> None:
    assert least < tolerance(tiny_llama.to(dtype)) < most
