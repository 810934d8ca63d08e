"""Decides how many blocks a store may have, and grows its allocator and pool up to that.

By default blocks may take a share of what their device has free. What other stores were promised does not count as
free.
"""

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import psutil
import torch

from ..blocks import PrefixCachingBlockAllocator, Snapshots, WindowBlocks
from ..kv.block_pool import BLOCKS, BlockPool, GroupTensors
from ..kv.states import States
from ..locks import new_lock

DEFAULT_SHARE = 0.5  # share of the free memory, when neither num_blocks nor max_bytes is given
# Number of window blocks for each block, where a budget in bytes is divided. A sequence needs few window blocks,
# however long it is; the others keep prompts that may be resumed anywhere.
SHARE_OF_A_BUDGET = 0.5

_CONTROL_GROUP = Path("/sys/fs/cgroup")  # where Linux tells a container its limits (control groups, version 2)

_GROWTH_ON_HOST = 8
_PART_ON_ACCELERATOR = 8
_FIRST_NUM_BLOCKS = 64  # blocks managed before the first call says how many it needs
_LEAST_NUM_BLOCKS = 2  # the null block and one more
_LEAST_SNAPSHOTS = 8  # snapshots that there may be in any case, if a number of blocks was given
_LEAST_UNSETTLED, _BYTES_UNSETTLED = 4, 2**26  # limits of snapshots before anybody knows how many blocks there can be
_BLOCKS_OF_A_SNAPSHOT = 8  # blocks for each snapshot, if blocks themselves take no memory

_budgets: WeakSet["MemoryBudget"] = WeakSet()  # budgets of the stores that live
_lock = new_lock()  # guards `_budgets`


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


class StateRules(NamedTuple):
    """`StateRules` says what a store must know of a model's states."""

    num_bytes: int  # bytes of a row's states
    chunk: int = 1  # number of tokens that kernels compute at once; a split elsewhere rounds otherwise
    width: int = 0  # columns of padding that a row must see, if it has so many, to be as if it had seen all of them
    clamps_one_token: bool = False  # one token is computed otherwise than several
    is_recorded: bool = False  # convolutions alone carry states: one forward shows those after each of its tokens

    def bytes_beside(self, bytes_per_block: int) -> int:
        """Return the bytes of snapshots for each block that there can be."""
        return bytes_per_block or -(-self.num_bytes // _BLOCKS_OF_A_SNAPSHOT)


class MemoryBudget:
    """`MemoryBudget` decides how many blocks there can be, and grows allocator and pool together up to that.

    There can be as many as were given, or as memory holds, which is known after the first forward. The pool never holds
    fewer blocks than the allocator manages. The caller holds the store's lock. Bytes of a block count window blocks by
    their share; with `has_max_bytes`, `num_blocks` is what a number of bytes holds, beside as many bytes of snapshots.

    For each block that there can be there are `window_share` window blocks. If every layer has a window
    (`are_all_windows`), a block costs nothing beside its window blocks, and the most blocks are window blocks.
    Snapshots may take as many bytes as the most blocks; if a number of blocks was given, there may be 8 in any case.
    """

    def __init__(
        self,
        lock: threading.RLock,
        allocator: PrefixCachingBlockAllocator,
        pool: BlockPool,
        windows: Sequence[WindowBlocks],
        snapshots: Snapshots[States],
        states: StateRules | None,
        num_blocks: int | None,
        bytes_per_block: int,
        *,
        window_share: float,
        are_all_windows: bool,
        has_max_bytes: bool,
    ) -> None:
        self._lock, self._allocator, self._pool, self._windows = lock, allocator, pool, windows
        self._snapshots, self._states = snapshots, states
        self._has_states_alone = states is not None and not bytes_per_block
        self._window_share, self.are_all_windows = 1.0 if are_all_windows else window_share, are_all_windows
        self.num_blocks = self._promised = num_blocks  # most blocks now, and as given or settled; None: unknown yet
        self.is_settled = num_blocks is not None
        self._is_of_bytes = has_max_bytes or num_blocks is None
        self.bytes_beside_a_block = 0 if states is None else states.bytes_beside(bytes_per_block)  # of snapshots
        self._counted_bytes = float(bytes_per_block + self.bytes_beside_a_block)  # of a block, by the budget
        self.bytes_of_static_rows: Callable[[], int] = int  # they count in the same budget
        self.reset()
        self._limit_snapshots()
        with _lock:
            _budgets.add(self)

    def reset(self) -> None:
        """Forget all blocks, and begin with few; BlockStateError if one is in use. There may be more memory again."""
        num_blocks = _FIRST_NUM_BLOCKS if self._promised is None else min(self._promised, _FIRST_NUM_BLOCKS)
        self._allocator.reset_prefix_cache(num_blocks)
        for group in self._windows:
            group.reset(self._window_blocks_beside(num_blocks))
        self._allow(self._promised)

    def _window_blocks_beside(self, num_blocks: int) -> int:
        return max(_LEAST_NUM_BLOCKS, int(num_blocks * self._window_share))

    def _limit_snapshots(self) -> None:
        if self._states is not None:
            num_bytes = max(1, self._states.num_bytes)
            most = max(_LEAST_UNSETTLED, _BYTES_UNSETTLED // num_bytes)
            if self._promised is not None:
                least = 0 if self._is_of_bytes else _LEAST_SNAPSHOTS
                most = max(least, self._promised * self.bytes_beside_a_block // num_bytes)
            self._snapshots.limit(most)

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
        if most is None or self.are_all_windows:  # window blocks are what limits calls
            return math.inf
        return self._allocator.num_available_blocks + most - self._allocator.num_blocks

    def make_room(self, num_blocks: int) -> None:
        """Grow until `num_blocks` blocks are free, so that nothing is evicted for them, as far as there is room.

        Where memory runs out, the blocks managed by then are the most blocks there can be.
        """
        most, allocator = self._most_beside_rows, self._allocator
        if self.are_all_windows:  # a block costs no memory: a block that nobody holds any more is as good as a new one
            most = max(most or 0, allocator.num_blocks + num_blocks - allocator.num_available_blocks)
        managed = self._grow(self._pool.all, allocator.num_blocks, num_blocks - allocator.num_free_blocks, most)
        if managed > allocator.num_blocks:
            allocator.grow(managed)
        for group in self._windows:
            most = None if group.most == math.inf else int(group.most)
            managed = self._grow(self._pool.groups[group.name], group.num_blocks, num_blocks - group.num_free, most)
            if managed > group.num_blocks:
                group.grow(managed)

    def _grow(self, tensors: GroupTensors, managed: int, missing: int, most: int | None) -> int:
        """Make tensors large enough for the blocks managed, and for as many of the missing blocks as there can be.

        Return how many can be managed now. A pool on a host, where an untouched page costs nothing, grows in few steps.
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
        """Allow no more blocks than are managed now: there is no memory for more, or beside them. `reset` ends that."""
        for group in self._windows:
            group.most = group.num_blocks
        self.num_blocks = (self._windows[0] if self.are_all_windows else self._allocator).num_blocks

    def _allow(self, num_blocks: int | None) -> None:
        self.num_blocks = num_blocks
        for group in self._windows:
            most = math.inf if num_blocks is None else self._window_blocks_beside(num_blocks)
            group.most = max(group.num_blocks, most)

    def shrink(self, managed: int) -> None:
        """Let there be three quarters of the blocks that were managed, before a forward lacks memory again."""
        self.stop_growing()
        self._allow(max(managed - managed // 4, self.num_blocks or 0))

    def _bytes_per_block_on(self) -> dict[torch.device, float]:
        """Return the bytes that a block takes of each device, with its part of window blocks and snapshots."""
        if self._has_states_alone:
            return {self._pool.first_device(): self.bytes_beside_a_block}
        total: dict[torch.device, float] = {}
        for name, tensors in self._pool.groups.items():
            share = (1 if name == BLOCKS else self._window_share) * (1 if self._states is None else 2)
            for device, num_bytes in tensors.bytes_per_block_on.items():
                total[device] = total.get(device, 0) + num_bytes * share
        return total

    def _default_bytes(self, device: torch.device) -> int:
        """Return `DEFAULT_SHARE` of what `device` has free now and no other store in this process was promised.

        Each store gets at least an equal part of `DEFAULT_SHARE`: most never take all that they were promised. The
        caller holds no store's lock: other stores' locks are taken, one after the other.
        """
        with _lock:
            others = [budget for budget in _budgets if budget is not self]
        to_come = [num_bytes for other in others if (num_bytes := other.bytes_to_come(device)) > 0]
        free = free_bytes(device)
        return int(max(free - sum(to_come), free // (1 + len(to_come))) * DEFAULT_SHARE)

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
        free = {device: self._default_bytes(device) for device in bytes_per_block}
        with self._lock:
            if not free or self.is_settled:
                return
            fitting = min(free[device] // num_bytes for device, num_bytes in bytes_per_block.items())
            managed = self._windows if self.are_all_windows else [self._allocator]
            self._promised = max(_LEAST_NUM_BLOCKS, int(fitting), *(each.num_blocks for each in managed))
            if self.num_blocks is None:  # else memory ran out before
                self._allow(self._promised)
            self._limit_snapshots()
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
            self._limit_snapshots()
