"""Over which processes a model's weights are split, and which of them are passed the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache.model import conditioning, distributed
from hf_paged_cache.model.distributed import rank_groups

from ..tiny_models import build

WORLD, ROWS, COLUMNS = "all", "rows", "columns"  # groups


class _Placement:
    def __init__(self, *, whole: bool) -> None:
        self.is_replicate = lambda: whole


class _Mesh:
    """Two processes along each dimension."""

    def __init__(self, *names: str | None) -> None:
        self.mesh_dim_names = names if names[0] else None

    def size(self, dim: int) -> int:
        return 2

    def get_group(self, dim: int | str) -> str:
        return (ROWS, COLUMNS)[dim if isinstance(dim, int) else (self.mesh_dim_names or ()).index(dim)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model in one of two processes."""
    for module in (distributed, conditioning):
        monkeypatch.setattr(module, "world", lambda: WORLD)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    return torch.nn.Linear(2, 2)


def split(model: Any, mesh: _Mesh, *whole: bool) -> None:
    model.weight.device_mesh = mesh
    model.weight.placements = [_Placement(whole=each) for each in whole]


def groups_of(model: Any) -> list[tuple[Any, bool]]:
    return [(each.group, each.share_inputs) for each in rank_groups(model)]


def test_a_whole_copy_of_the_model_is_split_over_nobody(model: Any) -> None:
    assert groups_of(model) == []
    split(model, _Mesh(None), True)
    assert groups_of(model) == []


def test_ranks_of_tensor_parallelism_are_passed_the_same_tokens(model: Any) -> None:
    split(model, _Mesh(None), False)
    assert groups_of(model) == [(ROWS, True)]


def test_a_model_that_transformers_has_split_says_so_itself(model: Any) -> None:
    """Also where its weights are plain tensors."""
    model._tp_size, model._device_mesh = 2, _Mesh("fsdp", "tp")
    assert groups_of(model) == [(COLUMNS, True)]


def test_ranks_of_fsdp_have_inputs_of_their_own(model: Any) -> None:
    wrapper = type("FullyShardedDataParallel", (torch.nn.Sequential,), {"process_group": ROWS})
    assert groups_of(torch.nn.Sequential(wrapper(model))) == [(ROWS, False)]
    split(model, _Mesh("dp"), False)
    fully_sharded = type("FSDPLinear", (type("FSDPModule", (), {}), torch.nn.Linear), {})
    model.__class__ = fully_sharded
    assert groups_of(model) == [(ROWS, False)]


def test_tensor_parallelism_inside_of_fsdp_is_two_groups_and_what_is_shared_comes_first(model: Any) -> None:
    split(model, _Mesh("dp", "tp"), False, False)
    model.__class__ = type("FSDPLinear", (type("FSDPModule", (), {}), torch.nn.Linear), {})
    assert groups_of(model) == [(COLUMNS, True), (ROWS, False)]


def test_replicas_of_shards_need_not_run_alike(model: Any) -> None:
    split(model, _Mesh("replicate", "shard"), True, False)
    model.__class__ = type("FSDPLinear", (type("FSDPModule", (), {}), torch.nn.Linear), {})
    assert groups_of(model) == [(COLUMNS, False)]


def test_ranks_of_zero_3_have_inputs_of_their_own(model: Any) -> None:
    model.weight.ds_id = 0
    assert groups_of(model) == [(WORLD, False)]
    model.weight.ds_process_group = model.bias.ds_process_group = ROWS
    model.bias.ds_id = 1
    assert groups_of(model) == [(ROWS, False)]


def test_a_process_alone_has_no_other_to_settle_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0
    assert groups_of(model) == []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert groups_of(model) == []


def test_a_model_that_is_split_after_its_first_call_is_seen(model: Any) -> None:
    held = build("llama")
    conditions = conditioning.Conditioning(held)
    conditions.digest()
    assert conditions.rank_groups == ()
    weight = torch.nn.Parameter(held.lm_head.weight.detach().clone())
    weight.ds_id = 0  # type: ignore[attr-defined]
    held.lm_head.weight = weight
    conditions.digest()
    assert [each.share_inputs for each in conditions.rank_groups] == [False]
