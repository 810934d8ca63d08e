"""The blocks that calls hold while they read or write them, by the thread that took them: what a forked child gives back."""

import threading
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

from ..blocks import Allocation, BlockHash, PrefixCachingBlockAllocator


class Leases:
    """Leases of blocks. A leased block is neither evicted nor written by others.

    The store's lock is held in all of it.

    Args:
        allocator: of the blocks.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator) -> None:
        self._allocator = allocator
        self._threads: WeakKeyDictionary[Allocation, int] = WeakKeyDictionary()  # lease -> ident of who took it

    def take(self, hashes: Sequence[BlockHash], salt: bytes) -> Allocation:
        """A lease of the leading blocks that are known; the caller frees it."""
        return self._noted(self._allocator.allocate(hashes, namespace=salt))

    def fork(self, lease: Allocation, num_blocks: int) -> Allocation:
        """Another lease of the first blocks of one."""
        return self._noted(self._allocator.fork(lease, num_blocks))

    def lose_threads(self, idents: Collection[int], used: Collection[Allocation]) -> None:
        """These threads ended with a fork: give back what they held, but for the leases that somebody uses yet."""
        for lease, ident in [*self._threads.items()]:
            if ident in idents and lease not in used and not lease.is_freed:
                lease.free()

    def _noted(self, lease: Allocation) -> Allocation:
        self._threads[lease] = threading.get_ident()
        return lease
