"""The blocks that calls hold while they read or write them, by the thread that took them: what a forked child gives back."""

import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..blocks import Allocation, BlockHash, Group, PrefixCachingBlockAllocator, resumable
from ..blocks.allocation import Resumption
from ..blocks.image_tokens import WholeImages
from ..blocks.tokens import TokenIds
from ..blocks.window_blocks import Changing
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups


class Resumable(NamedTuple):
    """What is known of a row whose layers have windows, or carry states.

    Attributes:
        lease: of the blocks up to where it resumes.
        num_tokens: after which it resumes.
        num_whole: after which it could resume, if it might do so anywhere.
        num_matched: that blocks are known of, whether it could resume there or not.
    """

    lease: Allocation
    num_tokens: int
    num_whole: int
    num_matched: int


class Leases:
    """Leases of blocks. A leased block is neither evicted nor written by others.

    The store's lock is held in all of it.

    Args:
        allocator: of the blocks.
        windows: whose window blocks are held with them.
        states: the snapshots beside them.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator, windows: WindowGroups, states: StateSnapshots) -> None:
        self._allocator, self._windows, self._states = allocator, windows, states
        self._threads: WeakKeyDictionary[Allocation, int] = WeakKeyDictionary()  # lease -> ident of who took it

    def take(self, hashes: Sequence[BlockHash], salt: bytes) -> Allocation:
        """A lease of the leading blocks that are known; the caller frees it."""
        return self._noted(self._allocator.allocate(hashes, namespace=salt))

    def take_resumable(self, hashes: Sequence[BlockHash], salt: bytes, tokens: TokenIds, most: int) -> Resumable:
        """The same as far as layers with a window or a state can resume, with their window blocks; free it by `give_back`.

        Args:
            tokens: of the row, from its first one on.
            most: tokens after which rows resume at most.

        """
        windows, size = self._windows.groups, self._allocator.block_size
        groups: list[Group] = [*windows, WholeImages(tokens)]
        groups += [self._states.kept] if self._states else []
        with Changing(windows):
            lease = self.take(hashes, salt)
            num_matched = len(lease.block_ids) * size
            num_whole = num_tokens = resumable(groups, lease.block_ids, num_matched)
            if num_tokens > most:
                num_tokens = resumable(groups, lease.block_ids, most)
            self._allocator.truncate(lease, -(-num_tokens // size))
            self.resume(lease, num_tokens)
        return Resumable(lease, num_tokens, num_whole, num_matched)

    def resume(self, lease: Allocation, num_tokens: int) -> None:
        """Rows resume after so many tokens of a lease: what layers with a window see there is held, as far as it is there."""
        lease.resumption = Resumption.at(num_tokens)
        for group in self._windows.groups:
            group.hold(lease.block_ids[index] for index in group.seen(num_tokens))

    def give_back(self, lease: Allocation) -> None:
        """Free a lease; where rows could resume is where others are likely to."""
        groups = self._windows.groups if lease.resumption is not None else []
        with Changing(groups):
            block_ids, resumption = [*lease.block_ids], lease.resumption
            lease.free()
            for group in groups:
                if resumption is not None:
                    group.leave(block_ids, resumption)

    def fork(self, lease: Allocation, num_blocks: int) -> Allocation:
        """Another lease of the first blocks of one."""
        return self._noted(self._allocator.fork(lease, num_blocks))

    def lose_threads(self, idents: Collection[int], used: Collection[Allocation]) -> None:
        """These threads ended with a fork: give back what they held, but for the leases that somebody uses yet."""
        for lease, ident in [*self._threads.items()]:
            if ident in idents and lease not in used and not lease.is_freed:
                self.give_back(lease)

    def _noted(self, lease: Allocation) -> Allocation:
        self._threads[lease] = threading.get_ident()
        return lease
