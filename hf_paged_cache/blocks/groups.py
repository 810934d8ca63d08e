"""Finds after how many tokens of a sequence all groups of layers can resume it.

A group is the layers that need the same of a sequence to resume it: those with one window, or those that carry a state.
Layers that see every token are in no group: a cached block is all that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Window:
    """`Window` lets a query see itself and the `size - 1` tokens before it.

    Examples:
        >>> Window(8).handed_from(20), Window(8).needed(20)
        (13, range(13, 20))
    """

    size: int

    @property
    def name(self) -> int | str:
        """Name of the group, in the pool and in files."""
        return self.size

    @property
    def most_needed(self) -> int:
        """Most tokens that `needed` returns: the last token is always kept."""
        return max(1, self.size - 1)

    def needed(self, num_tokens: int) -> range:
        """Return the positions of the tokens that must be kept to resume after `num_tokens` tokens."""
        return range(max(0, num_tokens - self.most_needed), num_tokens)

    def handed_from(self, start: int) -> int:
        """Return the first column that attention is handed in a forward from column `start` on."""
        return max(0, start - self.size + 1)


class Group(Protocol):
    """`Group` stands for the layers with one window (`WindowBlocks`), or for those that carry a state (`Snapshots`)."""

    @property
    def name(self) -> int | str:
        """Name of the layers in the pool and in files: the name of their window, or "states"."""

    def seen(self, num_tokens: int) -> range:
        """Return logical indices of the blocks of which something must be kept to resume after `num_tokens` tokens."""

    def has(self, block_id: int) -> bool:
        """Return whether what these layers need of a block is kept."""

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """Return an upper bound of the tokens, of `num_tokens`, after which these layers can resume.

        The bound is exact if it is `num_tokens`. `has` says whether what the layers need of the block with a logical
        index is kept.
        """


def resumable(groups: Iterable[Group], block_ids: Sequence[int], num_tokens: int) -> int:
    """Return the most tokens, of the first `num_tokens` in these blocks, after which every group can resume.

    Effects: none. There may be fewer blocks than `num_tokens` tokens need.

    Examples:
        >>> from . import PrefixCachingBlockAllocator, WindowBlocks
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=2)
        >>> group = WindowBlocks(allocator, Window(3), num_blocks=4)
        >>> group.places.update({1: 3, 2: 1})  # block -> window block
        >>> resumable([group], [1, 2, 5], 6)
        4
    """
    held = len(block_ids)
    return resumable_where(groups, num_tokens, lambda group, index: index < held and group.has(block_ids[index]))


def resumable_where(groups: Iterable[Group], num_tokens: int, has: Callable[[Group, int], bool]) -> int:
    """Do what `resumable` does; `has` says whether a group has what it needs of the block with a logical index."""
    most = None
    while most != num_tokens:
        most = num_tokens
        for group in groups:
            num_tokens = group.resumable(num_tokens, partial(has, group))
    return num_tokens
