"""Owns one model's allocator and pool of blocks, and the lock for both.

It decides who holds them, and what is forgotten. Many caches share them, and they outlive the caches. This module knows
no rows and no forwards. Whoever changes block tables holds `lock`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakSet

import torch

from ..blocks import OF_WEIGHTS, Group, PrefixCachingBlockAllocator, Snapshots, Window, WindowBlocks
from ..errors import CacheBusyError
from ..kv.block_pool import BlockPool
from ..kv.states import States
from ..locks import new_lock
from ..stats import CacheStats, CallTotals
from ..tiers.tiers import Tiers
from ..wording import where_of
from .contents import Contents
from .leases import Leases
from .memory_budget import MemoryBudget, StateRules

_MIN_GRID = 512  # least tokens of the grid of snapshots


class BlockStore:
    """`BlockStore` has one pool of blocks.

    `num_blocks` is the most that there can be, with the null block, or None for as many as memory holds; the device of
    the first keys and values is asked as they come. `layers` are all that hold keys and values. For the other arguments
    see `MemoryBudget`. Snapshots are kept after multiples of `align` tokens, and of long prompts, where there is room,
    after multiples of `grid`.
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
        has_max_bytes: bool,
        tiers: Tiers | None,
    ) -> None:
        self.lock = new_lock(self)
        self.block_size, self.window_of, self.layers = block_size, {**window_of}, {*layers}
        self.allocator = allocator = PrefixCachingBlockAllocator(num_blocks=2, block_size=block_size)
        by_size = sorted({*window_of.values()}, key=lambda window: -window.size)
        self.windows = windows = [WindowBlocks(allocator, window, num_blocks=2) for window in by_size]
        self.has_states, self.rules = states is not None, states or StateRules(0)
        self.snapshots: Snapshots[States] = Snapshots(allocator)
        # groups of the layers that need more to resume than cached blocks
        self.groups: list[Group] = [*windows, self.snapshots] if self.has_states else [*windows]
        self.pool = BlockPool(block_size, first_device, window_of, windows)
        self.budget = MemoryBudget(
            self.lock,
            allocator,
            self.pool,
            windows,
            self.snapshots,
            states,
            num_blocks,
            bytes_per_block,
            window_share=window_share,
            are_all_windows=bool(window_of) and self.layers <= window_of.keys(),
            has_max_bytes=has_max_bytes,
        )
        self.align = math.lcm(block_size, self.rules.chunk)
        grid = max(_MIN_GRID, self.rules.num_bytes * block_size // max(1, self.budget.bytes_beside_a_block))
        self.grid = -(-grid // self.align) * self.align
        self.leases = Leases(allocator, windows, self.snapshots, self.groups)
        self.tiers = tiers
        self.contents = Contents(allocator, self.pool, windows, self.snapshots, self.layers, tiers)
        self.call_totals = CallTotals()
        self._weights_seen = b""  # part of a digest: the weights under which blocks were kept last
        self._num_resets: Counter[bytes | None] = Counter()  # salt -> resets; None: resets of all salts
        self.sharing: WeakSet[Any] = WeakSet()  # rows of calls that may read blocks where these lie
        self.running: WeakSet[Any] = WeakSet()  # rows of calls of `generate`
        self.currents: WeakSet[Any] = WeakSet()  # state of each cache, with the rows of its last call

    def forget_other_weights(self, digest: bytes) -> None:
        """Forget what was cached under other weights than this digest's, which nobody finds again: it needs no room."""
        weights = digest[:OF_WEIGHTS]
        if weights != self._weights_seen and (self.tiers is None or self.tiers.folder is None):
            if self._weights_seen:
                self.allocator.forget_cached_blocks()
            self._weights_seen = weights

    def kv_bytes_in_use(self, salt: bytes = b"") -> int:
        """Return the bytes of the blocks that somebody holds; given a salt, of its blocks alone."""
        allocator = self.allocator
        num_blocks = allocator.num_blocks_in_use_of(salt) if salt else allocator.num_blocks_in_use
        num_bytes = num_blocks * self.pool.all.bytes_per_block
        for group in self.windows:
            num_bytes += self._num_needed(group, salt) * self.pool.groups[group.name].bytes_per_block
        return num_bytes

    def _num_needed(self, group: WindowBlocks, salt: bytes) -> int:
        """Return the number of window blocks that somebody needs; given a salt, of its blocks alone."""
        if not salt:
            return group.num_needed
        return len(group.needed_by(each for each in self.allocator.allocations() if each.namespace == salt))

    def settle(self) -> None:
        """Take back the window blocks of collected leases."""
        for group in self.windows:
            group.settle()

    def begin_anew(self) -> bool:
        """Forget all, with pins, if no call holds blocks; return whether that was done.

        Keys and values have another dtype, shape or device from here on, or the budget holds fewer blocks.
        """
        if is_idle := self._is_idle():
            self.budget.count_anew()
            self.reset_prefix_cache(keep_tiers=True)
        return is_idle

    def _is_idle(self, salt: bytes | None = None) -> bool:
        """Return whether no call holds blocks, of one salt or of all; pins may."""
        leases, pinned = self.allocator.allocations(), {*self.leases.pins()}
        return all(lease in pinned for lease in leases if lease.block_ids and salt in (None, lease.namespace))

    def make_way(self) -> None:
        """Let the pool grow no more after a model's forward ran out of memory.

        If nobody holds a block, the pool's memory is given back, and the pool is to be smaller from here on.
        """
        self.budget.stop_growing()
        managed = self.budget.num_blocks or 0
        if not self.allocator.num_blocks_in_use:
            self.reset_prefix_cache(keep_tiers=True)
            self.budget.shrink(managed)

    def check(self) -> None:
        """Raise BlockStateError, with the whole state, unless the invariants of all blocks hold."""
        self.allocator.check()
        for group in self.windows:
            group.check()
        self.snapshots.check()

    def stats(
        self, totals: CallTotals, salt: bytes, static_bytes: int, bytes_of_rows: int, peak_kv_bytes: int | None
    ) -> CacheStats:
        """Return the numbers of the calls in `totals`, and of the blocks now: all, or given a salt, its own.

        Given a salt, numbers in which other salts' blocks might show are None.
        """
        allocator = self.allocator
        num_cached = allocator.num_cached_blocks_of(salt) if salt else allocator.num_cached_blocks
        num_in_use = allocator.num_blocks_in_use_of(salt) if salt else allocator.num_blocks_in_use
        num_pinned, num_evictions = len(self.leases.pinned_blocks(salt or None)), allocator.num_evictions
        num_free, num_managed, most = allocator.num_free_blocks, allocator.num_blocks, self.budget.num_blocks
        num_snapshots = self.snapshots.num_of(salt) if salt else len(self.snapshots)
        if self.budget.are_all_windows:
            group = self.windows[0]
            num_cached = group.num_idle_of(salt) if salt else group.num_idle
            num_in_use = self._num_needed(group, salt)
            num_pinned = len(group.needed_by(self.leases.pins(salt or None)))
            num_evictions += group.num_evictions
            num_free, num_managed = group.num_free, group.num_blocks
        return CacheStats(
            prompt_tokens=totals.num_tokens,
            computed_tokens=totals.num_tokens - totals.num_reused - totals.num_shared,
            reused_tokens=totals.num_reused,
            shared_tokens=totals.num_shared,
            hit_rate=totals.num_reused / max(1, totals.num_tokens),
            num_calls=totals.num_calls,
            num_bypassed_calls=totals.num_bypassed_calls,
            num_blocks=None if salt else most,
            num_free_blocks=None if salt or most is None else num_free + most - num_managed,
            num_cached_blocks=num_cached,
            num_blocks_in_use=num_in_use,
            num_pinned_blocks=num_pinned,
            num_evictions=None if salt else num_evictions,
            kv_bytes=self.kv_bytes_in_use(salt) + bytes_of_rows,
            peak_kv_bytes=peak_kv_bytes,
            pool_bytes=None if salt else self.pool.bytes_on().total(),
            num_snapshots=num_snapshots,
            snapshot_bytes=num_snapshots * self.rules.num_bytes,
            static_bytes=None if salt else static_bytes,
            tiers=() if self.tiers is None else self.tiers.stats(salt),
            computed_because=tuple(totals.computed_because.most_common()),
        )

    def lose_threads(self, idents: frozenset[int]) -> None:
        """Give back the blocks of threads that are not there in a forked child; tiers' memory is its parent's.

        Where the thread that is left runs a call, nothing is given back: the call may hold more than its rows tell.
        """
        if self.tiers is not None:
            self.tiers.begin()
        for current in self.currents:
            current.lose_threads(idents)
        if any(rows.thread not in idents for rows in self.running):
            return
        over = [rows for rows in self.sharing if not rows.is_lost(idents) and rows.shared is not None]
        used = {*self.leases.pins(), *(lease for rows in over for lease in rows.shared.leases)}
        for lease in self.allocator.allocations():
            if lease not in used:
                self.leases.give_back(lease)

    def resets_of(self, salt: bytes) -> tuple[int, int]:
        """Return how often all was forgotten, and how often the blocks of this salt were."""
        return self._num_resets[None], self._num_resets[salt]

    def forget(self, salt: bytes | None) -> None:
        """Forget every cached block of a salt, or of all, and drop pins; if nobody has a block then, give memory back.

        Nothing is kept that was computed before. A running call refuses it.
        """
        allocator = self.allocator
        if not self._is_idle(salt):
            raise CacheBusyError(
                f"a call is running {where_of(salt)}; reset the prefix cache when it has ended (rows of plain forwards "
                "end with their cache's reset())"
            )
        self._num_resets[salt] += 1
        if salt is None:
            self.reset_prefix_cache()
            return
        self.leases.unpin(salt, None)
        allocator.forget_cached_blocks(salt)
        self.snapshots.settle()
        self.contents.offload()
        if self.tiers is not None:
            self.tiers.forget_namespace(salt)
        if allocator.num_blocks_in_use == allocator.num_cached_blocks == 0:
            self.reset_prefix_cache(keep_tiers=True)

    def reset_prefix_cache(self, *, keep_tiers: bool = False) -> None:
        """Forget every cached block, drop all pins and give the pool's memory back; BlockStateError if rows hold any.

        The pool may grow anew where memory ran out.
        """
        if self._is_idle():
            self.leases.unpin(None, None)
        self.budget.reset()
        self.snapshots.reset()
        self.contents.evicted = {}  # it goes with the pool's content
        if not keep_tiers:
            self.forget_tiers()
        self.pool.clear()

    def forget_tiers(self) -> None:
        """Find nothing in lower tiers any more, and remove the files that this process has written."""
        self.contents.evicted = {}
        if self.tiers is not None:
            self.tiers.reset()
