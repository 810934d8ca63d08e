"""Owns the tensors of all keys and values that the cache holds, and their growth.

Layers that need the same tokens are a group, whose tensors all hold the same number of blocks. Knows nothing of tokens,
hashes, rows or who holds a block. Block ids are trusted: a range check would synchronise an accelerator.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import Window, WindowBlocks
from .tensors import zeros

_HOST = torch.device("cpu")
_WITHOUT_STREAMS = ("cpu", "meta")


class Slab(NamedTuple):
    """`Slab` holds blocks of several streams in one tensor; a stream is the keys or the values of one layer."""

    tensor: Tensor  # [streams, heads, blocks, block_size, head_dim]: blocks side by side are one run of tokens
    streams: tuple[tuple[int, str], ...]  # (layer index, name) of each stream

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in the tensor, which may hold no block."""
        streams, heads, _, size, head_dim = self.tensor.shape
        return streams * heads * size * head_dim * self.tensor.dtype.itemsize


class StreamOrder:
    """`StreamOrder` orders the streams of each accelerator on which a store's calls launch.

    What one call has launched on its stream must be done before another call reads or writes the same block, or uses a
    tensor that was made or has grown meanwhile. The host waits for nothing, nor does anybody where there is one stream.
    """

    def __init__(self) -> None:
        self.accelerators: set[torch.device] = set()  # that hold tensors of the store, or have held some
        self._streams: dict[torch.device, set[torch.Stream]] = {}

    def join(self, devices: Iterable[torch.device]) -> None:
        """Let what this thread launches from now on come after all that was launched for the store on these devices."""
        for device in self.accelerators.intersection(devices):
            current = torch.accelerator.current_stream(device)
            used = self._streams.setdefault(device, set())
            for stream in used - {current}:
                current.wait_stream(stream)
            used.add(current)

    def release(self, tensor: Tensor) -> None:
        """Prepare to release a tensor: whoever gets its memory waits for what other streams do with it."""
        used = self._streams.get(tensor.device, set())
        if len(used) > 1:
            for stream in used:
                tensor.record_stream(stream)


class GroupTensors:
    """`GroupTensors` holds the tensors of the layers of one group."""

    def __init__(self, streams: StreamOrder) -> None:
        # layer index -> name -> part of a slab, [capacity, heads, block_size, head_dim]
        self.layers: dict[int, dict[str, Tensor]] = {}
        self.slabs: list[Slab] = []  # another list each time that they have grown
        self.capacity = 0  # blocks that every slab holds; where growing was cut short, some slabs hold more
        self.num_blocks_used = 0  # 1 + the highest place written so far
        self._streams = streams

    def named(self) -> dict[tuple[int, str], Tensor]:
        """Return (layer index, name) -> tensor."""
        return {(idx, name): held for idx, layer in self.layers.items() for name, held in layer.items()}

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers written so far."""
        return sum(slab.bytes_per_block for slab in self.slabs)

    def show(self, slabs: list[Slab]) -> None:
        """Let the layers' tensors be parts of these slabs from here on."""
        layers: dict[int, dict[str, Tensor]] = {}
        for tensor, streams in slabs:
            for (layer_idx, name), part in zip(streams, tensor, strict=True):
                layers.setdefault(layer_idx, {})[name] = part.transpose(0, 1)
        self.layers, self.slabs = layers, slabs  # together: an interrupt comes before both or after both

    def use(self, num_blocks: int) -> None:
        """Note that the first `num_blocks` blocks are about to be written."""
        self.num_blocks_used = max(self.num_blocks_used, num_blocks)

    def bytes_per_block_on(self) -> dict[torch.device, int]:
        """Return the bytes that a block takes of each device, in the layers written so far."""
        total: Counter[torch.device] = Counter()
        for slab in self.slabs:
            total[slab.tensor.device] += slab.bytes_per_block
        return dict(total)

    def ensure_capacity(self, num_blocks: int) -> None:
        """Hold at least `num_blocks` blocks, and keep the content of all blocks used so far, by copying it.

        The slabs grow one after the other; each gives its old memory back before the next one grows.

        Raises:
            torch.OutOfMemoryError: the content and `capacity` are as before; slabs that had grown stay large.
        """
        for number in range(len(self.slabs)):
            if self.slabs[number].tensor.shape[2] < num_blocks:
                grown = self._grown(self.slabs[number], num_blocks)
                self.show([*self.slabs[:number], grown, *self.slabs[number + 1 :]])
        self.capacity = max(self.capacity, num_blocks)

    def _grown(self, slab: Slab, num_blocks: int) -> Slab:
        held = slab.tensor
        self._streams.join({held.device})  # others have written to it since this call began
        new = zeros((*held.shape[:2], num_blocks, *held.shape[3:]), held.dtype, held.device)
        new[:, :, : self.num_blocks_used].copy_(held[:, :, : self.num_blocks_used])
        self._streams.release(held)
        return Slab(new, slab.streams)

    def clear(self) -> None:
        """Give all memory back."""
        for slab in self.slabs:
            self._streams.release(slab.tensor)
        self.layers, self.slabs = {}, []
        self.capacity = self.num_blocks_used = 0


class BlockPool:
    """`BlockPool` holds named tensors of each layer, on the layer's device.

    Shapes, dtypes and devices are those of a layer's first write, not of a config: key and value may differ in head
    size, layers in anything. New tensors are zeroed: masked attention multiplies what was not written by zero, and what
    was not written must not be a NaN.

    Args:
        first_device: returns where the first write will be; called as long as there was no write.
        window_of: layer index -> window.
        windows: says where layers with a window keep blocks, which callers name by the allocator's ids.

    Attributes:
        groups: name of a group -> tensors of its layers; None -> `all`, those of the layers without a window.
        num_layouts: how often layers got tensors, or lost all of them.

    Examples:
        >>> pool = BlockPool(block_size=4)
        >>> pool.all.ensure_capacity(3)
        >>> new = torch.ones(1, 2, 5, 8)  # 1 row, 2 heads, 5 tokens, head size 8
        >>> pool.lay_out_together({(0, "key"): new, (0, "value"): new})
        >>> pool.all.slabs[0].tensor.shape
        torch.Size([2, 2, 3, 4, 8])

    Source: block-table indirection, Kwon et al. 2023 (arXiv:2309.06180).
    """

    def __init__(
        self,
        block_size: int,
        first_device: Callable[[], torch.device] = lambda: _HOST,
        window_of: Mapping[int, Window] = MappingProxyType({}),
        windows: Iterable[WindowBlocks] = (),
    ) -> None:
        self.block_size = block_size
        self.num_layouts = 0
        self.first_device = first_device
        self._streams = StreamOrder()
        self.accelerators = self._streams.accelerators
        self.all = GroupTensors(self._streams)
        self.regroup(window_of, windows)

    def regroup(self, window_of: Mapping[int, Window], windows: Iterable[WindowBlocks]) -> None:
        """Give the layers with these indices these windows from now on. Nothing may be in the pool."""
        self.num_layouts += 1
        self.groups: dict[int | str | None, GroupTensors] = {None: self.all}
        self.groups |= {blocks.name: GroupTensors(self._streams) for blocks in windows}
        self._group_of = {layer_idx: self.groups[window.name] for layer_idx, window in window_of.items()}

    def layer(self, layer_idx: int) -> Mapping[str, Tensor]:
        """Return name -> tensor of a layer; empty before the layer was written."""
        return self._group_of.get(layer_idx, self.all).layers.get(layer_idx, {})

    @property
    def layer_indices(self) -> list[int]:
        """Indices of the layers written so far."""
        return sorted(layer_idx for group in self.groups.values() for layer_idx in group.layers)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool takes; see `bytes_on`."""
        return sum(self.bytes_on().values())

    def bytes_on(self) -> dict[torch.device, int]:
        """Return the bytes taken of each device; on a host those of blocks used so far: other pages cost nothing."""
        total: Counter[torch.device] = Counter()
        for group in self.groups.values():
            for slab in group.slabs:
                num_blocks = group.num_blocks_used if slab.tensor.is_cpu else slab.tensor.shape[2]
                total[slab.tensor.device] += num_blocks * slab.bytes_per_block
        return dict(total)

    @property
    def is_on_host(self) -> bool:
        """True if all tensors are in host memory, or if there are none and the first one will be there.

        Capacity that is not used costs nothing in host memory.
        """
        devices = [slab.tensor.device for group in self.groups.values() for slab in group.slabs]
        return all(device.type == "cpu" for device in devices or [self.first_device()])

    def join_streams(self) -> None:
        """Let what this thread launches come after what other calls have launched: blocks pass from call to call."""
        if self.accelerators:
            self._streams.join(self.accelerators)

    def clear(self) -> None:
        """Give all memory back; the next write may have other shapes."""
        for group in self.groups.values():
            group.clear()
        self.num_layouts += 1

    def lay_out_together(self, streams: Mapping[tuple[int, str], Tensor]) -> None:
        """Make the tensors of layers that have none yet; those of one group and shape are parts of one slab.

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
            shape = len(same), heads, group.capacity, self.block_size, head_dim
            group.show([*group.slabs, Slab(zeros(shape, dtype, device), tuple(same))])
            if device.type not in _WITHOUT_STREAMS:
                self.accelerators.add(device)
                self._streams.join([device])
            self.num_layouts += 1
