"""Owns which layer's blocks lie in which tensors: those of layers with a window in window blocks, of which there are fewer.

Whoever asks names blocks by the allocator's ids; where these have window blocks, `WindowBlocks.places` says.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from ..blocks.window_blocks import WindowBlocks
from .block_pool import BlockPool
from .recycled_memory import RecycledMemory
from .slot_mapping import ReadSource, RowLayout, SlotMapping
from .transfers import Transfer


class GroupedSlotMapping(SlotMapping):
    """A `SlotMapping` with those of the windows' layers, where only what has a window block is written.

    Args:
        groups: window -> its window blocks.
    """

    def __init__(
        self,
        slots: Sequence[int],
        sources: Sequence[int] | None,
        transfer: Transfer | None,
        groups: Mapping[int, WindowBlocks],
        block_size: int,
    ) -> None:
        super().__init__(slots, sources, transfer)
        self._groups = groups
        self._block_size = block_size
        self._in_windows: dict[int, SlotMapping] = {}
        if transfer is not None:  # what its devices need goes along
            for window in groups:
                self.in_window(window)

    def in_window(self, window: int) -> SlotMapping:
        """What the layers with this window write."""
        mapping = self._in_windows.get(window)
        if mapping is None:
            places, size, slots = self._groups[window].places, self._block_size, self.slots
            sources = range(len(slots)) if self.sources is None else self.sources
            placed = [
                (places[slot // size] * size + slot % size, source)
                for slot, source in zip(slots, sources, strict=True)
                if slot // size in places
            ]
            is_whole = self.sources is None and len(placed) == len(slots)
            written = None if is_whole else [source for _, source in placed]
            mapping = SlotMapping([slot for slot, _ in placed], written, self._transfer)
            self._in_windows[window] = mapping
        return mapping


class GroupedPool(BlockPool):
    """A `BlockPool` for layers without a window, and with it one for each window, which is written and read as one pool.

    What counts or copies blocks (`capacity`, `bytes_per_block`, `copy_blocks` ...) is of the layers without a window; of
    those with one, `of_window` has it. Bytes in all are of all.

    Args:
        window_of: layer index -> its window, for the layers that have one.
        groups: the window blocks of each window.
    """

    def __init__(
        self,
        block_size: int,
        first_device: Callable[[], torch.device],
        window_of: Mapping[int, int],
        groups: Iterable[WindowBlocks],
    ) -> None:
        super().__init__(block_size, first_device)
        self._num_groupings = 0
        self.regroup(window_of, groups)

    def regroup(self, window_of: Mapping[int, int], groups: Iterable[WindowBlocks]) -> None:
        """The layers have these windows from here on. Nothing is in the pool."""
        self._num_groupings += 2**20  # the pools of windows count from 0 again
        self._groups = {group.window: group for group in groups}
        self._window_of = {layer_idx: window for layer_idx, window in window_of.items() if window in self._groups}
        self._in_windows = {window: BlockPool(self.block_size, self._first_device, self) for window in self._groups}

    def of_window(self, window: int) -> BlockPool:
        """The tensors of the layers with this window; their ids are window blocks."""
        return self._in_windows[window]

    def _pools(self) -> list[BlockPool]:
        return [*self._in_windows.values()]

    @property
    def layer_indices(self) -> list[int]:
        return sorted(chain(super().layer_indices, *(pool.layer_indices for pool in self._pools())))

    def has_layer(self, layer_idx: int) -> bool:
        pool = self._in_windows.get(self._window_of.get(layer_idx, 0))
        return super().has_layer(layer_idx) if pool is None else pool.has_layer(layer_idx)

    @property
    def pool_bytes(self) -> int:
        return super().pool_bytes + sum(pool.pool_bytes for pool in self._pools())

    def bytes_on(self) -> dict[torch.device, int]:
        total = Counter(super().bytes_on())
        for pool in self._pools():
            total.update(pool.bytes_on())
        return dict(total)

    @property
    def is_on_host(self) -> bool:
        return super().is_on_host and all(pool.is_on_host for pool in self._pools())

    def clear(self) -> None:
        super().clear()
        for pool in self._pools():
            pool.clear()

    def held_by_window(self) -> dict[int | None, dict[tuple[int, str], Tensor]]:
        held = super().held_by_window()
        for window, pool in self._in_windows.items():
            held[window] = pool.held_by_window()[None]
        return held

    @property
    def layout(self) -> int:
        return self._num_groupings + self.num_layouts + sum(pool.num_layouts for pool in self._pools())

    def use_blocks(self, window: int | None, ids: Sequence[int]) -> None:
        if window is None:
            super().use_blocks(None, ids)
        else:
            self._in_windows[window].use_blocks(None, ids)

    def map_slots(
        self, slots: Sequence[int], sources: Sequence[int] | None = None, transfer: Transfer | None = None
    ) -> SlotMapping:
        return GroupedSlotMapping(slots, sources, transfer, self._groups, self.block_size)

    def rows_in(self, window: int | None, rows: Sequence[RowLayout], start: int) -> Sequence[RowLayout]:
        group = self._groups.get(window or 0)
        if group is None:
            return rows
        placed = []
        for row in rows:
            first = min(len(row.block_ids), max(0, start - row.pad) // self.block_size)
            block_ids = [0] * first + [group.places.get(block_id, 0) for block_id in row.block_ids[first:]]
            placed.append(row._replace(block_ids=block_ids))
        return placed

    def write(self, layer_idx: int, states: Mapping[str, Tensor], slot_mapping: SlotMapping) -> None:
        window = self._window_of.get(layer_idx)
        if window is None:
            super().write(layer_idx, states, slot_mapping)
        else:
            self._in_windows[window].write(layer_idx, states, _in_window(slot_mapping, window))

    def tensor_for(self, layer_idx: int, name: str, new: Tensor) -> Tensor:
        pool = self._in_windows.get(self._window_of.get(layer_idx, 0))
        return super().tensor_for(layer_idx, name, new) if pool is None else pool.tensor_for(layer_idx, name, new)

    def lay_out(self, layer_idx: int, name: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        window = self._window_of.get(layer_idx)
        pool = self._in_windows.get(window) if window is not None else None
        if pool is None:
            super().lay_out(layer_idx, name, heads, head_dim, dtype)
        else:
            pool.lay_out(layer_idx, name, heads, head_dim, dtype)

    def write_blocks(
        self, columns: Iterable[tuple[int, Mapping[str, Tensor]]], block_ids: Sequence[int], offset: int
    ) -> None:
        of_window: dict[int | None, list[tuple[int, Mapping[str, Tensor]]]] = {}
        for layer_idx, states in columns:
            of_window.setdefault(self._window_of.get(layer_idx), []).append((layer_idx, states))
        for window, layers in of_window.items():
            if window is None:
                super().write_blocks(layers, block_ids, offset)
            else:
                places = self._groups[window].places
                placed = [places[block_id] for block_id in block_ids]
                self._in_windows[window].write_blocks(layers, placed, offset)

    def gather(
        self,
        layer_idx: int,
        source: ReadSource,
        names: Iterable[str] | None = None,
        memory: RecycledMemory | None = None,
    ) -> dict[str, Tensor]:
        pool = self._in_windows.get(self._window_of.get(layer_idx, 0))
        if pool is None:
            return super().gather(layer_idx, source, names, memory)
        return pool.gather(layer_idx, source, names, memory)


def _in_window(slot_mapping: SlotMapping, window: int) -> SlotMapping:
    assert isinstance(slot_mapping, GroupedSlotMapping)  # as `map_slots` makes them
    return slot_mapping.in_window(window)
