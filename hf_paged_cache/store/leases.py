"""Owns the leases of the blocks that calls read or write.

Leases are noted by the thread that took them, so that a forked child can give them back.
"""

import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..blocks import Allocation, BlockHash, Changing, Group, PrefixCachingBlockAllocator, Resumption, resumable
from ..blocks.image_tokens import WholeImages
from ..blocks.tokens import TokenIds
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups


class Resumable(NamedTuple):
    """`Resumable` says what is known of a row whose layers have windows or carry states."""

    lease: Allocation  # of the blocks up to where the row resumes
    num_tokens: int  # number of tokens after which the row resumes
    num_whole: int  # number of tokens after which the row could resume if it might do so anywhere
    num_matched: int  # number of tokens in known blocks, whether the row could resume after them or not


class Leases:
    """`Leases` leases blocks: a leased block is neither evicted nor written by others.

    The caller holds the store's lock.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator, windows: WindowGroups, states: StateSnapshots) -> None:
        self._allocator, self._windows, self._states = allocator, windows, states
        self._threads: WeakKeyDictionary[Allocation, int] = WeakKeyDictionary()  # lease -> ident of its thread

    def take(self, hashes: Sequence[BlockHash], salt: bytes) -> Allocation:
        """Lease the leading blocks that are known; the caller frees the lease."""
        return self._noted(self._allocator.allocate(hashes, namespace=salt))

    def take_resumable(self, hashes: Sequence[BlockHash], salt: bytes, tokens: TokenIds, most: int) -> Resumable:
        """Lease the leading blocks after which all layers can resume, with their window blocks.

        The caller frees the lease by `give_back`.

        Args:
            tokens: tokens of the row, from its first one on.
            most: most tokens after which the row may resume.
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
        """Note that rows resume `num_tokens` tokens into a lease, and hold what windows see there, as far as kept."""
        lease.resumption = Resumption(num_tokens, num_tokens)
        for group in self._windows.groups:
            group.hold(lease.block_ids[index] for index in group.seen(num_tokens))

    def give_back(self, lease: Allocation) -> None:
        """Free a lease. Where its rows could resume, others are likely to resume, too."""
        resumption = lease.resumption
        if resumption is None:
            self._allocator.free(lease)
            return
        with Changing(self._windows.groups):
            block_ids = [*lease.block_ids]
            self._allocator.free(lease)
            for group in self._windows.groups:
                group.leave(block_ids, resumption)

    def fork(self, lease: Allocation, num_blocks: int) -> Allocation:
        """Return another lease of the first blocks of a lease."""
        return self._noted(self._allocator.fork(lease, num_blocks))

    def lose_threads(self, idents: Collection[int], used: Collection[Allocation]) -> None:
        """Give back what threads held that ended with a fork, but for the leases that somebody uses yet."""
        for lease, ident in [*self._threads.items()]:
            if ident in idents and lease not in used and not lease.is_freed:
                self.give_back(lease)

    def _noted(self, lease: Allocation) -> Allocation:
        self._threads[lease] = threading.get_ident()
        return lease
