"""Computes a digest of a model's weights and modules, cheap enough for every call.

The model's tensors are listed once. Then two things are read of them, since neither shows every change:

- eight values of each tensor, which miss an optimizer step that changes few rows of an embedding;
- how often each tensor was changed, as torch and optimizers count it, which misses writes through `.data` or numpy.

The values mean the same in every process, the counts only in this one.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import compress, count, repeat
from operator import add, attrgetter, contains, is_, itemgetter
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..kv.transfers import read_bytes

_VALUES_PER_TENSOR = 8
_Layout = tuple[int, int, tuple[int, ...]]  # address, number of elements, strides
_Place = tuple[dict[str, Any], str] | str  # a mapping in host memory and the key in it, or the path of a file
# Names of functions that others put on a module in place of its class's.
REPLACED = frozenset({"forward", "get_image_features", "get_video_features"})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # size in bytes -> dtype


class _Weight(NamedTuple):
    """`_Weight` describes a weight as it was listed: `owner[key]` was `tensor`."""

    owner: Any
    key: str
    tensor: Tensor
    layout: _Layout | None
    alias: Tensor | None  # keeps the memory that the weight had, also after `p.data = ...`
    samples: list[Tensor]  # strided views
    counted: list[tuple[Tensor, int]]  # (part, base) of parts with a version; base + version differs for other values


class _Places(NamedTuple):
    """`_Places` says where weights were found, as columns.

    `owners[i][keys[i]]` was `tensors[i]`, and `laid[i]` lay at `addresses[i]`.

    Attributes:
        are_contiguous: whether each laid tensor was contiguous. How a contiguous tensor of as many elements is laid out
            follows from its shape.
        strided, strides: laid tensors that were not contiguous, and their strides.
    """

    owners: list[dict[str, Any]]
    keys: list[str]
    tensors: list[Tensor]
    laid: list[Tensor]
    addresses: list[int]
    sizes: list[int]
    are_contiguous: list[bool]
    strided: list[Tensor]
    strides: list[tuple[int, ...]]

    @classmethod
    def of(cls, weights: list[_Weight]) -> "_Places":
        """Return the places of these weights."""
        laid = [(weight.tensor, *weight.layout) for weight in weights if weight.layout is not None]
        strided = [(tensor, strides) for tensor, _, _, strides in laid if not tensor.is_contiguous()]
        return cls(
            [weight.owner for weight in weights],
            [weight.key for weight in weights],
            [weight.tensor for weight in weights],
            [tensor for tensor, _, _, _ in laid],
            [address for _, address, _, _ in laid],
            [size for _, _, size, _ in laid],
            [tensor.is_contiguous() for tensor, _, _, _ in laid],
            [tensor for tensor, _ in strided],
            [strides for _, strides in strided],
        )

    def are_as_found(self) -> bool:
        """Return whether each weight is the same tensor in the same memory."""
        return (
            all(map(is_, map(dict.get, self.owners, self.keys), self.tensors))
            and [*map(Tensor.data_ptr, self.laid)] == self.addresses
            and [*map(Tensor.numel, self.laid)] == self.sizes
            and [*map(Tensor.is_contiguous, self.laid)] == self.are_contiguous
            and [*map(Tensor.stride, self.strided)] == self.strides
        )


class _Structure(NamedTuple):
    """`_Structure` describes modules as columns: their types, attributes and children."""

    kinds: list[type[nn.Module]]
    attributes: list[dict[str, Any]]
    children: list[dict[str, nn.Module | None]]

    @classmethod
    def of(cls, modules: list[nn.Module]) -> "_Structure":
        """Return the structure of these modules."""
        attributes = [module.__dict__ for module in modules]
        return cls([*map(type, modules)], attributes, [dict(each["_modules"]) for each in attributes])

    def is_as_found(self, modules: list[nn.Module]) -> bool:
        """Return whether each module is of the same type and has the same children."""
        return [*map(type, modules)] == self.kinds and [*map(_children, self.attributes)] == self.children

    def with_functions(self) -> list[int]:
        """Return the numbers of the modules that have hooks or replaced functions."""
        attributes = self.attributes
        have_some = [*map(any, map(_HOOKS, attributes))]
        found = {*compress(count(), have_some)} if True in have_some else set()
        for name in REPLACED:
            found.update(compress(count(), map(contains, attributes, repeat(name))))
        return sorted(found)


_children = itemgetter("_modules")
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")


class Listing(NamedTuple):
    """`Listing` has a model's modules and tensors as they were found. It never changes, so it is read without a lock.

    Attributes:
        modules: all modules, in the order of `nn.Module.modules`.
        unwatched: name of a weight whose changes cannot be seen; None: there is none.
    """

    modules: list[nn.Module]
    found: _Structure  # structure of the modules
    weights: list[_Weight]
    places: _Places  # places of the weights
    counted: tuple[list[Tensor], list[int]]  # all tensors of weights with a version, and the base of each
    on_host: list[np.ndarray]  # samples of all weights in host memory, as integers
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]]  # samples of all other weights
    device_types: list[str]  # types of the devices that hold weights, and the CPU
    files: list[str]  # paths of the files of weights that are on disk
    structure: bytes
    unwatched: str | None

    def files_now(self) -> bytes:
        """Return times and sizes of the files that hold weights."""
        return repr([_file_state(path) for path in self.files]).encode()

    def values(self, frequencies: Iterable[Tensor]) -> bytes:
        """Return the values of the samples and of other tensors, [N] each.  Cost: one wait for each accelerator."""
        samples = {kind: [*same] for kind, same in self.samples.items()}
        for each in frequencies:
            samples.setdefault((each.device, each.dtype), []).append(each)
        on_host = np.concatenate(self.on_host).tobytes() if self.on_host else b""
        return on_host + read_bytes(samples)

    def versions(self) -> list[int]:
        """Return a number for each tensor with a version; the number grows with each change.

        No other listing has had the same number for other values of the tensor.
        """
        tensors, bases = self.counted
        return [*map(add, bases, map(_version, tensors))]

    def changed_modules(self) -> list[int] | None:
        """Return the numbers of the modules with hooks or replaced functions.

        None if the model no longer has these tensors in these modules.

        Cost: a few passes over flat lists. They are made for each call, and find little of the lists in the processor's
        caches.
        """
        if self.places.are_as_found() and self.found.is_as_found(self.modules):
            return self.found.with_functions()
        return None


_version = attrgetter("_version")
NOT_LISTED = Listing([], _Structure.of([]), [], _Places.of([]), ([], []), [], {}, [], [], b"", None)


class WeightFingerprint:
    """`WeightFingerprint` lists the weights of one model, which it holds and never changes. The caller holds a lock."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.num_steps = 0  # steps of optimizers on these weights
        self._listing = NOT_LISTED
        self._numbers = count(1)
        _watching.append(ref(self, _watching.remove))
        _watch_optimizers()

    def listing(self) -> tuple[Listing, list[int]]:
        """Return the model's listing, made anew if the model has changed, and the listing's `changed_modules`.

        For a new listing, all modules are named as changed.
        """
        listing = self._listing
        changed = listing.changed_modules() if listing.modules else None
        if changed is None:
            self._listing = listing = self._list()
            changed = [*range(len(listing.modules))]
        return listing, changed

    def _list(self) -> Listing:
        modules, unwatched = list(self.model.modules()), None
        before = {(id(weight.owner), weight.key): weight for weight in self._listing.weights}
        places = _offloaded_weights(modules)
        names, weights, files, on_host, samples = [], [], set(), [], defaultdict(list)
        for module in modules:
            names.append(type(module).__qualname__)
            for owner, key, tensor in _weights_of(module):
                if tensor.device.type == "meta":
                    place = places.get((id(module), key))
                    if place is None:
                        unwatched = key
                    elif isinstance(place, str):
                        files.add(place)
                    else:
                        owner, key = place
                        tensor = owner[key]
                names.append(f"{key}{tuple(tensor.shape)}{tensor.dtype}{tensor.device}")
                weight = self._listed(owner, key, tensor, before.get((id(owner), key)))
                weights.append(weight)
                for sample in weight.samples:
                    if sample.device.type == "cpu" and (integers := _INTEGERS.get(sample.dtype.itemsize)) is not None:
                        on_host.append(sample.view(integers).numpy())
                    else:
                        samples[sample.device, sample.dtype].append(sample)
        structure = hashlib.sha256("\n".join(names).encode()).digest()
        counted = [each for weight in weights for each in weight.counted]
        device_types = sorted({"cpu", *(device.type for device, _ in samples)})
        return Listing(
            modules,
            _Structure.of(modules),
            weights,
            _Places.of(weights),
            ([tensor for tensor, _ in counted], [base for _, base in counted]),
            on_host,
            dict(samples),
            device_types,
            sorted(files),
            structure,
            unwatched,
        )

    def _listed(self, owner: Any, key: str, tensor: Tensor, before: _Weight | None) -> _Weight:
        """Describe the weight as it is now. With the values of `before` in other memory, it counts as unchanged."""
        layout = _layout(tensor)
        if before is not None and before.tensor is tensor and before.layout == layout:
            return before
        plain = list(plain_tensors(tensor))
        samples = [sample for part in plain if (sample := _sample(part)) is not None]
        # inference tensors have no version; meta tensors have no values, and each forward may replace them
        versioned = [part for part in plain if not part.is_inference() and part.device.type != "meta"]
        counted = [(part, (next(self._numbers) << 32) - part._version) for part in versioned]
        alias = tensor.detach() if samples and plain[0] is tensor else None
        if before is not None and before.counted and counted and _are_equal(before.alias, alias):
            known, base = before.counted[0]
            counted = [(tensor, base + known._version - tensor._version)]
        return _Weight(owner, key, tensor, layout, alias, samples, counted)


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


def _weights_of(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield (mapping, key, tensor) for each parameter and persistent buffer.

    Other buffers are derived, or scratch memory of forwards.
    """
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
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return None
    values = tensor.detach()
    extent = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)) + 1
    if extent == values.numel():
        values = values.as_strided((extent,), (1,))
    while values.dim() > 1:  # memory with gaps, which no single stride covers
        values = values.diagonal()
    step = max(1, values.numel() // _VALUES_PER_TENSOR)
    if tensor.dim() > 1:  # a multiple of the row length would read one column alone
        slanted = step + tensor.shape[-1] // _VALUES_PER_TENSOR
        step = slanted if slanted * (_VALUES_PER_TENSOR - 1) < values.numel() else step
    return values[::step][:_VALUES_PER_TENSOR]


def _layout(tensor: Tensor) -> _Layout | None:
    """Return what `p.data = ...` changes; None for a wrapper subclass, which has no storage of its own."""
    try:
        return tensor.data_ptr(), tensor.numel(), tensor.stride()
    except RuntimeError:
        return None


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors have the same values; False where that cannot be said."""
    try:
        return one is not None and other is not None and torch.equal(one, other)
    except RuntimeError:  # dtypes that are only stored, such as float4, or two devices
        return False


def _offloaded_weights(modules: Iterable[nn.Module]) -> dict[tuple[int, str], _Place]:
    """Return where each offloaded weight that is found is loaded from.

    Returns:
        (id of a module, name of its parameter or buffer) -> place.
    """
    places = {}
    for module in modules:
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            weights_map = getattr(each, "weights_map", None)
            inside = module.named_modules() if getattr(each, "place_submodules", False) else [("", module)]
            for path, child in inside if weights_map is not None else ():
                for name in (*child._parameters, *child._buffers):
                    place = _find(weights_map, f"{path}.{name}" if path else name)
                    if place is not None:
                        places[id(child), name] = place
    return places


def _file_state(path: str) -> tuple[str, int, int]:
    """Return path, size and time of the last write of a file; zeros for a file that is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, state.st_size, state.st_mtime_ns


def _find(weights_map: Any, name: str) -> _Place | None:
    """Return the place of the weight that a hook loads as `weights_map[name]`; None if it is not found."""
    while hasattr(weights_map, "prefix") and hasattr(weights_map, "dataset"):
        name, weights_map = f"{weights_map.prefix}{name}", weights_map.dataset
    held = getattr(weights_map, "state_dict", weights_map)
    if isinstance(held, dict) and isinstance(held.get(name), Tensor):
        return held, name
    index = getattr(weights_map, "index", None)
    if isinstance(index, Mapping) and name in index:
        file = index[name].get("safetensors_file")
        return str(file) if file else os.path.join(str(weights_map.save_folder), f"{name}.dat")
    return None
