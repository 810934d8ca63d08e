"""Finds the processes (*ranks*) that must run as many forwards of a model as this one: its weights are split over them.

Owns what is read of torch.distributed, and the collective by which ranks settle numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as processes


class RankGroup(NamedTuple):
    """`RankGroup` is the ranks among which weights are split, a process group of torch.distributed.

    Attributes:
        share_inputs: True if each rank is passed the same tokens (tensor parallelism). If not, each rank has its own
            tokens (FSDP, DeepSpeed's ZeRO 3), and only the number of forwards must be the same.
        device: device whose tensors the group's backend takes.
    """

    group: Any
    share_inputs: bool
    device: torch.device


def rank_groups(model: Any) -> tuple[RankGroup, ...]:
    """Return the groups that a model's weights are split over; groups whose ranks share inputs come first.

    Data parallelism, where every process has a whole copy, gives no group. Tensor parallelism inside of FSDP gives two.
    """
    if not processes.is_available() or not processes.is_initialized() or processes.get_world_size() == 1:
        return ()
    modules, weights = list(model.modules()), list(model.parameters())
    groups: dict[Any, bool] = {}  # group -> whether its ranks share inputs
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            groups[module.process_group] = False
    is_fsdp = any("FSDPModule" in (base.__name__ for base in type(module).__mro__) for module in modules)
    if (getattr(model, "_tp_size", None) or 1) > 1 and (of_model := getattr(model, "_device_mesh", None)) is not None:
        groups[of_model.get_group("tp" if "tp" in (of_model.mesh_dim_names or ()) else 0)] = True
    for weight in weights:
        if hasattr(weight, "ds_id"):
            groups.setdefault(getattr(weight, "ds_process_group", None) or processes.group.WORLD, False)
        mesh: Any = getattr(weight, "device_mesh", None)
        for dim, placement in enumerate(() if mesh is None else weight.placements):
            if mesh.size(dim) > 1 and not placement.is_replicate():
                is_tensor_parallel = (mesh.mesh_dim_names or ())[dim : dim + 1] == ("tp",)
                groups.setdefault(mesh.get_group(dim), not is_fsdp or is_tensor_parallel)
    cpu, found = torch.device("cpu"), list[RankGroup]()
    for group, shares in groups.items():
        takes_cpu = not weights or "cpu:" in processes.get_backend_config(group)
        found.append(RankGroup(group, shares, cpu if takes_cpu else weights[0].device))
    return tuple(sorted(found, key=lambda each: not each.share_inputs))


def rank() -> int:
    """Return the number of this process."""
    return processes.get_rank()


def least_of_ranks(ranks: RankGroup, values: Sequence[int]) -> list[int]:
    """Return the least number that any rank gives, for each of as many values on every rank: one all_reduce of int64.

    It waits for the other ranks. No lock may be held.
    """
    tensor = torch.tensor(values, dtype=torch.int64, device=ranks.device)
    processes.all_reduce(tensor, op=processes.ReduceOp.MIN, group=ranks.group)
    least: list[int] = tensor.tolist()
    return least
