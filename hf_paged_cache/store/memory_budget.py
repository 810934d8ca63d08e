"""Decides how many blocks a store may have, and grows its allocator and pool up to that.

By default blocks may take a share of what their device has free. What other stores were promised does not count as
free.
"""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import psutil
import torch

from ..blocks import PrefixCachingBlockAllocator
from ..kv.block_pool import BLOCKS, BlockPool, GroupTensors
from ..locks import new_lock
from .groups import StateSnapshots, WindowGroups

DEFAULT_SHARE = 0.5  # share of the free memory, when neither num_blocks nor max_bytes is given

_CONTROL_GROUP = Path("/sys/fs/cgroup")  # where Linux tells a container its limits (control groups, version 2)

_GROWTH_ON_HOST = 8
_PART_ON_ACCELERATOR = 8
_FIRST_NUM_BLOCKS = 64  # blocks managed before the first call says how many it needs
_LEAST_NUM_BLOCKS = 2  # the null block and one more

_budgets: WeakSet["MemoryBudget"] = WeakSet()  # budgets of the stores that live
_lock = new_lock()  # guards `_budgets`


def first_num_blocks(most: int | None) -> int:
    """Return the number of blocks that an empty store manages, which may have `most` blocks."""
    return _FIRST_NUM_BLOCKS if most is None else min(most, _FIRST_NUM_BLOCKS)


def default_budget_bytes(device: torch.device, budget: "MemoryBudget") -> int:
    """Return `DEFAULT_SHARE` of what `device` has free now and no other store in this process was promised.

    Each store gets at least an equal part of `DEFAULT_SHARE`: most never take all that they were promised. The caller
    holds no store's lock: other stores' locks are taken, one after the other.
    """
    free = free_bytes(device)
    with _lock:
        budgets = list(_budgets)
    to_come = [other.bytes_to_come(device) for other in budgets if other is not budget]
    others = [num_bytes for num_bytes in to_come if num_bytes > 0]
    return int(max(free - sum(others), free // (1 + len(others))) * DEFAULT_SHARE)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that `device`, or a host in place of one that does not tell, has free in this container."""
    free = _free_bytes_of_accelerator(device)
    if free is not None:
        return free
    available = int(psutil.virtual_memory().available)
    in_container = _free_bytes_in_container()
    return available if in_container is None else min(available, in_container)


def _free_bytes_of_accelerator(device: torch.device) -> int | None:
    """Return the bytes that the driver says are free, and those that torch holds unused; None: nobody tells."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    accelerator = torch.accelerator
    try:
        free, _ = accelerator.get_memory_info(device)
        return free + accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    except (AttributeError, RuntimeError, ValueError):  # this torch, device or accelerator does not tell
        return None


def _free_bytes_in_container() -> int | None:
    """Return the bytes left of the container's limit; None if there is no limit, or it cannot be read."""
    names = "memory.max", "memory.current", "memory.stat"
    try:
        limit, used, counted = ((_CONTROL_GROUP / name).read_text(encoding="ascii") for name in names)
        counts = dict(line.split() for line in counted.splitlines())
        return max(0, int(limit) - int(used) + int(counts["inactive_file"]))  # the latter can be reclaimed
    except (OSError, ValueError, KeyError):  # no such file; "max": no limit
        return None


class MemoryBudget:
    """`MemoryBudget` decides how many blocks there can be, and grows allocator and pool together up to that.

    There can be as many as were given, or as memory holds, which is known after the first forward. The pool never holds
    fewer blocks than the allocator manages. The caller holds the store's lock. Bytes of a block count window blocks by
    their share; with `has_max_bytes`, `num_blocks` is what a number of bytes holds, beside as many bytes of snapshots.
    """

    def __init__(
        self,
        lock: threading.RLock,
        allocator: PrefixCachingBlockAllocator,
        pool: BlockPool,
        windows: WindowGroups,
        states: StateSnapshots,
        num_blocks: int | None,
        bytes_per_block: int,
        *,
        has_max_bytes: bool,
    ) -> None:
        self._lock, self._allocator, self._pool, self._windows, self._states = lock, allocator, pool, windows, states
        self.num_blocks = self._promised = num_blocks  # most blocks now, and as given or settled; None: unknown yet
        self.is_settled = num_blocks is not None
        self._is_of_bytes = has_max_bytes or num_blocks is None
        self._counted_bytes = float(bytes_per_block + states.bytes_beside_a_block)  # of a block, by the budget
        self.bytes_of_static_rows: Callable[[], int] = int  # they count in the same budget
        states.limit(num_blocks)
        with _lock:
            _budgets.add(self)

    @property
    def first_num_blocks(self) -> int:
        """Number of blocks that an empty store manages."""
        return first_num_blocks(self._promised)

    @property
    def _most_beside_rows(self) -> int | None:
        """Most blocks beside static rows; never fewer than are managed."""
        num_bytes = self.bytes_of_static_rows()
        if self.num_blocks is None or not num_bytes:
            return self.num_blocks
        taken = math.ceil(num_bytes / max(1, self._pool.all.bytes_per_block))
        return max(self._allocator.num_blocks, self.num_blocks - taken)

    def num_obtainable_blocks(self) -> float:
        """Return the number of blocks that can be had now: free, cached or not managed yet."""
        most = self._most_beside_rows
        if most is None or self._windows.are_all:  # window blocks are what limits calls
            return math.inf
        return self._allocator.num_available_blocks + most - self._allocator.num_blocks

    def make_room(self, num_blocks: int) -> None:
        """Grow until `num_blocks` blocks are free, so that nothing is evicted for them, as far as there is room.

        Where memory runs out, the blocks managed by then are the most blocks there can be.
        """
        most, allocator = self._most_beside_rows, self._allocator
        if self._windows.are_all:  # a block costs no memory: a block that nobody holds any more is as good as a new one
            most = max(most or 0, allocator.num_blocks + num_blocks - allocator.num_available_blocks)
        managed = self._grow(self._pool.all, allocator.num_blocks, num_blocks - allocator.num_free_blocks, most)
        if managed > allocator.num_blocks:
            allocator.grow(managed)
        for group in self._windows.groups:
            most = None if group.most == math.inf else int(group.most)
            managed = self._grow(self._pool.groups[group.name], group.num_blocks, num_blocks - group.num_free, most)
            if managed > group.num_blocks:
                group.grow(managed)

    def _grow(self, tensors: GroupTensors, managed: int, missing: int, most: int | None) -> int:
        """Make tensors large enough for the blocks managed, and for as many of the missing blocks as there can be.

        An untouched page of host memory costs nothing, so a pool there grows in few, large steps. On an accelerator it
        grows by at least an eighth, so that all growth copies at most 8 times what the pool ends with.

        Returns the number of blocks that can be managed now.
        """
        wanted = managed
        if missing > 0:
            spare = managed * (_GROWTH_ON_HOST - 1) if self._pool.is_on_host else managed // _PART_ON_ACCELERATOR
            wanted += max(missing, spare)
        if most is not None:
            wanted = max(managed, min(wanted, most))
        if tensors.capacity < wanted:
            try:
                tensors.ensure_capacity(wanted)
            except torch.OutOfMemoryError:
                self.stop_growing()
                return managed
        return wanted

    def stop_growing(self) -> None:
        """Allow no more blocks than are managed now, until `grow_anew`: there is no memory for more, or beside them."""
        groups = self._windows.groups
        for group in groups:
            group.most = group.num_blocks
        self.num_blocks = groups[0].num_blocks if self._windows.are_all else self._allocator.num_blocks

    def grow_anew(self) -> None:
        """Allow as many blocks again as were given or settled: there may be memory again."""
        self._allow(self._promised)

    def _allow(self, num_blocks: int | None) -> None:
        self.num_blocks = num_blocks
        self._windows.limit(num_blocks)

    def shrink(self, managed: int) -> None:
        """Let there be three quarters of the blocks that were managed, before a forward lacks memory again."""
        self.stop_growing()
        self._allow(max(managed - managed // 4, self.num_blocks or 0))

    def _bytes_per_block_on(self) -> dict[torch.device, float]:
        """Return the bytes that a block takes of each device, with its part of window blocks and snapshots."""
        if self._states and not self._windows.layers:
            return {self._pool.first_device(): self._states.bytes_beside_a_block}
        total: dict[torch.device, float] = {}
        for name, tensors in self._pool.groups.items():
            share = (1 if name == BLOCKS else self._windows.share) * (2 if self._states else 1)
            for device, num_bytes in tensors.bytes_per_block_on.items():
                total[device] = total.get(device, 0) + num_bytes * share
        return total

    def bytes_to_come(self, device: torch.device) -> int:
        """Return the bytes of `device` that the most blocks take beyond what the pool has taken.  Takes the lock."""
        with self._lock:
            most, num_bytes = self.num_blocks, self._bytes_per_block_on().get(device, 0)
            return 0 if most is None else int(most * num_bytes) - self._pool.bytes_on()[device]

    def bytes_left_of(self, num_bytes: int) -> int:
        """Return how many of these bytes blocks have not taken.  Takes the lock."""
        with self._lock:
            return max(0, num_bytes - self._pool.bytes_on().total())

    def settle(self) -> None:
        """Fix the most blocks there can be, once it is known how large a block is.

        The caller holds no lock: this reads how much memory is free on the devices of the blocks.
        """
        if self.is_settled:
            return
        with self._lock:
            bytes_per_block = self._bytes_per_block_on()
        free = {device: default_budget_bytes(device, self) for device in bytes_per_block}
        with self._lock:
            if not free or self.is_settled:
                return
            fitting = min(free[device] // num_bytes for device, num_bytes in bytes_per_block.items())
            managed = self._windows.groups if self._windows.are_all else [self._allocator]
            self._promised = max(_LEAST_NUM_BLOCKS, int(fitting), *(each.num_blocks for each in managed))
            if self.num_blocks is None:  # else memory ran out before
                self._allow(self._promised)
            self._states.limit(self._promised)
            self._counted_bytes = sum(bytes_per_block.values())
            self.is_settled = True  # set last

    def fits(self) -> bool:
        """Return whether blocks take no more bytes than the budget counts with."""
        return not self._is_of_bytes or sum(self._bytes_per_block_on().values()) <= self._counted_bytes

    def count_anew(self) -> None:
        """Allow as many blocks as the same bytes hold now that a block takes more of them. Nobody holds a block."""
        if self._promised is not None and not self.fits():
            taken = sum(self._bytes_per_block_on().values())
            self._promised = max(_LEAST_NUM_BLOCKS, int(self._promised * self._counted_bytes / taken))
            self._counted_bytes = taken
            self._states.limit(self._promised)
