"""Groups of layers that need the same of a sequence to resume it, and the one search for how many of its tokens all of them have.

Layers that see every token are in no group: a block that is cached is all that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol


class Group(Protocol):
    """Layers with one window (`WindowBlocks`), or those that carry a state (`Snapshots`)."""

    @property
    def name(self) -> int | str:
        """Names the layers in the pool and in files: what their sight is named, or "states"."""

    def seen(self, num_tokens: int) -> range:
        """Logical indices of the blocks of which something must be kept to resume after so many tokens."""

    def has(self, block_id: int) -> bool:
        """Whether what these layers need of a block is kept."""

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """No fewer than the most tokens, up to `num_tokens`, after which these layers can resume; exact if it is `num_tokens`.

        Args:
            has: whether what they need of the block with this logical index is kept.
        """


def resumable(groups: Iterable[Group], block_ids: Sequence[int], num_tokens: int) -> int:
    """The most of the first `num_tokens` tokens of these blocks after which every group can resume.  Effects: none.

    There may be fewer blocks than for so many.

    Examples:
        >>> from . import PrefixCachingBlockAllocator, Window, WindowBlocks
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=2)
        >>> group = WindowBlocks(allocator, Window(3), num_blocks=4)
        >>> group.places.update({1: 3, 2: 1})  # block -> window block
        >>> resumable([group], [1, 2, 5], 6)
        4
    """
    held = len(block_ids)
    return resumable_where(groups, num_tokens, lambda group, index: index < held and group.has(block_ids[index]))


def resumable_where(groups: Iterable[Group], num_tokens: int, has: Callable[[Group, int], bool]) -> int:
    """`resumable` by another answer to whether a group has what it needs of the block with a logical index."""
    most = None
    while most != num_tokens:
        most = num_tokens
        for group in groups:
            num_tokens = group.resumable(num_tokens, partial(has, group))
    return num_tokens
