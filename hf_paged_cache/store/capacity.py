"""Owns allocator, pool and the lock for both: how many blocks there are and can be, and how many each running call may still take.

They grow together, on demand, up to a number of blocks or a memory budget. Who holds which block is `BlockStore`'s. Whoever
changes block tables holds `lock`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch

from ..blocks import PrefixCachingBlockAllocator, WindowBlocks
from ..errors import CacheArgumentError
from ..kv.block_pool import BlockPool
from ..kv.grouped_pool import GroupedPool
from ..locks import new_lock
from .holder import Holder
from .memory_budget import add_store, default_budget_bytes, lacks_room
from .state_snapshots import StateRules, StateSnapshots
from .window_admission import WindowAdmission
from .window_groups import WindowGroups

# An untouched page of host memory costs nothing, so a pool there grows in few, large steps. On an accelerator every byte
# is taken when it is asked for.
_GROWTH_ON_HOST = 8
_CAPACITY_FACTOR_ON_HOST = 64  # of the blocks managed
_SPARE_PART_ON_ACCELERATOR = 8  # there a pool grows by an eighth, or by what is missing
_FIRST_NUM_BLOCKS = 64  # managed before the first call says how many it needs
_MOST_UNMEASURED_TOKENS = 1024  # of a first call that runs before anybody knows what a token takes


class Capacity:
    """One pool of blocks, and how many of them can be had.

    Pool and allocator grow up to `max_num_blocks`: the number given, or what the memory budget holds. That is known after the
    first forward, or where a long call comes first, before it. The pool never holds fewer blocks than the allocator manages.

    Args:
        block_size: tokens of a block, at least 1.
        num_blocks: the most blocks, with the null block; None: as `memory_budget` allows.
        first_device: where the model's first keys and values will be.
        window_of: layer index -> its window, for the layers that have one.
        layers: indices of all layers that have keys and values, with a window or without.
        window_share: of the blocks, how many window blocks there can be; see `WindowGroups`.
        states, bytes_per_block: see `StateSnapshots`.
        has_budget: `num_blocks` is what a budget in bytes holds, beside as many bytes of snapshots.
        measure_layers: layer index -> where its keys and values lie, and their bytes for one token; runs a forward.

    Attributes:
        max_num_blocks: the most blocks there can be; None until a forward shows what the budget holds. Where memory ran
            out, what was managed by then.
        ran_out_of_memory: there was none for more blocks, or beside them; until something would be refused for it.
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
    ) -> None:
        if num_blocks is not None and num_blocks < 2:
            raise CacheArgumentError(
                f"num_blocks is {num_blocks}; it must be at least 2: block 0 is reserved, and a call needs at least one"
            )
        self.lock = new_lock(self)
        self.max_num_blocks = num_blocks
        self.ran_out_of_memory = False
        self._promised_num_blocks = num_blocks  # given, or settled
        self.allocator = PrefixCachingBlockAllocator(self._first_num_blocks, block_size)
        self.windows = WindowGroups(self.allocator, window_of, layers, window_share, num_blocks)
        has_least = num_blocks is not None and not has_budget
        self.states = StateSnapshots(self.allocator, states, bytes_per_block, has_least=has_least)
        self.states.limit(num_blocks)
        self.first_device = first_device
        self.window_admission = WindowAdmission(self.allocator, self.windows)
        self.pool = BlockPool(block_size, first_device)
        if self.windows:
            self.pool = GroupedPool(block_size, first_device, window_of, self.windows.groups)
        self._measure_layers = measure_layers
        self._measured: Mapping[int, tuple[torch.device, int]] = {}  # counts until the pool has these layers
        self._budget_bytes: dict[torch.device, int] = {}  # of keys and values and copies of them, by what was free
        self._copies = 0  # of a running row's columns, beside the pool
        self._reserved: WeakKeyDictionary[Holder, int] = WeakKeyDictionary()  # call -> blocks that it may still take
        add_store(self)

    @property
    def _first_num_blocks(self) -> int:
        """Blocks managed of an empty store."""
        most = self._promised_num_blocks
        return _FIRST_NUM_BLOCKS if most is None else min(most, _FIRST_NUM_BLOCKS)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.allocator.block_size

    @property
    def is_settled(self) -> bool:
        """Whether the most blocks were given, or a forward has shown what the budget holds."""
        return self._promised_num_blocks is not None

    @property
    def num_free_blocks(self) -> int | None:
        """Blocks that hold nothing, managed already or not; None where the most there can be is not known yet."""
        if self.max_num_blocks is None:
            return None
        if self.windows.are_all:
            group = self.windows.groups[0]
            return group.num_free + self.max_num_blocks - group.num_blocks
        return self.allocator.num_free_blocks + self.max_num_blocks - self.allocator.num_blocks

    def pool_of(self, group: WindowBlocks) -> BlockPool:
        """The tensors of a group's window blocks."""
        assert isinstance(self.pool, GroupedPool)  # where there are groups
        return self.pool.of_window(group.window)

    def num_obtainable_blocks(self, holder: Holder | None) -> float:
        """Blocks that `holder` can have now: free, cached or not managed yet, less what others have reserved."""
        if self.max_num_blocks is None or self.windows.are_all:  # the windows say what there is
            return math.inf
        unmanaged = self.max_num_blocks - self.allocator.num_blocks
        return self.allocator.num_available_blocks + unmanaged - self.num_reserved_blocks(holder)

    def reserve(self, holder: Holder, num_blocks: int) -> None:
        """Reserve `num_blocks` for `holder`, in place of what it had reserved; nobody else gets them."""
        if num_blocks > 0:
            self._reserved[holder] = num_blocks
        else:
            self._reserved.pop(holder, None)

    def give_back_reservation(self, holder: Holder) -> None:
        """Nothing is reserved for `holder` any more."""
        self._reserved.pop(holder, None)
        if self.windows:
            self.window_admission.reserve(holder, ())

    def num_blocks_reserved_for(self, holder: Holder) -> int:
        """Blocks reserved for `holder`."""
        return self._reserved.get(holder, 0)

    def num_reserved_blocks(self, holder: Holder | None) -> int:
        """Blocks reserved for others than `holder`; None: for anybody."""
        return sum(number for other, number in self._reserved.items() if other is not holder)

    def make_room(self, num_blocks: int) -> None:
        """Grow within the budget until `num_blocks` blocks are free, so that nothing is evicted for them.

        Where memory runs out, what is managed becomes the most there is: fewer may be there than were reserved.
        """
        most, allocator = self.max_num_blocks, self.allocator
        if self.windows.are_all:  # a block costs no memory; one that nobody holds any more is as good as a new one
            most = max(most or 0, allocator.num_blocks + num_blocks - allocator.num_available_blocks)
        managed = self._grow(self.pool, allocator.num_blocks, num_blocks - allocator.num_free_blocks, most)
        if managed > allocator.num_blocks:
            allocator.grow(managed)
        for group in self.windows.groups:
            most = None if group.most == math.inf else int(group.most)
            managed = self._grow(self.pool_of(group), group.num_blocks, num_blocks - group.num_free, most)
            if managed > group.num_blocks:
                group.grow(managed)

    def _grow(self, pool: BlockPool, managed: int, missing: int, most: int | None) -> int:
        """Let a pool hold what is managed, and up to `most` blocks so many more as are missing; returns how many it can."""
        wanted = managed
        if missing > 0 and managed != most:
            wanted += self._growth(managed, missing)
            if most is not None:
                wanted = min(wanted, most)
        if pool.capacity < wanted:
            capacity = wanted
            if most is not None and pool.is_on_host:
                capacity = max(wanted, min(most, wanted * _CAPACITY_FACTOR_ON_HOST))  # growing again would copy
            if not any(self._grow_pool(pool, number) for number in dict.fromkeys((capacity, wanted))):
                self.stop_growing()
                return managed
        return wanted

    def _growth(self, managed: int, missing: int) -> int:
        """The blocks to manage more where so many are missing.

        On an accelerator an eighth of the pool at least, so that all growth copies at most 8 times what the pool ends with.
        Beyond what is missing it takes what running calls have reserved, up to an eighth.
        """
        if self.pool.is_on_host:
            return max(missing, managed * (_GROWTH_ON_HOST - 1))
        reserved = max(0, self.num_reserved_blocks(None) - self.allocator.num_free_blocks - missing)
        spare = min(reserved, (managed + missing) // _SPARE_PART_ON_ACCELERATOR)
        return max(managed // _SPARE_PART_ON_ACCELERATOR, missing + spare)

    def _grow_pool(self, pool: BlockPool, num_blocks: int) -> bool:
        """Whether there was memory for it. Looks first: tensors that had grown before one could not might stay large."""
        if lacks_room(pool.bytes_to_grow(num_blocks)):
            return False
        try:
            pool.ensure_capacity(num_blocks)
        except torch.OutOfMemoryError:
            return False
        return True

    def stop_growing(self) -> None:
        """There is no memory for more blocks, or beside them: what is managed now is the most there is, until `grow_anew`."""
        self.ran_out_of_memory = True
        self.windows.stop_growing()
        self.max_num_blocks = self.windows.groups[0].num_blocks if self.windows.are_all else self.allocator.num_blocks

    def grow_anew(self) -> None:
        """There may be memory again: the most there can be is what was given, or settled."""
        self.max_num_blocks = self._promised_num_blocks
        self.windows.limit(self.max_num_blocks)
        self.ran_out_of_memory = False

    def affordable_blocks(self) -> float:
        """The most blocks there can be: what was given, or what the memory budget holds; infinite before any was written.

        Each device holds its own layers, and a copy of those of all running rows where a view makes one.
        """
        if self.is_settled and self.max_num_blocks is not None:
            return self.max_num_blocks
        return 1 + min(
            (
                self._budget_bytes.get(device, math.inf) // (num_bytes * (1 + self._copies))
                for device, num_bytes in self._bytes_per_block_on().items()
            ),
            default=math.inf,
        )

    def _bytes_per_block_on(self) -> dict[torch.device, float]:
        """Bytes that a block takes of each device, with its part of the window blocks, and as many of snapshots."""
        total: dict[torch.device, float] = {}
        if not self._measured.keys() <= {*self.pool.layer_indices}:
            for layer_idx, (device, num_bytes) in self._measured.items():
                share = self.windows.share if layer_idx in self.windows.window_of else 1
                total[device] = total.get(device, 0) + num_bytes * self.block_size * share
        else:
            total.update(self.pool.bytes_per_block_on())
            for group in self.windows.groups:
                for device, num_bytes in self.pool_of(group).bytes_per_block_on().items():
                    total[device] = total.get(device, 0) + num_bytes * self.windows.share
        if self.states:
            return self.states.with_snapshots(total, None if self.windows.layers else self.first_device())
        return total

    def bytes_to_come(self, device: torch.device) -> int:
        """Bytes of `device` that the most blocks, and copies of them, take beyond what the pool has taken."""
        with self.lock:
            most, num_bytes = self.max_num_blocks, self._bytes_per_block_on().get(device, 0)
            if most is None or not num_bytes:
                return 0
            return int(most * num_bytes * (1 + self._copies)) - self.pool.bytes_on().get(device, 0)

    def measure_for(self, num_tokens: int) -> None:
        """So many tokens may come: where they are many, and no forward has shown what a block takes, measure it and settle the budget.

        No lock is held: this runs a forward.
        """
        if self.is_settled or num_tokens <= _MOST_UNMEASURED_TOKENS:
            return
        measured = self._measure_layers()
        with self.lock:
            self._measured = measured
        self.read_budget()
        with self.lock:
            self.settle_budget()

    def read_budget(self) -> None:
        """Look how much memory is free where blocks were written. No lock is held meanwhile: files are read."""
        with self.lock:
            devices = list(self._bytes_per_block_on()) if not self.is_settled else []
        budget = {device: default_budget_bytes(device, self) for device in devices}
        with self.lock:
            self._budget_bytes = budget

    def settle_budget(self, most: int | None = None) -> None:
        """Once it is known how large a block is, and after `read_budget`: fix the most blocks there can be.

        Args:
            most: that other processes can have, too.
        """
        if not self.is_settled and (affordable := self.affordable_blocks()) < math.inf:
            admitted = self.allocator.num_blocks + sum(self._reserved.values())
            if self.windows.are_all:
                admitted = max(group.num_blocks + group.num_to_come for group in self.windows.groups)
            promised = max(admitted, int(affordable) if most is None else most)
            if not self.ran_out_of_memory:
                self.max_num_blocks = promised
                self.windows.limit(promised)
            self.states.limit(promised)
            self._promised_num_blocks = promised  # last: settled

    @abstractmethod
    def lose_threads(self, idents: frozenset[int]) -> None:
        """These threads are not there, as in a forked child: nothing that they ran holds blocks. See `BlockStore`."""
