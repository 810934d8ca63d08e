"""A digest of a model's weights and modules as they are now, cheap enough for every call.

Owns a flat list of the model's tensors, made once, and a few strided values of each, kept as views: changes made in
place show in the values, replaced tensors in identity and address. `(data_ptr, _version)` alone would not do: a fused
optimizer step changes weights and no version.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .weight_offload import file_state, offloaded_weights

_VALUES_PER_TENSOR = 8


class WeightFingerprint:
    """Reads the weights of one model.

    What 8 values of a tensor do not show, such as one changed row of an embedding, `verify=True` looks for.

    Args:
        model: held, never changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []  # as of the last `refresh`
        self.types: list[type[nn.Module]] = []  # of the modules, each once
        self._type_of: list[type[nn.Module]] = []  # module number -> its type then
        self._children: list[list[nn.Module | None]] = []  # module number -> its children then
        self._owners: list[tuple[Any, str, Tensor, int | None]] = []  # mapping, key, tensor found there, its address
        self._samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # strided views of the tensors
        self._unsampled: list[Tensor] = []  # told apart by version alone
        self._files: list[str] = []  # of weights that are on disk
        self._structure = b""
        self.unwatched: str | None = None  # name of a weight whose changes cannot be seen
        self.num_listings = 0  # counted when one begins; whoever derives something from it remembers the number
        self._is_listed = False  # False also when a listing was interrupted

    def refresh(self) -> None:
        """List the model again if it is not as listed.  Cost: one pass over flat lists."""
        if self._is_listed and self._is_as_listed():
            return
        self._is_listed = False
        self.num_listings += 1
        self.modules = list(self.model.modules())
        self._type_of = [type(module) for module in self.modules]
        self.types = list(dict.fromkeys(self._type_of))
        self._children = [list(module._modules.values()) for module in self.modules]
        self._owners, self._samples, self._unsampled = [], {}, []
        self.unwatched = None
        files = set()
        places = offloaded_weights(self.modules)
        names = []
        for module in self.modules:
            names.append(type(module).__qualname__)
            for owner, key, tensor in _weights_of(module):
                if tensor.device.type == "meta":
                    place = places.get((id(module), key))
                    if place is None:
                        self.unwatched = key
                    elif place.mapping is not None:
                        owner, key, tensor = place.mapping, place.key, place.mapping[place.key]
                    elif place.file is not None:
                        files.add(place.file)
                names.append(f"{key}{tuple(tensor.shape)}{tensor.dtype}{tensor.device}")
                self._owners.append((owner, key, tensor, _address(tensor)))
                for plain in _plain_tensors(tensor):
                    sample = _sample(plain)
                    if sample is None:
                        self._unsampled.append(plain)
                    else:
                        self._samples.setdefault((sample.device, sample.dtype), []).append(sample)
        self._structure = hashlib.sha256("\n".join(names).encode()).digest()
        self._files = sorted(files)
        self._is_listed = True

    def parts(self) -> Iterator[bytes]:
        """What the digest covers, as of the last `refresh`. One `torch.cat` and transfer for each device and dtype."""
        yield self._structure
        for samples in self._samples.values():
            with torch.no_grad():
                yield torch.cat(samples).view(torch.uint8).cpu().numpy().tobytes()
        yield repr([(_address(tensor), _version(tensor)) for tensor in self._unsampled]).encode()
        yield repr([file_state(path) for path in self._files]).encode()

    def device_types(self) -> set[str]:
        """Kinds of devices that hold weights."""
        return {device.type for device, _ in self._samples}

    def _is_as_listed(self) -> bool:
        for owner, key, tensor, address in self._owners:
            if owner.get(key) is not tensor or (address is not None and tensor.data_ptr() != address):
                return False
        if list(map(type, self.modules)) != self._type_of:
            return False
        return [list(module._modules.values()) for module in self.modules] == self._children


def _weights_of(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """The weights of a module: (mapping, key, tensor).

    Persistent buffers are weights; others are derived, and some forwards rewrite theirs.
    """
    persistent = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for owner, held in ((module._parameters, module._parameters), (module._buffers, persistent)):
        for name, tensor in held.items():
            if tensor is not None:
                yield owner, name, tensor


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a wrapper subclass (quantised weights) is made of; of any other tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        if isinstance(held := getattr(tensor, name), Tensor):  # a distributed tensor names its mesh, too
            yield from _plain_tensors(held)


def _sample(tensor: Tensor) -> Tensor | None:
    """A view of a few values spread over a tensor, which follows every change made in place; None without one."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return None
    with torch.no_grad():
        values = tensor.detach()
        if not values.is_contiguous():
            extent = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)) + 1
            if extent != values.numel():
                return None
            values = values.as_strided((values.numel(),), (1,))
        values = values.view(-1)
        step = max(1, values.numel() // _VALUES_PER_TENSOR)
        if tensor.dim() > 1:  # along a diagonal, or all values of a matrix would lie in its first column
            slanted = step + tensor.shape[-1] // _VALUES_PER_TENSOR
            step = slanted if slanted * (_VALUES_PER_TENSOR - 1) < values.numel() else step
        return values[::step][:_VALUES_PER_TENSOR]


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper subclass has no storage of its own
        return None


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count theirs
        return -1
