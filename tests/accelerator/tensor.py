"""A tensor that says it lies on a simulated device: its data are a tensor of the CPU, which every operation runs on."""

from __future__ import annotations

from typing import Any

import torch

from .log import EVENT, LAUNCH, TRANSFER, WAIT, note
from .memory import NUM_DEVICES, allocation_of

aten = torch.ops.aten

# The host reads what they compute, or the size of what they return.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# They take a number of the host (a tensor of no dimensions) beside tensors of a device, as every pointwise operation does.
_TAKING_NUMBERS = {
    "aten::copy_",
    "aten::fill_",
    "aten::fill",
    "aten::where",
    "aten::masked_fill",
    "aten::masked_fill_",
    *_INDEXING,
}
# What a GPU's kernels sum in an order that depends on the shapes; and `histc`, which a CPU has for no integers.
_WIDENED = {
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_softmax", "aten::_safe_softmax"),
    "aten::histc",
}


class SimulatedTensor(torch.Tensor):
    """`_data` (CPU) seen as a tensor of a simulated device."""

    _data: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device) -> SimulatedTensor:
        allocation = allocation_of(data, device)  # first: it may be refused
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
        )
        self._data, self._allocation = data, allocation
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self._data.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor of a simulated device to numpy: copy it to the host first")
        return self.cpu().numpy()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: SimulatedTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # sizes, strides, dtype
        self._data, self._allocation = other._data, other._allocation

    def __repr__(self) -> str:  # type: ignore[override]  # no wait is logged
        return f"SimulatedTensor({self._data!r}, device={str(self.device)!r})"


class _Operation:
    """What is known of one operation of PyTorch."""

    def __init__(self, func: Any) -> None:
        self.full_name = func._schema.name  # "aten::add_"
        self.name = func._overloadpacket.__name__  # "add_"
        self.is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        self.is_mutable = func._schema.is_mutable
        self.takes_numbers = torch.Tag.pointwise in func.tags or self.full_name in _TAKING_NUMBERS


_operations: dict[Any, _Operation] = {}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of which an argument lies on a device, and note what a device would have had to do."""
    operation = _operations.get(func)
    if operation is None:
        operation = _operations[func] = _Operation(func)
    if operation.is_composite:
        return func.decompose(*args, **kwargs)  # inference mode passes them on whole
    name = operation.full_name
    if name == "aten::_to_copy":
        return _to_copy(*args, **kwargs)
    if name == "aten::copy_":
        return copy(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    owners: dict[int, SimulatedTensor] = {}  # id of data -> the tensor that they are of
    target: list[torch.device] = []

    def inner(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            if isinstance(value, SimulatedTensor):
                owners[id(value._data)] = value
                return value._data
        elif isinstance(value, torch.device):
            target.append(value)
            return _HOST
        return value

    args, kwargs = _each(args, inner), _each(kwargs, inner)
    device = _one_device(func, operation, tensors)
    if name in _INDEXING:
        _note_indexing(operation.name, device, tensors, args)
    elif name in _WAITING and not (name == "aten::repeat_interleave" and kwargs.get("output_size") is not None):
        wait(operation.name, device)
    if target and target[0].type == "sim":
        device = located(target[0])
    shapes = [owner.shape for owner in owners.values()] if operation.is_mutable else []
    out = (_widened if name in _WIDENED else _computed)(func, args, kwargs)
    if shapes and shapes != [owner._data.shape for owner in owners.values()]:
        raise NotImplementedError(f"{func} resizes a tensor of a simulated device")
    given = {tensor._allocation for tensor in owners.values()}
    is_new = operation.is_mutable

    def outer(value: Any) -> Any:
        nonlocal is_new
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in owners:
            return owners[id(value)]
        result = SimulatedTensor(value, device)
        is_new = is_new or result._allocation not in given
        return result

    result = _each(out, outer)
    if (is_new or not isinstance(result, torch.Tensor | list | tuple)) and name != "aten::_local_scalar_dense":
        launch(operation.name, device)
    return result


_HOST = torch.device("cpu")


_NUMBERS = frozenset((int, float, bool, str, type(None)))  # no `function` does anything to them


def _each(value: Any, function: Any) -> Any:
    """`function` of each value in lists, tuples and dictionaries."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([part if type(part) in _NUMBERS else _each(part, function) for part in value])
    if isinstance(value, list | tuple):
        return kind([_each(part, function) for part in value])
    if isinstance(value, dict):
        return {name: _each(part, function) for name, part in value.items()} if value else value
    return function(value)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The data stay tensors that autograd knows: whether theirs may be changed is for the tensors round them to say."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _widened(func: Any, args: Any, kwargs: Any) -> Any:
    """In 64 bits and then rounded, so that a sum is the same whatever else is computed beside it, to the bit."""
    asked: list[torch.dtype] = []
    given: list[torch.dtype] = []

    def wide(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            asked.append(value)
            return torch.float64
        if isinstance(value, torch.Tensor):
            given.append(value.dtype)
            return value.double()
        return value

    args, kwargs = _each(args, wide), _each(kwargs, wide)
    return _computed(func, args, kwargs).to((asked or given)[0])


def _one_device(func: Any, operation: _Operation, tensors: list[torch.Tensor]) -> torch.device:
    """Where `func` runs; raises what CUDA raises where its tensors lie on several devices."""
    if len(tensors) == 1:
        return tensors[0].device
    devices = list({tensor.device: None for tensor in tensors if isinstance(tensor, SimulatedTensor)})
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, SimulatedTensor):
            continue
        if operation.takes_numbers and not tensor.dim() and (position or not operation.is_mutable):
            continue
        if operation.full_name in _INDEXING and position and not tensor.is_floating_point():
            continue  # indices may lie on the host: they are moved
        devices.append(tensor.device)
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {devices[0]} and {devices[1]}! "
            f"(when checking arguments for {func})"
        )
    return devices[0]


def _note_indexing(name: str, device: torch.device, tensors: list[torch.Tensor], args: Any) -> None:
    """Indices of the host are moved, and a mask is one whose places the host must know."""
    num_indices = sum(index is not None for index in args[1])
    for index in tensors[1 : 1 + num_indices]:
        is_of_device = isinstance(index, SimulatedTensor)
        if not is_of_device and index.dim():
            note(TRANSFER, name, device, index.nbytes, is_blocking=True)
        if is_of_device and index.dtype in (torch.bool, torch.uint8):
            fills = "put" in name and not args[2].dim() and num_indices == 1  # CUDA writes one value without looking
            if not fills:
                wait(f"{name} with a mask", device)


# ------------------------------------------------------------------------------------------------------------------ copies


class Queue:
    """What a device has been given and may not have done: copies to the host arrive when the host waits."""

    def __init__(self) -> None:
        self.given = 0  # operations and copies, so far
        self._copies: list[
            tuple[int, torch.Tensor, torch.Tensor]
        ] = []  # when given, destination on the host, what to write

    def give(self) -> None:
        self.given += 1

    def give_copy(self, destination: torch.Tensor, data: torch.Tensor) -> None:
        self.give()
        self._copies.append((self.given, destination, data))

    def finish(self, until: int | None = None) -> None:
        """All that was given before `until`; None: all of it."""
        while self._copies and (until is None or self._copies[0][0] <= until):
            _, destination, data = self._copies.pop(0)
            with torch.inference_mode(destination.is_inference()), torch.no_grad():
                destination.copy_(data)


_queues = tuple(Queue() for _ in range(NUM_DEVICES))


def wait(operation: str, device: torch.device) -> None:
    """The host waits for all that `device` has been given."""
    note(WAIT, operation, device)
    _queues[device.index].finish()


def launch(operation: str, device: torch.device) -> None:
    note(LAUNCH, operation, device)
    _queues[device.index].give()


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    target = located(tensor.device if device is None else device)
    data = tensor._data if isinstance(tensor, SimulatedTensor) else tensor
    moved = _computed(aten._to_copy.default, (data,), {"dtype": dtype, "memory_format": memory_format})
    if target.type == "cpu":
        return _to_host(moved, tensor.device, non_blocking)
    out = SimulatedTensor(moved, target)
    _note_copy(out, tensor, non_blocking)
    return out


def copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`destination.copy_(source)`, at least one of them on a device."""
    if isinstance(destination, SimulatedTensor):
        data = source._data if isinstance(source, SimulatedTensor) else source
        _computed(aten.copy_.default, (destination._data, data), {})
        _note_copy(destination, source, non_blocking)
    elif isinstance(source, SimulatedTensor):
        if non_blocking:
            _queues[source.device.index].give_copy(destination, source._data.clone())
        else:
            wait("copy_", source.device)
            _computed(aten.copy_.default, (destination, source._data), {})
    return destination


def _to_host(data: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    if not non_blocking:
        wait("to the host", device)
        return data
    late = torch.full_like(data, _not_yet(data.dtype))
    _queues[device.index].give_copy(late, data)
    return late


def _not_yet(dtype: torch.dtype) -> Any:
    """What the host reads before a copy has arrived."""
    return dtype == torch.bool or (float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)


def _note_copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    if isinstance(source, SimulatedTensor):
        launch("copy_", destination.device)
    elif source.nbytes:
        is_blocking = not (non_blocking and is_pinned(source))
        note(TRANSFER, "copy_", destination.device, source.nbytes, is_blocking=is_blocking)


def located(device: torch.device) -> torch.device:
    """`device` with its index."""
    return torch.device(device.type, 0) if device.type == "sim" and device.index is None else device


# ------------------------------------------------------------------------------------------------------- pinned host memory

_pinned: dict[int, Any] = {}  # address of a storage of the host -> it, alive


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Call the storage of `tensor` pinned."""
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = storage
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


# ----------------------------------------------------------------------------------------------------------------- events


class Event:
    """A place in a device's queue. Waiting for it is a wait of the host only where nothing has been launched since."""

    def __init__(
        self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ):
        self.device = located(torch.device("sim" if device is None else device))
        self._place: int | None = None  # what its device had been given when it was recorded

    def record(self, stream: Any = None) -> None:
        self._place = _queues[self.device.index].given

    def synchronize(self) -> None:
        if self._place is not None:
            queue = _queues[self.device.index]
            note(WAIT if queue.given == self._place else EVENT, "event", self.device)
            queue.finish(self._place)
            self._place = None

    def query(self) -> bool:
        return self._place is None

    def wait(self, stream: Any = None) -> None:
        """One stream: what comes later in it runs later."""
