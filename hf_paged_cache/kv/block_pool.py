"""Owns the tensors of all keys and values that the cache holds, and their growth.

Layers that need the same tokens are a group, whose tensors all hold the same number of blocks. Block ids are trusted: a
range check would synchronise an accelerator.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import Window, WindowBlocks
from .tensors import zeros

BLOCKS = "blocks"  # name of the group of the layers that see all tokens
_HOST = torch.device("cpu")
_WITHOUT_STREAMS = ("cpu", "meta")


class Slab(NamedTuple):
    """`Slab` holds blocks of several streams in one tensor; a stream is the keys or the values of one layer."""

    tensor: Tensor  # [streams, heads, blocks, block_size, head_dim]: blocks side by side are one run of tokens
    streams: tuple[tuple[int, str], ...]  # (layer index, name) of each stream


class StreamOrder:
    """`StreamOrder` lets what one call has launched on its stream be done before another call uses the same blocks.

    The host waits for nothing, nor does anybody where there is one stream.
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
        self.slabs: list[Slab] = []  # another list each time that they have grown
        self.bytes_per_block_on: dict[torch.device, int] = {}  # bytes that a block takes of each device
        self.bytes_per_block = 0  # in all layers written so far
        self.capacity = 0  # blocks that every slab holds; where growing was cut short, some slabs hold more
        self.num_blocks_used = 0  # 1 + the highest place written so far
        self._streams = streams

    def named(self) -> dict[tuple[int, str], Tensor]:
        """Return (layer index, name) -> part of a slab, [capacity, heads, block_size, head_dim]."""
        found: dict[tuple[int, str], Tensor] = {}
        for held, names in self.slabs:
            found |= zip(names, held.transpose(1, 2), strict=True)
        return found

    def use(self, num_blocks: int) -> None:
        """Note that the first `num_blocks` blocks are about to be written."""
        self.num_blocks_used = max(self.num_blocks_used, num_blocks)

    def add(self, tensor: Tensor, names: Sequence[tuple[int, str]]) -> None:
        """Hold the blocks of these streams in a tensor from here on."""
        self.slabs = [*self.slabs, Slab(tensor, tuple(names))]
        on = Counter[torch.device]()
        for held, _ in self.slabs:
            streams, heads, _, size, head_dim = held.shape  # there may be no block yet
            on[held.device] += streams * heads * size * head_dim * held.dtype.itemsize
        self.bytes_per_block_on, self.bytes_per_block = dict(on), on.total()

    def ensure_capacity(self, num_blocks: int) -> None:
        """Hold at least `num_blocks` blocks, and copy the content of all blocks used so far.

        One slab grows after the other. After an OutOfMemoryError content and `capacity` are as before, and slabs that
        had grown stay large.
        """
        for number, (held, names) in enumerate(self.slabs):
            if held.shape[2] < num_blocks:
                self._streams.join({held.device})  # others have written to it since this call began
                new = zeros((*held.shape[:2], num_blocks, *held.shape[3:]), held.dtype, held.device)
                new[:, :, : self.num_blocks_used].copy_(held[:, :, : self.num_blocks_used])
                self._streams.release(held)
                self.slabs = [*self.slabs[:number], Slab(new, names), *self.slabs[number + 1 :]]
        self.capacity = max(self.capacity, num_blocks)

    def clear(self) -> None:
        """Give all memory back."""
        for held, _ in self.slabs:
            self._streams.release(held)
        self.slabs, self.bytes_per_block_on, self.bytes_per_block = [], {}, 0
        self.capacity = self.num_blocks_used = 0


class BlockPool:
    """`BlockPool` holds named tensors of each layer, on the layer's device.

    Shapes, dtypes and devices are those of a layer's first write, not of a config. New tensors are zeroed: masked
    attention multiplies what was not written by zero, and that must not be a NaN.

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
        self.num_layouts = 1  # how often layers got tensors, or lost all of them
        self.first_device = first_device  # returns where the first write will be
        self._streams = StreamOrder()
        self.accelerators = self._streams.accelerators
        self.all = GroupTensors(self._streams)
        # name of a group -> tensors of its layers; BLOCKS -> those of the layers without a window
        self.groups: dict[int | str, GroupTensors] = {BLOCKS: self.all}
        self.groups |= {blocks.name: GroupTensors(self._streams) for blocks in windows}
        self._group_of = {layer_idx: self.groups[window.size] for layer_idx, window in window_of.items()}

    def named(self) -> dict[tuple[int, str], Tensor]:
        """Return (layer index, name) -> tensor, for the layers written so far."""
        found: dict[tuple[int, str], Tensor] = {}
        for group in self.groups.values():
            found |= group.named()
        return found

    def bytes_on(self) -> Counter[torch.device]:
        """Return the bytes taken of each device; on a host those of blocks used so far: other pages cost nothing."""
        total = Counter[torch.device]()
        for group in self.groups.values():
            for held, _ in group.slabs:
                total[held.device] += (held[:, :, : group.num_blocks_used] if held.is_cpu else held).nbytes
        return total

    @property
    def is_on_host(self) -> bool:
        """True if all tensors are in host memory, or if there are none and the first one will be there."""
        devices = [slab.tensor.device for group in self.groups.values() for slab in group.slabs]
        return all(device.type == "cpu" for device in devices or [self.first_device()])

    def join_streams(self) -> None:
        """Let what this thread launches come after what other calls have launched: blocks pass from call to call."""
        self._streams.join(self.accelerators)

    def clear(self) -> None:
        """Give all memory back; the next write may have other shapes."""
        for group in self.groups.values():
            group.clear()
        self.num_layouts += 1

    def lay_out_together(self, streams: Mapping[tuple[int, str], Tensor]) -> None:
        """Make tensors for those streams, [R, H, T, D], that have none; equal shapes of a group share one slab."""
        alike: dict[tuple[GroupTensors, int, int, torch.dtype, torch.device], list[tuple[int, str]]] = {}
        known = self.named()
        for stream, states in streams.items():
            if stream not in known:
                group = self._group_of.get(stream[0], self.all)
                kind = group, states.shape[1], states.shape[3], states.dtype, states.device
                alike.setdefault(kind, []).append(stream)
        for (group, heads, head_dim, dtype, device), same in alike.items():
            shape = len(same), heads, group.capacity, self.block_size, head_dim
            group.add(zeros(shape, dtype, device), same)
            if device.type not in _WITHOUT_STREAMS:
                self.accelerators.add(device)
                self._streams.join([device])
            self.num_layouts += 1
