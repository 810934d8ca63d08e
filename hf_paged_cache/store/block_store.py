"""Owns who holds blocks: calls, pins, lower tiers; what becomes due before a write; and what is forgotten.

Shared by many caches, and outlives them. Knows no rows and no forwards. How many blocks there are is `Capacity`'s to say.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from weakref import WeakSet

import torch

from ..blocks import BlockHash, BlockTable, WindowedTable
from ..errors import CacheBusyError
from ..kv.grouped_pool import GroupedPool
from ..kv.transfers import Transfer
from ..tiers.base import Tier
from .call_totals import CallTotals
from .capacity import Capacity
from .holder import Holder, LeftBehind
from .lower_tiers import LowerTiers
from .pins import Pins
from .state_snapshots import StateRules


class BlockStore(Capacity):
    """One pool of blocks and who may have them.

    Args:
        tiers: see `LowerTiers`; all others: see `Capacity`.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int | None = None,
        first_device: Callable[[], torch.device] = lambda: torch.device("cpu"),
        window_of: Mapping[int, int] = MappingProxyType({}),
        layers: Collection[int] = (),
        window_share: float = 1.0,
        states: StateRules | None = None,
        bytes_per_block: int = 0,
        *,
        has_budget: bool = False,
        measure_layers: Callable[[], Mapping[int, tuple[torch.device, int]]] = dict,
        tiers: Sequence[Tier] = (),
    ) -> None:
        super().__init__(
            block_size,
            num_blocks,
            first_device,
            window_of,
            layers,
            window_share,
            states,
            bytes_per_block,
            has_budget=has_budget,
            measure_layers=measure_layers,
        )
        self.pins = Pins(self.allocator, self.window_admission, self.new_table)
        self.tiers = LowerTiers(self, tiers)
        self.call_totals = CallTotals()
        self._must_give_back = False  # not even one forward had the memory that it needed
        # (layer, name) of what every forward writes; empty before the first
        self.writing_layers: frozenset[tuple[int, str]] = frozenset()
        self.left_behind: deque[LeftBehind] = deque()  # appended to by finalizers, which may run in any line of ours
        self._holders: WeakSet[Holder] = WeakSet()

    def kv_bytes_in_use(self, salt: bytes = b"") -> int:
        """Bytes of the blocks that somebody holds; given a salt, of its blocks."""
        allocator = self.allocator
        num_blocks = allocator.num_blocks_in_use_of(salt) if salt else allocator.num_blocks_in_use
        num_bytes = num_blocks * self.pool.bytes_per_block
        if groups := self.windows.groups:
            for group, num_needed in zip(groups, self.windows.num_needed(salt or None), strict=True):
                num_bytes += num_needed * self.pool_of(group).bytes_per_block
        return num_bytes

    def may_write(self, layer_idx: int) -> bool:
        """Whether forwards write keys and values in this layer; before the first one has returned, any layer may be one that does."""
        return not self.writing_layers or any(layer == layer_idx for layer, _ in self.writing_layers)

    def new_table(self, root: bytes, salt: bytes) -> BlockTable:
        """An empty table of this store's blocks."""
        if self.windows:
            return WindowedTable(self.allocator, root, namespace=salt, groups=self.windows.groups)
        return BlockTable(self.allocator, root, namespace=salt)

    def add_holder(self, holder: Holder) -> None:
        """From here on, the call may take blocks."""
        with self.lock:
            self._holders.add(holder)
            self._copies = max(self._copies, holder.view.most_copies)

    def holders(self) -> Iterable[Holder]:
        """The calls that may hold blocks."""
        return list(self._holders)

    def settle(self) -> None:
        """Take back the blocks of collected caches."""
        while self.left_behind:
            self.left_behind[0].end()
            self.left_behind.popleft()
        for group in self.windows.groups:
            group.settle()

    def follow_windows(self, window_of: Mapping[int, int], holder: Holder) -> bool:
        """Rows of `holder` begin, and the layers have these windows now: what is cached under others is forgotten.

        Returns:
            Whether they can run: not while other calls hold blocks of layers with other windows.
        """
        if not isinstance(self.pool, GroupedPool) or self.windows.window_of == window_of:
            return True
        others = [call for call in self.holders() if call is not holder]
        ended = [holder.previous, *(rows for call in others for rows in (call.rows, call.previous))]
        held = self.pins.block_ids().union(*(rows.block_ids() for rows in ended))
        if len(held) < self.allocator.num_blocks_in_use or any(call.is_running for call in others):
            return False
        for call in others:
            call.drop_rows()
        holder.previous.free()
        self.reset_prefix_cache()
        self.window_admission.forget()
        self.windows.regroup(window_of)
        self.pool.regroup(window_of, self.windows.groups)
        self.tiers.watch_windows()
        self.windows.window_of = {**window_of}  # last: interrupted above, the next call begins again
        return True

    def make_way(self) -> None:
        """A model's forward ran out of memory: the pool grows no more, and where nobody holds a block, its memory is given back.

        Then three quarters of what was managed is the most, so that blocks are evicted before a forward lacks memory again.
        """
        self.stop_growing()
        managed = self.max_num_blocks or 0
        if managed > self._first_num_blocks and not self.allocator.num_blocks_in_use:
            self.reset_prefix_cache(keep_tiers=True)
            self.stop_growing()
            self.max_num_blocks = max(managed - managed // 4, self.max_num_blocks or 0)
            self.windows.limit(self.max_num_blocks)

    def give_back_later(self) -> None:
        """The memory does not even hold one forward: `give_back` is to give up all that nobody holds."""
        self._must_give_back = True

    def give_back(self) -> None:
        """Where `give_back_later` was called, and nobody holds a block, forget all of them and give their memory back."""
        if self._must_give_back and not self.allocator.num_blocks_in_use:
            self.reset_prefix_cache(keep_tiers=True)

    def make_copies(self, transfer: Transfer | None = None, *, may_wait: bool = True) -> None:
        """Copy out what was evicted, and make the pending copies of copy on write; to be called before the next write.

        Args:
            transfer: see `BlockPool.copy_blocks`.
            may_wait: see `LowerTiers.move_down`.
        """
        if self.tiers:
            self.tiers.move_down(may_wait=may_wait)
        copies = self.allocator.pending_copies
        if copies:
            self.pool.copy_blocks(copies, transfer)
            self.allocator.drop_copies(len(copies))
        for group in self.windows.groups:
            if group.copies:
                copies = tuple(group.copies)
                self.pool_of(group).copy_blocks(copies, transfer)
                del group.copies[: len(copies)]

    def check(self) -> None:
        """Prove the invariants of the blocks and window blocks, or raise BlockStateError with the whole state."""
        self.allocator.check()
        self.windows.check()
        self.states.check()
        self.tiers.check()

    def lose_threads(self, idents: frozenset[int]) -> None:
        """These threads are not there, as in a forked child: nothing that they ran holds blocks."""
        for holder in self.holders():
            holder.lose_threads(idents)

    def drop_rows(self, salt: bytes | None = None) -> None:
        """Let go of the rows of calls that are over, of one salt or of all.

        Raises:
            CacheBusyError: a call runs, or something else holds blocks, such as a forward ahead of a call; nothing has
                changed.
        """
        calls = [call for call in self.holders() if salt in (None, call.salt)]
        held = self.pins.block_ids(salt).union(
            *(rows.block_ids() for call in calls for rows in (call.rows, call.previous))
        )
        allocator = self.allocator
        num_in_use = allocator.num_blocks_in_use if salt is None else allocator.num_blocks_in_use_of(salt)
        if len(held) < num_in_use or any(call.is_running for call in calls):
            where = (
                "on this store" if salt is None else "on a cache of this salt" if salt else "on a cache without a salt"
            )
            raise CacheBusyError(
                f"a call is running {where}; reset the prefix cache when it has ended (rows of plain forwards end with "
                "their cache's reset())"
            )
        for call in calls:
            call.drop_rows()

    def forget_blocks(self, block_hashes: Iterable[BlockHash], salt: bytes) -> None:
        """Let nobody hit these blocks of a salt any more, in whatever tier, nor go on from what layers carry behind them."""
        self.allocator.forget(block_hashes, salt)
        if self.states:
            self.states.kept.settle()  # before a block gets one of these hashes again
        if self.tiers:
            self.tiers.forget(block_hashes, salt)

    def forget(self, salt: bytes) -> None:
        """Forget every cached block of a salt and drop its pins; where nobody has a block then, give the memory back.

        Rows of this salt hold no block any more.
        """
        self.pins.unpin(salt, None)
        self.allocator.forget_cached_blocks(salt)
        if self.states:
            self.states.kept.settle()
        self.tiers.forget_namespace(salt)
        is_empty = self.allocator.num_blocks_in_use == self.allocator.num_cached_blocks == 0
        if is_empty and not any(holder.is_running for holder in self.holders()):
            self.reset_prefix_cache(keep_tiers=True)

    def reset_prefix_cache(self, *, keep_tiers: bool = False) -> None:
        """Forget every cached block, drop all pins and give the pool's memory back. It may grow anew where it ran out.

        Args:
            keep_tiers: what lower tiers have stays.

        Raises:
            BlockStateError: rows hold blocks; nothing has changed.
        """
        if self.allocator.num_blocks_in_use == self.pins.num_blocks_held_alone:
            self.pins.clear()
        num_blocks = self._first_num_blocks
        self.allocator.reset_prefix_cache(num_blocks)
        self.windows.reset(num_blocks)
        self.states.kept.reset()
        self.tiers.lose_pool() if keep_tiers else self.tiers.reset()
        self.pool.clear()
        self.grow_anew()
        self._must_give_back = False
