"""Owns the groups of layers that see a window, one for each window.

It decides how many window blocks there are and can be. The caller holds the store's lock.
"""

import math
from collections.abc import Collection, Mapping

from ..blocks import PrefixCachingBlockAllocator, Window, WindowBlocks

# Number of window blocks for each block, where a budget in bytes is divided. A sequence needs few window blocks,
# however long it is; the others keep prompts that may be resumed anywhere.
SHARE_OF_A_BUDGET = 0.5


class WindowGroups:
    """`WindowGroups` has the window blocks of a store, in one group for each window.

    Args:
        window_of: layer index -> the layer's window; without any window there are no groups.
        layers: indices of all layers that hold keys and values.
        share: number of window blocks for each block that there can be, if some layers have no window.
        most: most blocks that there can be; None: nobody knows yet.

    Attributes:
        are_all: True if every layer has a window. Then a block costs nothing beside its window blocks, and the most
            blocks there can be are window blocks.
        may_change: True if some layers had a window at first, so that others may come to have one.
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        window_of: Mapping[int, Window],
        layers: Collection[int],
        share: float,
        most: int | None = None,
    ) -> None:
        self._allocator, self.layers = allocator, layers
        self.may_change = bool(window_of)
        self._share, self._most = share, most
        self.regroup(window_of)
        self.window_of = {**window_of}

    def regroup(self, window_of: Mapping[int, Window]) -> None:
        """Give the layers these windows from here on. No block is in use or can be hit."""
        self.are_all = bool(window_of) and all(layer_idx in window_of for layer_idx in self.layers)
        self.share = 1.0 if self.are_all else self._share
        windows = sorted(set(window_of.values()), key=lambda window: -window.size)
        first = self._share_of(self._allocator.num_blocks)
        self.groups = [WindowBlocks(self._allocator, window, first) for window in windows]
        self.limit(self._most)
        self.reset(self._allocator.num_blocks)

    def _share_of(self, num_blocks: int) -> int:
        """Return the number of window blocks beside `num_blocks` blocks."""
        return max(2, int(num_blocks * self.share))

    def limit(self, num_blocks: int | None) -> None:
        """Note how many blocks there can be; None: nobody knows yet.

        What is managed already can be had all the same.
        """
        self._most = num_blocks
        for group in self.groups:
            group.most = math.inf if num_blocks is None else max(group.num_blocks, self._share_of(num_blocks))

    def stop_growing(self) -> None:
        """Allow no more window blocks than there are: there is no memory."""
        for group in self.groups:
            group.most = group.num_blocks

    def reset(self, num_blocks: int) -> None:
        """Forget all, and start anew with the window blocks that go with `num_blocks` blocks; no block is in use."""
        for group in self.groups:
            group.reset(self._share_of(num_blocks))

    def num_needed(self, namespace: bytes | None = None) -> list[int]:
        """Return for each group the number of window blocks that somebody needs; given a namespace, of its blocks."""
        if namespace is None:
            return [group.num_needed for group in self.groups]
        own = [allocation for allocation in self._allocator.allocations() if allocation.namespace == namespace]
        return [len(group.needed_by(own)) for group in self.groups]

    @property
    def have_room(self) -> bool:
        """True if there can be as many window blocks as somebody needs."""
        return all(group.num_needed < group.most for group in self.groups)

    def check(self) -> None:
        """Prove the invariants of each group, or raise BlockStateError."""
        for group in self.groups:
            group.check()
