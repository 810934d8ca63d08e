"""What forwards of our own ask of a model."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch

from hf_paged_cache.model.probing import (
    TiesByPosition,
    eps_computed_in,
    input_device,
    types_of_logits,
    undisturbed,
)


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
