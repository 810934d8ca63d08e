"""Lists a model's modules and weights, and reads from them what shows a change, cheaply enough for every call.

It also finds the processes that the weights are split over.

Of each weight two things are read, since neither shows every change:

- eight values, which miss an optimizer step that changes few rows of an embedding;
- how often it was changed, as torch and optimizers count it, which misses writes through `.data` or numpy.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as processes
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..kv.tensors import read_bytes
from .rope import static_frequencies

_VALUES_PER_TENSOR = 8
# Names of functions that others put on a module in place of its class's.
REPLACED = ("forward", "get_image_features", "get_video_features")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # size in bytes -> dtype
_CHILDREN = itemgetter("_modules")
_HOOKS = itemgetter("_forward_hooks")
_PRE_HOOKS = itemgetter("_forward_pre_hooks")
_FORWARD = attrgetter("forward")
_VERSION = attrgetter("_version")


class Reading(NamedTuple):
    """`Reading` is what a listing reads for a call. It is compared with the one before."""

    values: bytes  # a few of each weight
    versions: list[int]  # how often torch has counted a write to each
    functions: list[Any]  # what differs where others compute the model: hooks' numbers, and forwards
    scales: list[object]  # factors of the cosines and sines of `frequencies`


class Listing:
    """`Listing` has a model's modules and weights as they were found. What each call asks passes over flat lists."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules = list(model.modules())
        self._attributes = [module.__dict__ for module in modules]
        self._kinds = [*map(type, modules)]
        self._classes = [*dict.fromkeys(self._kinds)]
        self._children = [dict(each["_modules"]) for each in self._attributes]
        loaded, in_memory = _offloaded(modules)
        not_loaded = _weights_of([module for module in modules if id(module) not in loaded])
        # name of a weight whose changes cannot be seen, as on a disk
        self.unwatched = next((key for _, key, each in not_loaded if each is not None and each.is_meta), None)
        weights = [(held, key, held[key]) for held in in_memory for key in held]
        weights += _weights_of(modules)
        rotary = [(module, name) for module in modules for name in static_frequencies(module)]
        found = [*weights, *((module._buffers, name, module._buffers[name]) for module, name in rotary)]
        # tensors of `meta` may be others after each forward: accelerate's hooks that load them are watched
        self._loaded = self._attributes if any(each is not None and each.is_meta for _, _, each in found) else []
        self._loaders = [each.get("_hf_hook") for each in self._loaded]
        here = [each for each in found if each[2] is None or not each[2].is_meta]
        self._owners, self._keys = [owner for owner, _, _ in here], [key for _, key, _ in here]
        self._tensors = [each for _, _, each in here]
        # (name on its module, tensor) of each parameter and persistent buffer; offloaded ones come first
        self.weights = [(key, each) for _, key, each in weights if each is not None]
        # rotary frequencies that do not depend on length
        self.frequencies = [each for _, _, each in found[len(weights) :] if each is not None and not each.is_meta]
        self._rotary = [module.__dict__ for module, _ in rotary]
        self._scales = [f"{name.removesuffix('inv_freq')}attention_scaling" for _, name in rotary]
        parts = [part for each in self._tensors if each is not None for part in plain_tensors(each)]
        self._laid = [part for part in parts if _has_memory(part)]
        # what `tensor.data = ...` changes
        self._places = [*map(Tensor.data_ptr, self._laid)]
        self._sizes, self._strides = [*map(Tensor.numel, self._laid)], [*map(Tensor.stride, self._laid)]
        self._counted = [part for part in parts if not part.is_inference()]  # the others have no versions
        self._samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for sample in map(_sample, self._laid):
            self._samples.setdefault((sample.device, sample.dtype), []).append(sample)
        self.device_types = sorted({"cpu", *(device.type for device, _ in self._samples)})

    def is_as_found(self) -> bool:
        """Return whether the model has these modules, and these weights in the same memory."""
        return (
            all(map(is_, map(dict.get, self._owners, self._keys), self._tensors))
            and [*map(Tensor.data_ptr, self._laid)] == self._places
            and [*map(Tensor.numel, self._laid)] == self._sizes
            and [*map(Tensor.stride, self._laid)] == self._strides
            and [*map(type, self.modules)] == self._kinds
            and [*map(_CHILDREN, self._attributes)] == self._children
            and [*map(dict.get, self._loaded, repeat("_hf_hook"))] == self._loaders
        )

    def read(self) -> Reading:
        """Read what changes while the model is as found.  Cost: one wait for each accelerator."""
        attributes = self._attributes
        hooks = chain(map(_HOOKS, attributes), map(_PRE_HOOKS, attributes))  # most are empty
        functions = [*chain.from_iterable(filter(None, hooks)), *map(_FORWARD, self._classes)]
        for name in REPLACED:
            functions += map(dict.get, attributes, repeat(name))
        functions += (*everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks)
        scales = [*map(dict.get, self._rotary, self._scales)]
        values = read_bytes(self._samples) if self._samples else b""
        return Reading(values, [*map(_VERSION, self._counted)], functions, scales)


# What has a `listing`, and counts in `num_changes` the steps of optimizers on its weights.
_watching: list[ref[Any]] = []


def watch_optimizers(watching: Any) -> None:
    """Count all steps of optimizers from now on: fused ones change no version, and may change few rows."""
    _watching.append(ref(watching, _watching.remove))
    _hook_optimizers()


@cache
def _hook_optimizers() -> None:
    """Register one hook after every optimizer step of this process. The hook stays, and keeps nobody alive."""
    register_optimizer_step_post_hook(torch.compiler.disable(_count_step))  # type: ignore[no-untyped-call]


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for reference in tuple(_watching):  # references of what is collected leave meanwhile
        watching = reference()
        if watching is not None and any(id(tensor) in stepped for _, tensor in watching.listing.weights):
            watching.num_changes += 1


def _weights_of(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (mapping, key, tensor or None) for parameters and persistent buffers; others are derived, or scratch."""
    for module in modules:
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if name not in module._non_persistent_buffers_set:
                    yield owner, name, tensor


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors inside a wrapper subclass (quantised weights); any other tensor is yielded itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        if isinstance(held := getattr(tensor, name), Tensor):  # a distributed tensor names its mesh, too
            yield from plain_tensors(held)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory of its own: sparse ones, and some that wrap others, do not."""
    try:
        return tensor.layout == torch.strided and tensor.data_ptr() >= 0
    except RuntimeError:
        return False


def _sample(tensor: Tensor) -> Tensor:
    """Return a view of a few values spread over a tensor. It holds the memory, so that no other comes to lie there."""
    values = tensor.detach()
    if values.is_contiguous():
        values = values.view(-1)
    while values.dim() > 1:
        values = values.diagonal()
    step = max(1, values.numel() // _VALUES_PER_TENSOR)
    if tensor.dim() > 1:  # a multiple of the row length would read one column alone
        slanted = step + tensor.shape[-1] // _VALUES_PER_TENSOR
        step = slanted if slanted * (_VALUES_PER_TENSOR - 1) < values.numel() else step
    values = values[::step][:_VALUES_PER_TENSOR]
    return values.view(_INTEGERS.get(values.dtype.itemsize, values.dtype))  # few dtypes are read together


def _offloaded(modules: Iterable[nn.Module]) -> tuple[set[int], list[dict[str, Any]]]:
    """Say what accelerate's hooks load from host memory for each forward: ids of modules, and weights."""
    loaded, held = set[int](), dict[int, dict[str, Any]]()
    for module in modules:
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            store: Any = getattr(each, "weights_map", None)
            while hasattr(store, "prefix") and hasattr(store, "dataset"):
                store = store.dataset
            in_memory = getattr(store, "state_dict", store)
            if isinstance(in_memory, dict) and not getattr(store, "index", None):  # else a change could not be seen
                loaded.update(map(id, module.modules() if getattr(each, "place_submodules", False) else [module]))
                held[id(in_memory)] = in_memory
    return loaded, [*held.values()]


class RankGroup(NamedTuple):
    """`RankGroup` is the processes (*ranks*) among which weights are split: all must run as many forwards."""

    group: Any  # of torch.distributed
    share_inputs: bool  # each is passed the same tokens (tensor parallelism); else its own (FSDP, DeepSpeed's ZeRO 3)
    device: torch.device  # whose tensors the group's backend takes


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
