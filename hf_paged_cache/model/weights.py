"""Lists a model's modules and weights, and reads from them what shows a change, cheaply enough for every call.

Of each weight two things are read, since neither shows every change:

- eight values, which miss an optimizer step that changes few rows of an embedding;
- how often it was changed, as torch and optimizers count it, which misses writes through `.data` or numpy.

The values mean the same in every process, the counts only in this one.
"""

import hashlib
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import compress, count, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..kv.tensors import read_bytes

_VALUES_PER_TENSOR = 8
_Layout = tuple[int, int, tuple[int, ...]]  # address, number of elements, strides
# Names of functions that others put on a module in place of its class's.
REPLACED = frozenset({"forward", "get_image_features", "get_video_features"})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # size in bytes -> dtype
_CHILDREN = itemgetter("_modules")
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")
_VERSION = attrgetter("_version")


class Weight(NamedTuple):
    """`Weight` describes a weight as it was listed: `owner[key]` was `tensor`.

    Attributes:
        layout: what `tensor.data = ...` changes; None for a wrapper subclass, which has no memory of its own.
        samples: strided views of a few values. They hold the memory, so that no other tensor comes to lie there.
        counted: parts whose changes torch counts.
        number: number of this tensor in this memory, which no other weight has had; 0: changes are not counted.
    """

    owner: dict[str, Any]
    key: str
    tensor: Tensor
    layout: _Layout | None
    samples: list[Tensor]
    counted: list[Tensor]
    number: int


class Listing:
    """`Listing` has a model's modules and weights as they were found. It never changes, so it is read without a lock.

    Attributes:
        modules: all modules, in the order of `nn.Module.modules`.
        files: paths of the files of weights that are on disk.
        unwatched: name of a weight whose changes cannot be seen; None: there is none.
        device_types: types of the devices that hold weights, and the CPU.
    """

    def __init__(
        self, modules: list[nn.Module], weights: list[Weight], names: list[str], files: list[str], unwatched: str | None
    ) -> None:
        self.modules, self.weights, self.files, self.unwatched = modules, weights, files, unwatched
        self._attributes = [module.__dict__ for module in modules]
        self._kinds = [*map(type, modules)]
        self._children = [dict(each["_modules"]) for each in self._attributes]
        self._owners = [weight.owner for weight in weights]
        self._keys = [weight.key for weight in weights]
        self._tensors = [weight.tensor for weight in weights]
        laid = [(weight.tensor, *weight.layout) for weight in weights if weight.layout is not None]
        self._laid = [tensor for tensor, _, _, _ in laid]
        self._addresses = [address for _, address, _, _ in laid]
        self._sizes = [size for _, _, size, _ in laid]
        self._strides = [strides for _, _, _, strides in laid]
        self._counted = [part for weight in weights for part in weight.counted]
        self._on_host: list[np.ndarray] = []  # samples in host memory, as integers
        self._samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)  # the others
        for sample in [sample for weight in weights for sample in weight.samples]:
            if sample.device.type == "cpu" and (integers := _INTEGERS.get(sample.dtype.itemsize)) is not None:
                self._on_host.append(sample.view(integers).numpy())
            else:
                self._samples[sample.device, sample.dtype].append(sample)
        self.device_types = sorted({"cpu", *(device.type for device, _ in self._samples)})
        numbers = [str(weight.number) for weight in weights]
        self._names = hashlib.sha256("\n".join([*names, *numbers]).encode()).digest()

    def is_as_found(self) -> bool:
        """Return whether the model has these modules, and these weights in the same memory.

        It is asked in each call, so it passes over flat lists.
        """
        return (
            all(map(is_, map(dict.get, self._owners, self._keys), self._tensors))
            and [*map(Tensor.data_ptr, self._laid)] == self._addresses
            and [*map(Tensor.numel, self._laid)] == self._sizes
            and [*map(Tensor.stride, self._laid)] == self._strides
            and [*map(type, self.modules)] == self._kinds
            and [*map(_CHILDREN, self._attributes)] == self._children
        )

    def with_functions(self) -> list[int]:
        """Return the numbers of the modules that have hooks or replaced functions."""
        have_some = [*map(any, map(_HOOKS, self._attributes))]
        found = {*compress(count(), have_some)} if True in have_some else set()
        for name in REPLACED:
            found.update(compress(count(), map(contains, self._attributes, repeat(name))))
        return sorted(found)

    def state(self, frequencies: Iterable[Tensor]) -> list[bytes]:
        """Return what changes with the weights and with `frequencies`, [N] each.

        Cost: one wait for each accelerator.
        """
        samples = {kind: [*same] for kind, same in self._samples.items()}
        for each in frequencies:
            samples.setdefault((each.device, each.dtype), []).append(each)
        on_host = np.concatenate(self._on_host).tobytes() if self._on_host else b""
        files = repr([_file_state(path) for path in self.files]).encode() if self.files else b""
        return [self._names, on_host + read_bytes(samples), files, array("q", map(_VERSION, self._counted)).tobytes()]


class WeightFingerprint:
    """`WeightFingerprint` lists the weights of one model, which it holds and never changes. The caller holds a lock.

    Attributes:
        num_steps: number of steps of optimizers on these weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.num_steps = model, 0
        self._numbers = count(1)
        self._listing = Listing([], [], [], [], None)
        _watching.append(ref(self, _watching.remove))
        _watch_optimizers()

    def listing(self) -> Listing:
        """Return the model's listing, made anew if the model has changed."""
        if not self._listing.modules or not self._listing.is_as_found():
            self._listing = self._list()
        return self._listing

    def _list(self) -> Listing:
        modules = list(self.model.modules())
        loaded, stores = _offloaded(modules)
        before = {(id(weight.owner), weight.key): weight for weight in self._listing.weights}
        offloaded = [(held, key, held[key]) for held in map(_in_memory, stores) for key in held]
        names, weights = list[str](), list[Weight]()
        for name, found in [("", offloaded), *((type(each).__qualname__, [*_weights_of(each)]) for each in modules)]:
            names.append(name)
            for owner, key, tensor in found:
                names.append(f"{key}{tuple(tensor.shape)}{tensor.dtype}{tensor.device}")
                weights.append(self._listed(owner, key, tensor, before.get((id(owner), key))))
        not_loaded = [weight for module in modules if id(module) not in loaded for weight in _weights_of(module)]
        unwatched = next((key for _, key, tensor in not_loaded if tensor.is_meta), None)
        files = sorted({path for each in stores for path in _files_of(each)})
        return Listing(modules, weights, names, files, unwatched)

    def _listed(self, owner: dict[str, Any], key: str, tensor: Tensor, before: Weight | None) -> Weight:
        """Describe a weight as it is now.

        Args:
            before: the weight that was last listed there.
        """
        layout = _layout(tensor)
        if before is not None and before.tensor is tensor and before.layout == layout:
            return before
        plain = list(plain_tensors(tensor))
        samples = [sample for part in plain if (sample := _sample(part)) is not None]
        # inference tensors have no version; meta tensors have no values, and each forward may replace them
        counted = [part for part in plain if not part.is_inference() and not part.is_meta]
        return Weight(owner, key, tensor, layout, samples, counted, next(self._numbers) if counted else 0)


_watching: list[ref[WeightFingerprint]] = []


@cache
def _watch_optimizers() -> None:
    """Register one hook after every optimizer step of this process. The hook stays, and keeps no fingerprint alive."""
    register_optimizer_step_post_hook(torch.compiler.disable(_count_step))  # type: ignore[no-untyped-call]


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count an optimizer's step: a fused optimizer changes no version, and may change few rows of an embedding."""
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for reference in tuple(_watching):  # references of collected fingerprints leave meanwhile
        fingerprint = reference()
        if fingerprint is not None and any(id(weight.tensor) in stepped for weight in fingerprint._listing.weights):
            fingerprint.num_steps += 1


def _weights_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (mapping, key, tensor) for each parameter and persistent buffer; other buffers are derived, or scratch."""
    for owner in (module._parameters, module._buffers):
        for name, tensor in owner.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
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


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a view of a few values spread over a tensor; None if the tensor has no values here or is sparse."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
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


def _layout(tensor: Tensor) -> _Layout | None:
    try:
        return tensor.data_ptr(), tensor.numel(), tensor.stride()
    except RuntimeError:
        return None


def _offloaded(modules: Iterable[nn.Module]) -> tuple[set[int], list[Any]]:
    """Return ids of modules whose weights accelerate's hooks load for each forward, and the mappings they are in."""
    loaded, stores = set[int](), dict[int, Any]()
    for module in modules:
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            store = getattr(each, "weights_map", None)
            if store is None:
                continue
            while hasattr(store, "prefix") and hasattr(store, "dataset"):
                store = store.dataset
            if isinstance(_in_memory(store), dict):  # changes of any other mapping could not be seen
                loaded.update(map(id, module.modules() if getattr(each, "place_submodules", False) else [module]))
                stores[id(store)] = store
    return loaded, [*stores.values()]


def _in_memory(store: Any) -> Any:
    """Return the weights that a mapping of accelerate has in host memory, by name."""
    return getattr(store, "state_dict", store)


def _files_of(store: Any) -> Iterator[str]:
    """Yield the paths of the files from which a mapping of accelerate loads weights."""
    for name, described in getattr(store, "index", {}).items():
        yield str(described.get("safetensors_file") or os.path.join(str(store.save_folder), f"{name}.dat"))


def _file_state(path: str) -> tuple[str, int, int]:
    """Return path, size and time of the last write of a file, zeros if it is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, state.st_size, state.st_mtime_ns
