"""Owns one model's allocator and pool of blocks, and the lock for both.

It decides how many blocks there are and can be, who holds them, and what is forgotten. Allocator and pool grow
together, on demand, up to a number of blocks or a memory budget. Many caches share them, and they outlive the caches.
This module knows no rows and no forwards. Whoever changes block tables holds `lock`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakSet

import torch

from ..blocks import BlockTable, Group, PrefixCachingBlockAllocator, Window
from ..errors import CacheBusyError
from ..kv.block_pool import BlockPool, GroupTensors, Slab
from ..locks import new_lock
from ..tiers.tiers import Tiers
from ..wording import where_of
from .call_totals import CallTotals
from .content_layout import ContentLayout
from .leases import Leases
from .memory_budget import add_store, default_budget_bytes
from .offload import Offload
from .pins import Pins
from .state_snapshots import StateRules, StateSnapshots
from .window_groups import WindowGroups

# An untouched page of host memory costs nothing, so a pool there grows in few, large steps. On an accelerator every
# byte is taken when it is asked for.
_GROWTH_ON_HOST = 8
_CAPACITY_FACTOR_ON_HOST = 64  # capacity for each block managed
_SPARE_PART_ON_ACCELERATOR = 8  # a pool there grows by an eighth, or by what is missing
_FIRST_NUM_BLOCKS = 64  # blocks managed before the first call says how many it needs
_LEAST_NUM_BLOCKS = 2  # the null block and one more


class BlockStore:
    """`BlockStore` has one pool of blocks, and decides how many blocks there can be.

    Pool and allocator grow up to `max_num_blocks`: the number given, or what the memory budget holds, which is known
    after the first forward. The pool never holds fewer blocks than the allocator manages.

    Args:
        num_blocks: most blocks that there can be, with the null block; None: as many as `memory_budget` allows.
        first_device: returns the device on which the model's first keys and values will be.
        window_of: layer index -> the layer's window, for the layers that have one.
        layers: indices of all layers that have keys and values, with a window or without.
        window_share: number of window blocks for each block; see `WindowGroups`.
        bytes_per_block: bytes of keys and values of a block, if it was measured; window blocks count by their share.
        has_budget: True if `num_blocks` is what a budget in bytes holds, beside as many bytes of snapshots.

    Attributes:
        max_num_blocks: most blocks that there can be. None until a forward shows what the budget holds. Where memory
            ran out, the number of blocks managed by then.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int | None,
        first_device: Callable[[], torch.device],
        window_of: Mapping[int, Window],
        layers: Collection[int],
        window_share: float,
        states: StateRules | None,
        bytes_per_block: int,
        *,
        has_budget: bool,
        tiers: Tiers | None,
    ) -> None:
        self.lock = new_lock(self)
        self.block_size = block_size
        self.max_num_blocks = num_blocks
        self._promised_num_blocks = num_blocks  # most blocks, as given or settled
        self._has_budget = has_budget or num_blocks is None
        self.allocator = PrefixCachingBlockAllocator(self._first_num_blocks, block_size)
        self.windows = WindowGroups(self.allocator, window_of, layers, window_share, num_blocks)
        has_least = num_blocks is not None and not has_budget
        self.states = StateSnapshots(self.allocator, states, bytes_per_block, has_least=has_least)
        self.states.limit(num_blocks)
        self._counted_bytes = float(bytes_per_block + self.states.bytes_beside_a_block)  # of a block, by the budget
        self.leases = Leases(self.allocator, self.windows, self.states)
        self.first_device = first_device
        self.pool = BlockPool(block_size, first_device, window_of, self.windows.groups)
        self.pins = Pins(self.allocator, self.windows, self.leases)
        self.layout = ContentLayout(self.pool, self.windows, self.states, self.make_room)
        self.tiers = tiers
        self._offload: Offload | None = None
        if tiers is not None:
            self._offload = Offload(self.allocator, self.windows, self.states, self.layout, tiers)
        self.call_totals = CallTotals()
        self._weights_seen = b""  # digest of the model under whose weights blocks were kept last
        self._num_resets: Counter[bytes | None] = Counter()  # salt -> resets; None: resets of all salts
        self.sharing: WeakSet[Any] = WeakSet()  # rows of calls that may read blocks where these lie
        self.running: WeakSet[Any] = WeakSet()  # rows of calls of `generate`
        self.currents: WeakSet[Any] = WeakSet()  # state of each cache, with the rows of its last call
        self.bytes_of_static_rows: Callable[[], int] = int  # bytes of static rows that count in the same budget
        add_store(self)

    @property
    def _first_num_blocks(self) -> int:
        """Number of blocks that an empty store manages."""
        most = self._promised_num_blocks
        return _FIRST_NUM_BLOCKS if most is None else min(most, _FIRST_NUM_BLOCKS)

    @property
    def is_settled(self) -> bool:
        """True if the most blocks were given, or a forward has shown what the budget holds."""
        return self._promised_num_blocks is not None

    @property
    def _most_beside_rows(self) -> int | None:
        """Most blocks beside static rows, which take from the same budget; never fewer than are managed."""
        most, num_bytes = self.max_num_blocks, self.bytes_of_static_rows()
        if most is None or not num_bytes:
            return most
        taken = math.ceil(num_bytes / max(1, self.pool.all.bytes_per_block))
        return max(self.allocator.num_blocks, most - taken)

    def num_obtainable_blocks(self) -> float:
        """Return the number of blocks that can be had now: free, cached or not managed yet."""
        if self.max_num_blocks is None or self.windows.are_all:  # window blocks are what limits calls
            return math.inf
        unmanaged = (self._most_beside_rows or 0) - self.allocator.num_blocks
        return self.allocator.num_available_blocks + unmanaged

    def make_room(self, num_blocks: int) -> None:
        """Grow within the budget until `num_blocks` blocks are free, so that nothing is evicted for them.

        Where memory runs out, the blocks managed by then are the most blocks there can be.
        """
        most, allocator = self._most_beside_rows, self.allocator
        if self.windows.are_all:  # a block costs no memory: a block that nobody holds any more is as good as a new one
            most = max(most or 0, allocator.num_blocks + num_blocks - allocator.num_available_blocks)
        managed = self._grow(self.pool.all, allocator.num_blocks, num_blocks - allocator.num_free_blocks, most)
        if managed > allocator.num_blocks:
            allocator.grow(managed)
        for group in self.windows.groups:
            most = None if group.most == math.inf else int(group.most)
            managed = self._grow(self.pool.groups[group.name], group.num_blocks, num_blocks - group.num_free, most)
            if managed > group.num_blocks:
                group.grow(managed)

    def forget_other_weights(self, digest: bytes, num_blocks: int, roots: Callable[[], Collection[bytes]]) -> None:
        """Forget blocks under these roots, of other weights than the digest's, before the pool grows for more."""
        if digest != self._weights_seen and num_blocks > self.allocator.num_free_blocks:
            self.allocator.forget_under(roots())
            self._weights_seen = digest

    def _grow(self, tensors: GroupTensors, managed: int, missing: int, most: int | None) -> int:
        """Make tensors large enough for the blocks managed, and for as many of the missing blocks as there can be.

        On an accelerator they grow by at least an eighth, so that all growth copies at most 8 times what the pool ends
        with. Returns the number of blocks that can be managed now.
        """
        on_host, wanted = self.pool.is_on_host, managed
        if missing > 0 and managed != most:
            spare = managed * (_GROWTH_ON_HOST - 1) if on_host else managed // _SPARE_PART_ON_ACCELERATOR
            wanted += max(missing, spare)
        if most is not None:
            wanted = max(managed, min(wanted, most))
        capacities = [wanted]
        if most is not None and on_host:  # growing again would copy
            capacities = [max(wanted, min(most, wanted * _CAPACITY_FACTOR_ON_HOST)), wanted]
        if tensors.capacity >= wanted or any(_can_grow(tensors, capacity) for capacity in capacities):
            return wanted
        self.stop_growing()
        return managed

    def stop_growing(self) -> None:
        """Allow no more blocks than are managed now, until `grow_anew`: there is no memory for more, or beside them."""
        self.windows.stop_growing()
        self.max_num_blocks = self.windows.groups[0].num_blocks if self.windows.are_all else self.allocator.num_blocks

    def grow_anew(self) -> None:
        """Allow as many blocks again as were given or settled: there may be memory again."""
        self.max_num_blocks = self._promised_num_blocks
        self.windows.limit(self.max_num_blocks)

    def _bytes_per_block_on(self) -> dict[torch.device, float]:
        """Return the bytes that a block takes of each device.

        Its part of the window blocks counts, and as many bytes of snapshots.
        """
        total: dict[torch.device, float] = {}
        for window, tensors in self.pool.groups.items():
            for device, num_bytes in tensors.bytes_per_block_on().items():
                total[device] = total.get(device, 0) + num_bytes * (1 if window is None else self.windows.share)
        if self.states:
            return self.states.with_snapshots(total, None if self.windows.layers else self.first_device())
        return total

    def bytes_to_come(self, device: torch.device) -> int:
        """Return the bytes of `device` that the most blocks take beyond what the pool has taken."""
        with self.lock:
            most, num_bytes = self.max_num_blocks, self._bytes_per_block_on().get(device, 0)
            if most is None or not num_bytes:
                return 0
            return int(most * num_bytes) - self.pool.bytes_on().get(device, 0)

    def bytes_left_of(self, budget: int) -> int:
        """Return the bytes of a budget that blocks have not taken."""
        with self.lock:
            return max(0, budget - self.pool.pool_bytes)

    def settle_budget(self) -> None:
        """Fix the most blocks there can be, once it is known how large a block is.

        The caller holds no lock: this reads how much memory is free on the devices of the blocks.
        """
        if self.is_settled:
            return
        with self.lock:
            bytes_per_block = self._bytes_per_block_on()
        budget = {device: default_budget_bytes(device, self) for device in bytes_per_block}
        with self.lock:
            if not budget or self.is_settled:
                return
            fitting = min(budget[device] // num_bytes for device, num_bytes in bytes_per_block.items())
            managed = self.windows.groups if self.windows.are_all else [self.allocator]
            promised = max(_LEAST_NUM_BLOCKS, int(fitting), *(each.num_blocks for each in managed))
            if self.max_num_blocks is None:  # else memory ran out before
                self.max_num_blocks = promised
                self.windows.limit(promised)
            self.states.limit(promised)
            self._counted_bytes = sum(bytes_per_block.values())
            self._promised_num_blocks = promised  # set last: this makes the store settled

    def fits_budget(self) -> bool:
        """Return whether blocks take no more bytes than a budget in bytes counts with."""
        return not self._has_budget or sum(self._bytes_per_block_on().values()) <= self._counted_bytes

    def kv_bytes_in_use(self, salt: bytes = b"") -> int:
        """Return the bytes of the blocks that somebody holds; given a salt, of its blocks alone."""
        allocator = self.allocator
        num_blocks = allocator.num_blocks_in_use_of(salt) if salt else allocator.num_blocks_in_use
        num_bytes = num_blocks * self.pool.all.bytes_per_block
        for group, num_needed in zip(self.windows.groups, self.windows.num_needed(salt or None), strict=True):
            num_bytes += num_needed * self.pool.groups[group.name].bytes_per_block
        return num_bytes

    @property
    def groups(self) -> list[Group]:
        """Groups of the layers that need more to resume than cached blocks."""
        return [*self.windows.groups, self.states.kept] if self.states else [*self.windows.groups]

    def slabs(self) -> list[Slab]:
        """Return the slabs in which blocks of layers without a window lie now; blocks that are held stay there."""
        return self.pool.all.slabs

    def window_slabs(self) -> dict[Window, list[Slab]]:
        """Return window -> slabs in which the window blocks of its layers lie now."""
        return {group.window: self.pool.groups[group.name].slabs for group in self.windows.groups}

    def new_table(self, root: bytes, salt: bytes) -> BlockTable:
        """Return an empty table for blocks of this store."""
        return BlockTable(self.allocator, root, namespace=salt, groups=self.windows.groups)

    def settle(self) -> None:
        """Take back the window blocks of collected tables."""
        for group in self.windows.groups:
            group.settle()

    def windows_now(self) -> Mapping[int, Window]:
        """Return layer index -> window by which window blocks are held."""
        with self.lock:
            return self.windows.window_of

    def follow_windows(self, window_of: Mapping[int, Window]) -> None:
        """Use these windows of the layers, as rows begin. What is cached under other windows is forgotten.

        While calls hold blocks, nothing changes: `windows_now` says so.
        """
        if self.windows.may_change and self.windows.window_of != window_of and self._is_idle:
            self.reset_prefix_cache()
            self.windows.regroup(window_of)
            self.pool.regroup(window_of, self.windows.groups)
            if self._offload is not None:
                self._offload.watch_windows()
            self.windows.window_of = {**window_of}  # set last: if interrupted before, the next call begins again

    def begin_anew(self) -> bool:
        """Forget all, with pins, if no call holds blocks; return whether that was done.

        Keys and values have another dtype, shape or device from here on, or the budget holds fewer blocks.
        """
        if not self._is_idle:
            return False
        if not self.fits_budget() and self._promised_num_blocks is not None:
            taken = sum(self._bytes_per_block_on().values())
            fitting = int(self._promised_num_blocks * self._counted_bytes / taken)
            self._promised_num_blocks, self._counted_bytes = max(_LEAST_NUM_BLOCKS, fitting), taken
            self.states.limit(self._promised_num_blocks)
        self.reset_prefix_cache(keep_tiers=True)
        return True

    @property
    def _is_idle(self) -> bool:
        """True if no call holds blocks; pins may."""
        return self.allocator.num_blocks_in_use == self.pins.num_blocks_held_alone

    def make_way(self) -> None:
        """Let the pool grow no more after a model's forward ran out of memory.

        If nobody holds a block, the pool's memory is given back. Then there can be three quarters of the blocks that
        were managed, so that blocks are evicted before a forward lacks memory again.
        """
        self.stop_growing()
        managed = self.max_num_blocks or 0
        if managed > self._first_num_blocks and not self.allocator.num_blocks_in_use:
            self.reset_prefix_cache(keep_tiers=True)
            self.stop_growing()
            self.max_num_blocks = max(managed - managed // 4, self.max_num_blocks or 0)
            self.windows.limit(self.max_num_blocks)

    def offload(self) -> None:
        """Copy out what was evicted, before anything is written."""
        if self._offload is not None and self._offload.evicted:
            self._offload.offload()

    def forget_tiers(self) -> None:
        """Find nothing in lower tiers any more, and remove the files that this process has written.

        What was computed may have been wrong all along: other processes are not to find it.
        """
        if self._offload is not None and self.tiers is not None:
            self._offload.evicted = {}
            self.tiers.reset()

    def check(self) -> None:
        """Prove the invariants of the blocks and window blocks, or raise BlockStateError with the whole state."""
        self.allocator.check()
        self.windows.check()
        self.states.kept.check()

    def lose_threads(self, idents: frozenset[int]) -> None:
        """Give back the blocks held by threads that are not there, as in a forked child."""
        for current in self.currents:
            current.lose_threads(idents)
        over = [rows for rows in self.sharing if not rows.is_lost(idents) and rows.shared is not None]
        used = {lease for rows in over for lease in rows.shared.leases}
        self.leases.lose_threads(idents, used.union(self.pins.allocations()))

    def begin_to_forget(self, salt: bytes | None = None) -> None:
        """Count a reset of a salt, or of all: what was computed before it is not to be kept after it.

        Raises:
            CacheBusyError: a call holds blocks of it; nothing has changed.
        """
        allocator, num_pinned = self.allocator, len(self.pins.block_ids(salt))
        if num_pinned < (allocator.num_blocks_in_use if salt is None else allocator.num_blocks_in_use_of(salt)):
            raise CacheBusyError(
                f"a call is running {where_of(salt)}; reset the prefix cache when it has ended (rows of plain forwards "
                "end with their cache's reset())"
            )
        self._num_resets[salt] += 1

    def resets_of(self, salt: bytes) -> tuple[int, int]:
        """Return how often all was forgotten, and how often the blocks of this salt were."""
        return self._num_resets[None], self._num_resets[salt]

    def forget(self, salt: bytes) -> None:
        """Forget every cached block of a salt and drop its pins; if nobody has a block then, give the memory back."""
        self.pins.unpin(salt, None)
        self.allocator.forget_cached_blocks(salt)
        self.states.kept.settle()
        self.offload()
        if self.tiers is not None:
            self.tiers.forget_namespace(salt)
        if self.allocator.num_blocks_in_use == self.allocator.num_cached_blocks == 0:
            self.reset_prefix_cache(keep_tiers=True)

    def reset_prefix_cache(self, *, keep_tiers: bool = False) -> None:
        """Forget every cached block, drop all pins and give the pool's memory back.

        The pool may grow anew where memory ran out. Tiers keep what they have if they are to.

        Raises:
            BlockStateError: rows hold blocks; nothing has changed.
        """
        if self._is_idle:
            self.pins.clear()
        num_blocks = self._first_num_blocks
        self.allocator.reset_prefix_cache(num_blocks)
        self.windows.reset(num_blocks)
        self.states.kept.reset()
        if keep_tiers and self._offload is not None:
            self._offload.evicted = {}  # it goes with the pool's content
        if not keep_tiers:
            self.forget_tiers()
        self.pool.clear()
        self.grow_anew()


def _can_grow(tensors: GroupTensors, num_blocks: int) -> bool:
    """Grow tensors to `num_blocks` blocks, and return whether there was memory for that."""
    try:
        tensors.ensure_capacity(num_blocks)
    except torch.OutOfMemoryError:
        return False
    return True
