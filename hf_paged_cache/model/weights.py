"""Lists a model's modules and weights, and reads from them what shows a change, cheaply enough for every call.

Of each weight two things are read, since neither shows every change:

- eight values, which miss an optimizer step that changes few rows of an embedding;
- how often it was changed, as torch and optimizers count it, which misses writes through `.data` or numpy.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, count, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import numpy as np
import torch
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
_numbers = count(1)


class Listing:
    """`Listing` has a model's modules and weights as they were found. What each call asks passes over flat lists.

    Attributes:
        number: number of these modules, with these weights in this memory, which nothing else has had.
        weights: (name on its module, tensor) of each parameter and persistent buffer; offloaded ones come first.
        frequencies: rotary frequencies that do not depend on length.
        unwatched: name of a weight whose changes cannot be seen, as on a disk.
        device_types: types of the devices that hold weights, and the CPU.
    """

    def __init__(self, model: nn.Module, before: "Listing | None" = None) -> None:
        self.modules = modules = list(model.modules())
        self._attributes = [module.__dict__ for module in modules]
        self._kinds = [*map(type, modules)]
        self._classes = [*dict.fromkeys(self._kinds)]
        self._children = [dict(each["_modules"]) for each in self._attributes]
        loaded, in_memory = _offloaded(modules)
        not_loaded = _weights_of([module for module in modules if id(module) not in loaded])
        self.unwatched = next((key for _, key, each in not_loaded if each is not None and each.is_meta), None)
        weights = [(held, key, held[key]) for held in in_memory for key in held]
        weights += _weights_of(modules)
        rotary = [(module, name) for module in modules for name in static_frequencies(module)]
        found = [*weights, *((module._buffers, name, module._buffers[name]) for module, name in rotary)]
        self._owners, self._keys = [owner for owner, _, _ in found], [key for _, key, _ in found]
        self._tensors = [each for _, _, each in found]
        self.weights = [(key, each) for _, key, each in weights if each is not None]
        self.frequencies = [each for _, _, each in found[len(weights) :] if each is not None and not each.is_meta]
        self._rotary = [module.__dict__ for module, _ in rotary]
        self._scales = [f"{name.removesuffix('inv_freq')}attention_scaling" for _, name in rotary]
        # tensors of `meta` may be others after each forward
        here = [each for _, _, each in found if each is not None and not each.is_meta]
        self._parts = [part for each in here for part in plain_tensors(each)]
        self._laid = [part for part in self._parts if _has_memory(part)]
        self._layout = _layout(self._laid)
        self._counted = [part for part in self._parts if not part.is_inference()]  # the others have no versions
        self._on_host: list[np.ndarray] = []  # samples in host memory, as integers
        self._samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # the others
        for sample in map(_sample, self._laid):
            if sample.device.type == "cpu" and (integers := _INTEGERS.get(sample.dtype.itemsize)) is not None:
                self._on_host.append(sample.view(integers).numpy())
            else:
                self._samples.setdefault((sample.device, sample.dtype), []).append(sample)
        self.device_types = sorted({"cpu", *(device.type for device, _ in self._samples)})
        self.number: int = next(_numbers)
        if before is not None and self._description() == before._description():
            self.number = before.number

    def is_as_found(self) -> bool:
        """Return whether the model has these modules, and these weights in the same memory."""
        return (
            all(map(is_, map(dict.get, self._owners, self._keys), self._tensors))
            and _layout(self._laid) == self._layout
            and [*map(type, self.modules)] == self._kinds
            and [*map(_CHILDREN, self._attributes)] == self._children
        )

    def functions(self) -> tuple[object, ...]:
        """Return what differs where other functions compute the model: hooks' numbers, and forwards."""
        hooks = chain(map(_HOOKS, self._attributes), map(_PRE_HOOKS, self._attributes))  # most are empty
        replaced = [[*map(dict.get, self._attributes, repeat(name))] for name in REPLACED]
        of_all = *everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks
        return [*chain.from_iterable(filter(None, hooks))], replaced, of_all, [*map(_FORWARD, self._classes)]

    def values(self) -> tuple[bytes, list[int]]:
        """Return what changes with the weights in place.  Cost: one wait for each accelerator."""
        on_host = np.concatenate(self._on_host).tobytes() if self._on_host else b""
        elsewhere = read_bytes(self._samples) if self._samples else b""
        return on_host + elsewhere, [*map(_VERSION, self._counted)]

    def scales(self) -> list[object]:
        """Return the factors of the cosines and sines of `frequencies`."""
        return [*map(dict.get, self._rotary, self._scales)]

    def _description(self) -> tuple[object, ...]:
        return self._kinds, self._children, self._layout, [*map(id, self._parts)]


# What has a `listing`, and counts in `num_steps` the steps of optimizers on its weights.
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
            watching.num_steps += 1


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


def _layout(tensors: list[Tensor]) -> tuple[object, ...]:
    """Return what `tensor.data = ...` changes."""
    return [*map(Tensor.data_ptr, tensors)], [*map(Tensor.numel, tensors)], [*map(Tensor.stride, tensors)]


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
    return values[::step][:_VALUES_PER_TENSOR]


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
