"""Finds the processes (*ranks*) that must run as many forwards of a model as this one: its weights are split over them.

Owns what is read of torch.distributed, and the collective by which ranks settle numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed


class RankGroup(NamedTuple):
    """`RankGroup` is the ranks among which weights are split.

    Attributes:
        group: process group of torch.distributed.
        share_inputs: True if each rank is passed the same tokens (tensor parallelism). If not, each rank has its own
            tokens (FSDP, DeepSpeed's ZeRO 3), and only the number of forwards must be the same.
        device: device where the group's backend wants tensors.
    """

    group: Any
    share_inputs: bool
    device: torch.device


def world() -> Any:
    """Return the group of all processes; None where this process is alone."""
    processes = torch.distributed
    if not processes.is_available() or not processes.is_initialized() or processes.get_world_size() == 1:
        return None
    return processes.group.WORLD


def rank_groups(model: Any) -> tuple[RankGroup, ...]:
    """Return the groups that a model's weights are split over; groups whose ranks share inputs come first.

    Data parallelism, where every process has a whole copy, gives no group. Tensor parallelism inside of FSDP gives two.
    """
    if world() is None:
        return ()
    modules, weights = list(model.modules()), list(model.parameters())
    groups: dict[Any, bool] = {}  # group -> whether its ranks share inputs
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            groups[module.process_group] = False
    is_fsdp = any("FSDPModule" in (base.__name__ for base in type(module).__mro__) for module in modules)
    if (getattr(model, "_tp_size", None) or 1) > 1 and (mesh := getattr(model, "_device_mesh", None)) is not None:
        names = mesh.mesh_dim_names or ()
        groups[mesh.get_group("tp" if "tp" in names else 0)] = True
    for weight in weights:
        if hasattr(weight, "ds_id"):
            groups.setdefault(getattr(weight, "ds_process_group", None) or world(), False)
        mesh = getattr(weight, "device_mesh", None)
        if mesh is None:
            continue
        for dim, placement in enumerate(weight.placements):
            if mesh.size(dim) > 1 and not placement.is_replicate():
                name = (mesh.mesh_dim_names or ())[dim : dim + 1]
                groups.setdefault(mesh.get_group(dim), not is_fsdp or name == ("tp",))
    held = weights[0].device if weights else torch.device("cpu")
    found = [RankGroup(group, shares, _device(group, held)) for group, shares in groups.items()]
    return tuple(sorted(found, key=lambda each: not each.share_inputs))


def rank() -> int:
    """Return the number of this process."""
    return torch.distributed.get_rank()


def least_of_ranks(ranks: RankGroup, values: Sequence[int]) -> list[int]:
    """Return the least number that any rank gives, for each of as many values on every rank.

    Effects: waits for the other ranks. No lock may be held.  Cost: one all_reduce of int64.
    """
    tensor = torch.tensor(values, dtype=torch.int64, device=ranks.device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=ranks.group)
    least: list[int] = tensor.tolist()
    return least


def _device(group: Any, of_weights: torch.device) -> torch.device:
    """Return a device whose tensors the group's backend takes: the CPU if it can."""
    takes_cpu = "cpu:" in torch.distributed.get_backend_config(group)
    return torch.device("cpu") if takes_cpu else of_weights
