"""Owns the tensors of all keys and values that the cache holds, and their growth. Refuses states of another shape.

Layers that need the same tokens are a group: its tensors hold as many blocks. Knows nothing of tokens, hashes, rows or who
holds a block. Block ids and slots are trusted: a range check would synchronise an accelerator.
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
from .recycled_memory import RecycledMemory, zeros
from .slot_mapping import ReadSource, RowLayout, SlotMapping
from .streams import StreamOrder
from .transfers import Transfer

_HOST = torch.device("cpu")
_WITHOUT_STREAMS = ("cpu", "meta")


class Slab(NamedTuple):
    """Blocks of several streams, the keys or the values of a layer each, that lie in one tensor.

    Attributes:
        tensor: [streams, heads, blocks, block_size, head_dim]; blocks that follow one another are one run of tokens of each head.
        streams: (layer index, name) of each.
    """

    tensor: Tensor
    streams: tuple[tuple[int, str], ...]


class GroupTensors:
    """Layer index -> name -> `[capacity, num_heads, block_size, head_dim]`, on that layer's device; see `_zeroed`.

    Args:
        streams: asked to wait for what is released.
        placing: which block has which place here, where not all have one; None: block ids are the places.

    Attributes:
        capacity: blocks that every tensor holds; where growing was cut short, some hold more.
        num_blocks_used: 1 + the highest place written so far.
        bytes_per_block: in all layers written so far.
    """

    def __init__(self, streams: StreamOrder, placing: WindowBlocks | None = None) -> None:
        self.placing = placing
        self.layers: dict[int, dict[str, Tensor]] = {}
        self.capacity = self.num_blocks_used = self.bytes_per_block = 0
        self._streams = streams
        self._together: list[Slab] = []  # whose tensors were made together
        self._slabs: list[Slab] | None = None  # all; None: to be found anew

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for layer in self.layers.values() for tensor in layer.values())

    def named(self) -> dict[tuple[int, str], Tensor]:
        """(Layer index, name) -> tensor."""
        return {(idx, name): held for idx, layer in self.layers.items() for name, held in layer.items()}

    def slabs(self) -> list[Slab]:
        """All tensors, those that were made together as one."""
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
        """Make the tensors of these streams, which have none yet, in one."""
        slab = Slab(zeros((len(streams), heads, self.capacity, block_size, head_dim), dtype, device), tuple(streams))
        self._together.append(slab)
        self._follow(slab)
        self.bytes_per_block += _bytes_of_one(slab.tensor)

    def _follow(self, slab: Slab) -> None:
        """The layers' tensors are parts of this slab."""
        self._slabs = None
        for (layer_idx, name), part in zip(slab.streams, slab.tensor, strict=True):
            self.layers.setdefault(layer_idx, {})[name] = part.transpose(0, 1)

    def use(self, num_blocks: int) -> None:
        """The first so many are about to be written."""
        self.num_blocks_used = max(self.num_blocks_used, num_blocks)

    def bytes_on(self) -> dict[torch.device, int]:
        """Bytes taken of each device; of a host, those of the blocks used so far, as untouched pages cost nothing."""
        return self._bytes_on(lambda tensor: (tensor[: self.num_blocks_used] if tensor.is_cpu else tensor).nbytes)

    def bytes_per_block_on(self) -> dict[torch.device, int]:
        """Bytes that a block takes of each device, in the layers written so far."""
        return self._bytes_on(lambda tensor: tensor[:1].nbytes)

    def bytes_to_grow(self, num_blocks: int) -> dict[torch.device, int]:
        """Bytes that `ensure_capacity` needs free on each device: the new blocks, and for a moment what lies in one tensor twice."""
        new = self._bytes_on(lambda tensor: max(0, num_blocks - tensor.shape[0]) * tensor[:1].nbytes)
        twice: dict[torch.device, int] = {}
        for held, streams in self._find_slabs():
            num_held = self.num_blocks_used if held.is_cpu and len(streams) > 1 else held.shape[2]
            twice[held.device] = max(twice.get(held.device, 0), num_held * _bytes_of_one(held))
        return {device: extra + twice[device] for device, extra in new.items()}

    def ensure_capacity(self, num_blocks: int) -> None:
        """Hold at least `num_blocks` blocks, all those used so far with their content.

        One tensor after the other, each of which gives its old memory back before the next one grows.

        Cost: a copy of the blocks used so far, when the tensors must grow.

        Raises:
            torch.OutOfMemoryError: the content and `capacity` are as before. Tensors that had grown keep their new memory
                where there is none for a smaller one.
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
        """Another tensor with the content of a layer's, which is released."""
        self._streams.join({tensor.device, device})  # others have written to it since this call began
        resized = _zeroed(num_blocks, tensor.shape[1], tensor.shape[2], tensor.shape[3], dtype, device)
        resized[: self.num_blocks_used].copy_(tensor[: self.num_blocks_used])
        self._streams.release(tensor)
        self._streams.move(device)
        return resized

    def copy_blocks(self, copies: Sequence[tuple[int, int]], transfer: Transfer | None = None) -> None:
        """Copy whole blocks in all layers, as if one `(source, destination)` after the other.

        Args:
            transfer: that their ids go with, where a device needs them; None: one of their own.
        """
        for device in {tensor.device for tensor in self}:
            self._streams.follow(device)
        sources, destinations = [source for source, _ in copies], [destination for _, destination in copies]
        self.use(1 + max(destinations, default=-1))
        in_any_order = len({*sources, *destinations}) == len(set(sources)) + len(destinations)
        if len(copies) > 1 and in_any_order:
            with contextlib.suppress(torch.OutOfMemoryError):  # one by one takes no memory
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
        """Give the tensors whose number of blocks is due `num_blocks` blocks, one after the other; those made together in one."""
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
                if is_due(layer[name].shape[0]):  # no name for it here: it goes when the new one takes its place
                    layer[name] = self.resized(layer[name], num_blocks, layer[name].dtype, layer[name].device)


class BlockPool:
    """Named tensors per layer, `[num_blocks, num_heads, block_size, head_dim]`, on that layer's device.

    In memory the heads come first, so the slots of a head lie side by side over blocks that follow one another: attention
    reads a run of blocks where it lies (`run_of`). Shapes, dtypes and devices are those of a layer's first write, not of a config: key and value may differ
    in head size, layers in anything. New tensors are zeroed: masked attention multiplies an unwritten slot by zero, and
    it must not be a NaN.

    Whoever asks names blocks by the allocator's ids; layers with a window keep them where its `WindowBlocks` say.

    Args:
        first_device: where the first write will be, asked as long as there was none.
        sight_of, windows: see `regroup`.

    Attributes:
        groups: name of a group, or None -> the tensors of its layers.
        all: those of the layers without a window.
        accelerators: that hold tensors, or have.
        num_layouts: how often a layer got other tensors: another shape, dtype or device, or its first.

    Examples:
        >>> pool = BlockPool(block_size=4)
        >>> pool.all.ensure_capacity(3)
        >>> new = torch.ones(1, 2, 5, 8)  # 1 row, 2 heads, 5 tokens, head size 8
        >>> pool.write(0, {"key": new, "value": new}, pool.map_slots([4, 5, 6, 7, 8]))
        >>> pool.gather(0, ReadSource(torch.tensor([[4, 5]]).to, 1, 2))["key"].shape
        torch.Size([1, 2, 2, 8])

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
        """The layers have these windows from here on. Nothing is in the pool.

        Args:
            sight_of: layer index -> its window, for the layers that have one.
            windows: the window blocks of each.
        """
        self.num_layouts += 1
        self.groups = {None: self.all} | {blocks.name: GroupTensors(self._streams, blocks) for blocks in windows}
        self._group_of = {layer_idx: self.groups[sight.name] for layer_idx, sight in sight_of.items()}

    def layer(self, layer_idx: int) -> Mapping[str, Tensor]:
        """name -> tensor of a layer; empty before it was written."""
        return self._group_of.get(layer_idx, self.all).layers.get(layer_idx, {})

    @property
    def layer_indices(self) -> list[int]:
        """The layers written so far."""
        return sorted(layer_idx for group in self.groups.values() for layer_idx in group.layers)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool takes; on a host, those of the blocks used so far, as untouched pages cost nothing."""
        return sum(self.bytes_on().values())

    def bytes_on(self) -> dict[torch.device, int]:
        """Bytes that the pool takes of each device, counted as in `pool_bytes`."""
        total: Counter[torch.device] = Counter()
        for group in self.groups.values():
            total.update(group.bytes_on())
        return dict(total)

    @property
    def is_on_host(self) -> bool:
        """Whether all tensors are, or the first one will be, in host memory, where capacity that is not used costs nothing."""
        devices = [tensor.device for group in self.groups.values() for tensor in group] or [self._first_device()]
        return all(device.type == "cpu" for device in devices)

    def join_streams(self) -> None:
        """Blocks may have passed from one call to another: what those launched comes before what this thread launches."""
        if self.accelerators:
            self._streams.join(self.accelerators)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """The pool's tensors, or copies of what is in them, are about to be released: see `StreamOrder.release`."""
        if self.accelerators:
            for tensor in tensors:
                self._streams.release(tensor)

    def clear(self) -> None:
        """Give all memory back; the next write may have other shapes."""
        for group in self.groups.values():
            group.clear()
        self.num_layouts += 1

    def map_slots(
        self, slots: Sequence[int], sources: Sequence[int] | None = None, transfer: Transfer | None = None
    ) -> SlotMapping:
        """The slots that a forward writes, in all layers; see `SlotMapping`."""
        mapping = SlotMapping(slots, sources, transfer)
        if transfer is not None:  # what the windows' layers need on their devices goes along
            for group in self.groups.values():
                if group.placing is not None:
                    mapping.of_group(group.placing, self.block_size)
        return mapping

    def rows_in(self, sight: Sight | None, rows: Sequence[RowLayout], start: int) -> Sequence[RowLayout]:
        """The rows, with the places at which layers with this sight, or None, hold their blocks from column `start` on."""
        group = self.all if sight is None else self.groups.get(sight.name, self.all)
        if group.placing is None:
            return rows
        places, placed = group.placing.places, []
        for row in rows:
            first = min(len(row.block_ids), max(0, start - row.pad) // self.block_size)
            held = [places.get(block_id, 0) for block_id in row.block_ids[first:]]
            placed.append(row._replace(block_ids=[0] * first + held))
        return placed

    def write(self, layer_idx: int, states: Mapping[str, Tensor], slot_mapping: SlotMapping) -> None:
        """Store new keys and values of one layer.

        Shapes: R rows, H heads, T new columns, D head size.  Effects: the mapping's slots, nothing else.

        Args:
            layer_idx: the layer; its tensors are made at its first write.
            states: name -> [R, H, T, D]. A dtype that the pool's cannot hold without loss widens the pool's.
            slot_mapping: the slots, and which of the R * T tokens they take.

        Raises:
            PoolArgumentError: a tensor is not 4-D, or has other heads or head size than the layer was made with.
        """
        group = self._group_of.get(layer_idx, self.all)
        if group.placing is not None:
            slot_mapping = slot_mapping.of_group(group.placing, self.block_size)
        group.num_blocks_used = max(group.num_blocks_used, -(-slot_mapping.end_slot // self.block_size))
        for name, new in states.items():
            held = self._follow(self.tensor_for(layer_idx, name, new))
            if slot_mapping.num_slots == 0:
                continue
            if new.requires_grad:
                new = new.detach()
            if slot_mapping.is_run and new.shape[0] == 1:
                _by_head(held).narrow(1, slot_mapping.slots[0], new.shape[2]).copy_(new[0])
                continue
            heads = held.shape[1]
            tokens, sources = new.transpose(1, 2), slot_mapping.sources_on(held.device)
            if sources is not None:
                tokens = tokens.flatten(0, 1).index_select(0, sources)
            index = slot_mapping.index_for(heads, held.shape[0] * self.block_size, held.device)
            _by_head(held).flatten(0, 1).index_copy_(0, index, tokens.flatten(0, -2).to(held.dtype))

    def lay_out(self, layer_idx: int, name: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Make a layer's tensor before anything is written, where the first keys and values will be; a write may move it."""
        if name not in self.layer(layer_idx):
            self.tensor_for(
                layer_idx, name, torch.empty((0, heads, 0, head_dim), dtype=dtype, device=self._first_device())
            )

    def lay_out_together(self, streams: Mapping[tuple[int, str], Tensor]) -> None:
        """Make the tensors of layers that have none yet, those of one group and shape as one.

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

    def write_blocks(
        self, columns: Iterable[tuple[int, Mapping[str, Tensor]]], block_ids: Sequence[int], offset: int
    ) -> None:
        """Store columns of many layers that lie in one block of each row, at the same place: the blocks are all the index.

        Shapes: R rows, H heads, T columns, D head size.

        Args:
            columns: layer index -> name -> [R, H, T, D], of the sizes that the layer was made with.
            block_ids: row -> its block, no block twice.
            offset: of the first column in all these blocks; `offset + T` is at most a block.

        Raises:
            torch.OutOfMemoryError: some are stored and some are not.
        """
        transfer, placed = Transfer(), {}
        for group in self.groups.values():
            places = block_ids if group.placing is None else [group.placing.places[block_id] for block_id in block_ids]
            group.use(1 + max(places))
            placed[group] = places, transfer.add(places)
        for layer_idx, states in columns:
            places, added = placed[self._group_of.get(layer_idx, self.all)]
            for name, new in states.items():
                held = self._follow(self.tensor_for(layer_idx, name, new))
                part = held.narrow(2, offset, new.shape[2])
                if len(places) == 1:
                    part.narrow(0, places[0], 1).copy_(new)
                else:
                    part.index_copy_(0, transfer.on(held.device, added), new.to(held.dtype))

    def gather(
        self,
        layer_idx: int,
        source: ReadSource,
        names: Iterable[str] | None = None,
        memory: RecycledMemory | None = None,
    ) -> dict[str, Tensor]:
        """Copy the columns of `source` of one layer.

        Shapes: R rows, C columns, H heads, D head size.  Effects: none.  Cost: reads R * C * H * D elements a tensor; by
        block, the rest of the first and the last block, too.

        Args:
            layer_idx: a layer that was written.
            names: the tensors wanted, each of which was written; None: all.
            memory: for copies in host memory; None: new memory.

        Returns:
            name -> [R, H, C, D], the caller's, in the pool's dtype. Models may view it as [R * H, C, D]. By block it is
            a part of [R, H, whole blocks, D].

        Raises:
            PoolArgumentError: the layer was never written.
        """
        layer = self.layer(layer_idx)
        if not layer:
            raise PoolArgumentError(f"layer {layer_idx} was never written; layers written are {self.layer_indices}")
        gathered = {}
        num_rows, num_columns, num_slots = source.num_rows, source.num_columns, source.num_slots(self.block_size)
        for name in layer if names is None else names:
            held = self._follow(layer[name])
            capacity, heads, size, head_dim = held.shape
            num_units, unit = (capacity, size * head_dim) if source.by_block else (capacity * size, head_dim)
            chosen = source.index_for(heads, num_units, held.device)
            units = held.transpose(0, 1).view(heads * num_units, unit)  # some layers have keys of no numbers
            if memory is not None and held.is_cpu:
                copied = memory.take((chosen.shape[0], units.shape[1]), held.dtype)
                torch.index_select(units, 0, chosen, out=copied)
            else:
                copied = units.index_select(0, chosen)
            strides = (heads * num_slots * head_dim, num_slots * head_dim, head_dim, 1)
            shape = (num_rows, heads, num_columns, head_dim)
            gathered[name] = copied.as_strided(shape, strides, source.skipped * head_dim)
        return gathered

    def run_of(self, layer_idx: int, name: str, first_block: int, num_blocks: int) -> Tensor:
        """[1, H, tokens, D]: what blocks hold whose ids follow one another, where it lies. Not of a layer with a window."""
        held, size = self._follow(self.all.layers[layer_idx][name]), self.block_size
        return _by_head(held).narrow(1, first_block * size, num_blocks * size).unsqueeze(0)

    def _follow(self, held: Tensor) -> Tensor:
        """A layer's tensor, about to be used: see `StreamOrder.follow`."""
        if self.accelerators:
            self._streams.follow(held.device)
        return held

    def tensor_for(self, layer_idx: int, name: str, new: Tensor) -> Tensor:
        """The tensor that takes `new`; made, widened or moved where needed.

        Raises:
            PoolArgumentError: as `write` does.
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
    """Bytes of a block in a slab's tensor, which may hold none."""
    streams, heads, _, size, head_dim = tensor.shape
    return streams * heads * size * head_dim * tensor.dtype.itemsize


def _zeroed(
    num_blocks: int, num_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A layer's tensor, `[num_blocks, num_heads, block_size, head_dim]`, whose heads come first in memory."""
    return zeros((num_heads, num_blocks, block_size, head_dim), dtype, device).transpose(0, 1)


def _by_head(held: Tensor) -> Tensor:
    """A layer's tensor as [num_heads, slots, head_dim]."""
    return held.transpose(0, 1).flatten(1, 2)


def reorder_rows(tensors: Iterable[Tensor], sources: Sequence[int], index: Tensor | None = None) -> bool:
    """In each tensor, [R, H, columns, D], row `i` becomes what row `sources[i]` was.

    Args:
        index: the sources as a tensor on some device, if there is one. On an accelerator rows that stay are copied, too:
            which those are is not known there.

    Returns:
        whether there was memory for all columns of a tensor; else one after the other has moved.

    Raises:
        torch.OutOfMemoryError: nor was there for one. Rows of some tensors have moved, and those of others have not.
    """
    moved, transfer = [row for row, source in enumerate(sources) if source != row], Transfer()
    of, to = transfer.add([sources[row] for row in moved]), transfer.add(moved)

    def move(tensor: Tensor) -> None:
        if index is None or index.is_cpu:
            _copy(tensor, of, to, transfer)
        else:
            tensor[: len(sources)] = tensor.index_select(0, index.to(tensor.device))

    has_memory = True
    for tensor in tensors:
        try:
            move(tensor)
            continue
        except torch.OutOfMemoryError:  # while it is handled, it holds what the frames hold that it came through
            has_memory = False
        for column in tensor.chunk(tensor.shape[2], 2):
            move(column)
    return has_memory


def copy_rows(
    tensors: Iterable[Tensor], sources: Sequence[int], destinations: Sequence[int], transfer: Transfer | None = None
) -> None:
    """In each tensor, `[destinations[i]]` becomes what `[sources[i]]` was; no destination comes twice."""
    transfer = Transfer() if transfer is None else transfer
    of, to = transfer.add(sources), transfer.add(destinations)
    for tensor in tensors:
        _copy(tensor, of, to, transfer)


def _copy(tensor: Tensor, of: int, to: int, transfer: Transfer) -> None:
    """`copy_rows` of one tensor; its rows are lists of the transfer."""
    device = tensor.device
    tensor.index_copy_(0, transfer.on(device, to), tensor.index_select(0, transfer.on(device, of)))
