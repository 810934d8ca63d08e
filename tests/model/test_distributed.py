"""Which models are split over processes that must all run the same number of forwards."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache.model.distributed import ranks_must_match


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A model in one of two processes."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    return torch.nn.Linear(2, 2)


def test_with_a_whole_copy_of_the_model_ranks_need_not_match(model: torch.nn.Module) -> None:
    assert not ranks_must_match(model)


@pytest.mark.parametrize("attribute", ["ds_id", "device_mesh"])
def test_with_a_weight_split_over_processes_ranks_must_match(model: torch.nn.Module, attribute: str) -> None:
    setattr(model.weight, attribute, object())
    assert ranks_must_match(model)


def test_with_fsdp_ranks_must_match(model: torch.nn.Module) -> None:
    wrapper = type("FullyShardedDataParallel", (torch.nn.Sequential,), {})
    assert ranks_must_match(torch.nn.Sequential(wrapper(model)))


def test_a_process_alone_has_no_other_to_match(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.weight.ds_id = 0
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert not ranks_must_match(model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert not ranks_must_match(model)
