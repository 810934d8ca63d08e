"""Owns the tensors of all keys and values that the cache holds, and their growth. Refuses states of another shape.

Layers that need the same tokens are a group, whose tensors all hold the same number of blocks. Knows nothing of tokens,
hashes, rows or who holds a block. Block ids are trusted: a range check would synchronise an accelerator.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.sight import Sight
from ..blocks.window_blocks import WindowBlocks
from ..errors import PoolArgumentError
from .streams import StreamOrder
from .transfers import Transfer
from .zeroed import zeros

_HOST = torch.device("cpu")
_WITHOUT_STREAMS = ("cpu", "meta")


class Slab(NamedTuple):
    """`Slab` holds blocks of several streams in one tensor; a stream is the keys or the values of one layer.

    Attributes:
        tensor: [streams, heads, blocks, block_size, head_dim]; blocks that follow one another are one run of tokens of
            each head.
        streams: (layer index, name) of each stream.
    """

    tensor: Tensor
    streams: tuple[tuple[int, str], ...]


class GroupTensors:
    """`GroupTensors` holds the tensors of the layers of one group.

    Layer index -> name -> `[capacity, num_heads, block_size, head_dim]`, on that layer's device; see `_zeroed`.

    Args:
        streams: order of streams, which is asked to wait for what is released.
        placing: says which block has which place here, where not all blocks have one; None: block ids are the places.

    Attributes:
        capacity: number of blocks that every tensor holds; where growing was cut short, some tensors hold more.
        num_blocks_used: 1 + the highest place written so far.
        bytes_per_block: bytes of a block in all layers written so far.
    """

    def __init__(self, streams: StreamOrder, placing: WindowBlocks | None = None) -> None:
        self.placing = placing
        self.layers: dict[int, dict[str, Tensor]] = {}
        self.capacity = self.num_blocks_used = self.bytes_per_block = 0
        self._streams = streams
        self._together: list[Slab] = []  # slabs of tensors that were made together
        self._slabs: list[Slab] | None = None  # all slabs; None: to be found anew

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for layer in self.layers.values() for tensor in layer.values())

    def named(self) -> dict[tuple[int, str], Tensor]:
        """Return (layer index, name) -> tensor."""
        return {(idx, name): held for idx, layer in self.layers.items() for name, held in layer.items()}

    def slabs(self) -> list[Slab]:
        """Return all tensors as slabs; tensors that were made together are one slab."""
        if self._slabs is None:
            self._slabs = self._find_slabs()
        return self._slabs

    def _find_slabs(self) -> list[Slab]:
        found, apart = [], self.named()
        for slab in self._together:
            are_there = all(
                stream in apart and apart[stream].data_ptr() == part.data_ptr()
                for stream, part in zip(slab.streams, slab.tensor, strict=True)
            )
            if are_there:
                found.append(slab)
                for stream in slab.streams:
                    del apart[stream]
        return found + [Slab(held.transpose(0, 1).unsqueeze(0), (stream,)) for stream, held in apart.items()]

    def make_together(
        self,
        streams: Sequence[tuple[int, str]],
        heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the tensors of these streams, which have none yet, as parts of one tensor."""
        slab = Slab(zeros((len(streams), heads, self.capacity, block_size, head_dim), dtype, device), tuple(streams))
        self._together.append(slab)
        self._follow(slab)
        self.bytes_per_block += _bytes_of_one(slab.tensor)

    def _follow(self, slab: Slab) -> None:
        """Let the layers' tensors be parts of this slab."""
        self._slabs = None
        for (layer_idx, name), part in zip(slab.streams, slab.tensor, strict=True):
            self.layers.setdefault(layer_idx, {})[name] = part.transpose(0, 1)

    def use(self, num_blocks: int) -> None:
        """Note that the first `num_blocks` blocks are about to be written."""
        self.num_blocks_used = max(self.num_blocks_used, num_blocks)

    def bytes_on(self) -> dict[torch.device, int]:
        """Return the bytes taken of each device.

        On a host these are the bytes of the blocks used so far, as untouched pages cost nothing.
        """
        return self._bytes_on(lambda tensor: (tensor[: self.num_blocks_used] if tensor.is_cpu else tensor).nbytes)

    def bytes_per_block_on(self) -> dict[torch.device, int]:
        """Return the bytes that a block takes of each device, in the layers written so far."""
        return self._bytes_on(lambda tensor: tensor[:1].nbytes)

    def bytes_to_grow(self, num_blocks: int) -> dict[torch.device, int]:
        """Return the bytes that `ensure_capacity` needs free on each device.

        They are the bytes of the new blocks, and those of the largest tensor, which is there twice for a moment.
        """
        new = self._bytes_on(lambda tensor: max(0, num_blocks - tensor.shape[0]) * tensor[:1].nbytes)
        twice: dict[torch.device, int] = {}
        for held, streams in self._find_slabs():
            num_held = self.num_blocks_used if held.is_cpu and len(streams) > 1 else held.shape[2]
            twice[held.device] = max(twice.get(held.device, 0), num_held * _bytes_of_one(held))
        return {device: extra + twice[device] for device, extra in new.items()}

    def ensure_capacity(self, num_blocks: int) -> None:
        """Hold at least `num_blocks` blocks, and keep the content of all blocks used so far.

        The tensors grow one after the other; each gives its old memory back before the next one grows.

        Cost: a copy of the blocks used so far, when the tensors must grow.

        Raises:
            torch.OutOfMemoryError: the content and `capacity` are as before. Tensors that had grown keep their new
                memory where there is no memory for a smaller tensor.
        """
        if num_blocks <= self.capacity:
            return
        try:
            self._resize_tensors(lambda held: held < num_blocks, num_blocks)
        except torch.OutOfMemoryError:
            with contextlib.suppress(torch.OutOfMemoryError):
                self._resize_tensors(lambda held: held > self.capacity, self.capacity)
            raise
        self.capacity = num_blocks

    def resized(self, tensor: Tensor, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return another tensor with the content of a layer's tensor, and release the layer's tensor."""
        self._streams.join({tensor.device, device})  # others have written to it since this call began
        resized = _zeroed(num_blocks, tensor.shape[1], tensor.shape[2], tensor.shape[3], dtype, device)
        resized[: self.num_blocks_used].copy_(tensor[: self.num_blocks_used])
        self._streams.release(tensor)
        self._streams.move(device)
        return resized

    def copy_blocks(self, copies: Sequence[tuple[int, int]], transfer: Transfer | None = None) -> None:
        """Copy whole blocks in all layers, as if one `(source, destination)` after the other.

        Args:
            transfer: transfer that the block ids go with, where a device needs them; None: a transfer of their own.
        """
        for device in {tensor.device for tensor in self}:
            self._streams.follow(device)
        sources, destinations = [source for source, _ in copies], [destination for _, destination in copies]
        self.use(1 + max(destinations, default=-1))
        in_any_order = len({*sources, *destinations}) == len(set(sources)) + len(destinations)
        if len(copies) > 1 and in_any_order:
            with contextlib.suppress(torch.OutOfMemoryError):  # copying one by one takes no memory
                copy_rows(self, sources, destinations, transfer)
                return
        for source, destination in copies:
            for tensor in self:
                tensor[destination].copy_(tensor[source])

    def clear(self) -> None:
        """Give all memory back."""
        for tensor in self:
            self._streams.release(tensor)
        self.layers, self._together, self._slabs = {}, [], None
        self.capacity = self.num_blocks_used = self.bytes_per_block = 0

    def _bytes_on(self, count: Callable[[Tensor], int]) -> dict[torch.device, int]:
        total: Counter[torch.device] = Counter()
        for tensor in self:
            total[tensor.device] += count(tensor)
        return dict(total)

    def _resize_tensors(self, is_due: Callable[[int], bool], num_blocks: int) -> None:
        """Resize each tensor whose number of blocks is due to `num_blocks` blocks, one tensor after the other.

        Tensors that were made together are resized as one.
        """
        self._together, self._slabs = [slab for slab in self._find_slabs() if len(slab.streams) > 1], None
        for number, (held, streams) in enumerate(self._together):
            if is_due(held.shape[2]):
                heads, size, head_dim = held.shape[1], held.shape[3], held.shape[4]
                self._streams.join({held.device})
                new = zeros((len(streams), heads, num_blocks, size, head_dim), held.dtype, held.device)
                new[:, :, : self.num_blocks_used].copy_(held[:, :, : self.num_blocks_used])
                self._streams.release(held)
                self._streams.move(held.device)
                self._together[number] = Slab(new, streams)
                self._follow(self._together[number])
        for layer in self.layers.values():
            for name in layer:
                self._slabs = None
                if is_due(layer[name].shape[0]):  # no name here: the old tensor goes once replaced
                    layer[name] = self.resized(layer[name], num_blocks, layer[name].dtype, layer[name].device)


class BlockPool:
    """`BlockPool` holds named tensors of each layer, on the layer's device.

    Their shape is `[num_blocks, num_heads, block_size, head_dim]`. In memory the heads come first, so the tokens of a
    head lie side by side over blocks that follow one another: a run of blocks is one slice. Shapes, dtypes and devices
    are those of a layer's first write, not of a config: key and value may differ in head size, layers in anything. New
    tensors are zeroed: masked attention multiplies what was not written by zero, and what was not written must not be a
    NaN.

    Callers name blocks by the allocator's ids; layers with a window keep the blocks where their `WindowBlocks` say.

    Args:
        first_device: function that returns where the first write will be; called as long as there was no write.
        sight_of, windows: see `regroup`.

    Attributes:
        groups: name of a group, or None -> tensors of the group's layers.
        all: tensors of the layers without a window.
        accelerators: accelerators that hold tensors, or have held some.
        num_layouts: how often a layer got its first tensors, or tensors of another shape, dtype or device.

    Examples:
        >>> pool = BlockPool(block_size=4)
        >>> pool.all.ensure_capacity(3)
        >>> new = torch.ones(1, 2, 5, 8)  # 1 row, 2 heads, 5 tokens, head size 8
        >>> pool.lay_out_together({(0, "key"): new, (0, "value"): new})
        >>> pool.all.slabs()[0].tensor.shape
        torch.Size([2, 2, 3, 4, 8])

    Source: block-table indirection, Kwon et al. 2023 (arXiv:2309.06180).
    """

    def __init__(
        self,
        block_size: int,
        first_device: Callable[[], torch.device] = lambda: _HOST,
        sight_of: Mapping[int, Sight] = MappingProxyType({}),
        windows: Iterable[WindowBlocks] = (),
    ) -> None:
        self.block_size = block_size
        self.num_layouts = 0
        self._first_device = first_device
        self._streams = StreamOrder()
        self.accelerators = self._streams.accelerators
        self.all = GroupTensors(self._streams)
        self.groups: dict[int | str | None, GroupTensors] = {None: self.all}
        self.regroup(sight_of, windows)

    def regroup(self, sight_of: Mapping[int, Sight], windows: Iterable[WindowBlocks]) -> None:
        """Give the layers these windows from now on. Nothing may be in the pool.

        Args:
            sight_of: layer index -> window of the layer, for the layers that have one.
            windows: window blocks of each window.
        """
        self.num_layouts += 1
        self.groups = {None: self.all} | {blocks.name: GroupTensors(self._streams, blocks) for blocks in windows}
        self._group_of = {layer_idx: self.groups[sight.name] for layer_idx, sight in sight_of.items()}

    def layer(self, layer_idx: int) -> Mapping[str, Tensor]:
        """Return name -> tensor of a layer; empty before the layer was written."""
        return self._group_of.get(layer_idx, self.all).layers.get(layer_idx, {})

    @property
    def layer_indices(self) -> list[int]:
        """Indices of the layers written so far."""
        return sorted(layer_idx for group in self.groups.values() for layer_idx in group.layers)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool takes; on a host, those of the blocks used so far, as untouched pages cost nothing."""
        return sum(self.bytes_on().values())

    def bytes_on(self) -> dict[torch.device, int]:
        """Return the bytes that the pool takes of each device, counted as in `pool_bytes`."""
        total: Counter[torch.device] = Counter()
        for group in self.groups.values():
            total.update(group.bytes_on())
        return dict(total)

    @property
    def is_on_host(self) -> bool:
        """True if all tensors are in host memory, or if there are none and the first one will be there.

        Capacity that is not used costs nothing in host memory.
        """
        devices = [tensor.device for group in self.groups.values() for tensor in group] or [self._first_device()]
        return all(device.type == "cpu" for device in devices)

    def join_streams(self) -> None:
        """Let what this thread launches come after what other calls have launched.

        Blocks may have passed from one call to another.
        """
        if self.accelerators:
            self._streams.join(self.accelerators)

    def clear(self) -> None:
        """Give all memory back; the next write may have other shapes."""
        for group in self.groups.values():
            group.clear()
        self.num_layouts += 1

    def lay_out(self, layer_idx: int, name: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Make a layer's tensor before anything is written, on the device of the first keys and values.

        A write may move the tensor.
        """
        if name not in self.layer(layer_idx):
            self.tensor_for(
                layer_idx, name, torch.empty((0, heads, 0, head_dim), dtype=dtype, device=self._first_device())
            )

    def lay_out_together(self, streams: Mapping[tuple[int, str], Tensor]) -> None:
        """Make the tensors of layers that have none yet; those of one group and shape are parts of one tensor.

        Args:
            streams: (layer index, name) -> [R, H, T, D], of the shapes that will be written.
        """
        alike: dict[tuple[GroupTensors, int, int, torch.dtype, torch.device], list[tuple[int, str]]] = {}
        for (layer_idx, name), states in streams.items():
            if name not in self.layer(layer_idx):
                group = self._group_of.get(layer_idx, self.all)
                kind = group, states.shape[1], states.shape[3], states.dtype, states.device
                alike.setdefault(kind, []).append((layer_idx, name))
        for (group, heads, head_dim, dtype, device), same in alike.items():
            group.make_together(same, heads, self.block_size, head_dim, dtype, device)
            if device.type not in _WITHOUT_STREAMS:
                self.accelerators.add(device)
                self._streams.move(device)
            self.num_layouts += 1

    def tensor_for(self, layer_idx: int, name: str, new: Tensor) -> Tensor:
        """Return the tensor that takes `new`, and make, widen or move this tensor where needed.

        Raises:
            PoolArgumentError: `new` does not have four dimensions, or has not the heads and head size of the layer's
                tensor.
        """
        if new.dim() != 4:
            raise PoolArgumentError(
                f"layer {layer_idx} {name}: expected [rows, heads, tokens, head_dim], got {tuple(new.shape)}"
            )
        group = self._group_of.get(layer_idx, self.all)
        held = group.layers.get(layer_idx, {}).get(name)
        heads, head_dim = new.shape[1], new.shape[3]
        if held is None:
            tensor = _zeroed(group.capacity, heads, self.block_size, head_dim, new.dtype, new.device)
        elif (held.shape[1], held.shape[3]) != (heads, head_dim):
            raise PoolArgumentError(
                f"layer {layer_idx} {name}: this store holds {held.shape[1]} heads of {held.shape[3]}, "
                f"got {heads} of {head_dim}; use another PrefixStore for another model"
            )
        else:
            dtype = torch.promote_types(held.dtype, new.dtype)
            if dtype == held.dtype and held.device == new.device:
                return held
            tensor = group.resized(held, group.capacity, dtype, new.device)
        group.bytes_per_block += tensor[:1].nbytes - (0 if held is None else held[:1].nbytes)
        if tensor.device.type not in _WITHOUT_STREAMS:
            self.accelerators.add(tensor.device)
            self._streams.move(tensor.device)
        group.layers.setdefault(layer_idx, {})[name], group._slabs = tensor, None
        self.num_layouts += 1
        return tensor


def _bytes_of_one(tensor: Tensor) -> int:
    """Return the bytes of a block in a slab's tensor, which may hold no block."""
    streams, heads, _, size, head_dim = tensor.shape
    return streams * heads * size * head_dim * tensor.dtype.itemsize


def _zeroed(
    num_blocks: int, num_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a zeroed tensor for a layer, `[num_blocks, num_heads, block_size, head_dim]`, heads first in memory."""
    return zeros((num_heads, num_blocks, block_size, head_dim), dtype, device).transpose(0, 1)


def copy_rows(
    tensors: Iterable[Tensor], sources: Sequence[int], destinations: Sequence[int], transfer: Transfer | None = None
) -> None:
    """Let `[destinations[i]]` of each tensor become what `[sources[i]]` was; no destination comes twice."""
    transfer = Transfer() if transfer is None else transfer
    of, to = transfer.add(sources), transfer.add(destinations)
    for tensor in tensors:
        _copy(tensor, of, to, transfer)


def _copy(tensor: Tensor, of: int, to: int, transfer: Transfer) -> None:
    """Copy the rows of one tensor, as `copy_rows` does; `of` and `to` are numbers of lists in the transfer."""
    device = tensor.device
    tensor.index_copy_(0, transfer.on(device, to), tensor.index_select(0, transfer.on(device, of)))
