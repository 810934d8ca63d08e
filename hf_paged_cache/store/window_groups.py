"""Owns the groups of layers that see a window, one for each window: how many window blocks there are, can be, and who may have them.

A call reserves what it may need of each group in its worst case. The caller holds the store's lock.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..blocks import PrefixCachingBlockAllocator, Sight, WindowBlocks
from .holder import Holder

# Window blocks for each block, where a budget in bytes is divided. A sequence needs few of them, however long it is; what
# there is beyond keeps prompts that may be resumed anywhere.
SHARE_OF_A_BUDGET = 0.5


class RowToCome(NamedTuple):
    """A row of a call in its worst case, in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    num_copies: int  # rows of the batch that it stands for
    is_in_chunks: bool  # the prompt comes in several forwards
    is_copied: bool = False  # its last block is, before it is written
    num_known: int | None = None  # its first forward begins after so many, or one less; None: nobody knows


class WindowGroups:
    """The window blocks of a store.

    Args:
        allocator: of the blocks.
        sight_of: layer index -> its window; without any there are no groups.
        layers: indices of all layers that hold keys and values.
        share: window blocks for each block that there can be, where some layers have no window.
        most: blocks that there can be; None: nobody knows yet.

    Attributes:
        are_all: no layer is without a window. Then a block costs nothing beside its window blocks, and the most there can
            be counts these.
        may_change: some layers have had a window, so others may come to have one.
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        sight_of: Mapping[int, Sight],
        layers: Collection[int],
        share: float,
        most: int | None = None,
    ) -> None:
        self._allocator = allocator
        self.layers = layers
        self.may_change = bool(sight_of)
        self._share = share
        self._most = most
        self._least: list[int] = []  # of each group, window blocks that were promised before the most was known
        # call -> of each group, all that it may need
        self._reserved: WeakKeyDictionary[Holder, tuple[int, ...]] = WeakKeyDictionary()
        self.regroup(sight_of)
        self.sight_of = {**sight_of}

    def regroup(self, sight_of: Mapping[int, Sight]) -> None:
        """The layers have these windows from here on. No block is in use or can be hit; nothing is reserved any more."""
        self._reserved.clear()
        self.are_all = bool(sight_of) and all(layer_idx in sight_of for layer_idx in self.layers)
        self.share = 1.0 if self.are_all else self._share
        sights = sorted(set(sight_of.values()), key=lambda sight: -sight.size)
        first = self._share_of(self._allocator.num_blocks)
        self.groups = [WindowBlocks(self._allocator, sight, first) for sight in sights]
        self._least = [2] * len(sights)
        self.limit(self._most)
        self.reset(self._allocator.num_blocks)

    def _share_of(self, num_blocks: int) -> int:
        """Window blocks beside so many blocks."""
        return max(2, int(num_blocks * self.share))

    def __bool__(self) -> bool:
        """Whether any layer has a window."""
        return bool(self.groups)

    @property
    def are_implied(self) -> bool:
        """Whether who has blocks can have their window blocks: there are as many."""
        num_blocks = self._allocator.num_blocks
        return not self.are_all and self.share == 1 and all(group.most >= num_blocks for group in self.groups)

    def limit(self, num_blocks: int | None) -> None:
        """There can be so many blocks; None: nobody knows yet. What was admitted until it is known can be had all the same."""
        if self._most is None and num_blocks is not None:
            self._least = [max(g.num_blocks, 1 + g.num_needed + g.num_to_come) for g in self.groups]
        self._most = num_blocks
        for group, least in zip(self.groups, self._least, strict=True):
            group.most = math.inf if num_blocks is None else max(least, self._share_of(num_blocks))

    def stop_growing(self) -> None:
        """There is no memory for more window blocks."""
        for group in self.groups:
            group.most = group.num_blocks

    def reset(self, num_blocks: int) -> None:
        """Forget all, and start anew with those that go with so many blocks; no block is in use."""
        for group in self.groups:
            group.reset(self._share_of(num_blocks))

    def num_needed(self, namespace: bytes | None = None) -> list[int]:
        """Of each group, the window blocks that somebody needs; given a namespace, of its blocks."""
        if namespace is None:
            return [group.num_needed for group in self.groups]
        own = [allocation for allocation in self._allocator.allocations() if allocation.namespace == namespace]
        return [len(group.needed_by(own)) for group in self.groups]

    def of_forward(self, spans: Iterable[tuple[int, int, bool]], *, keeps_past: bool = False) -> tuple[int, ...]:
        """Of each group, the window blocks that a forward needs of rows that resume from and go to so many tokens.

        Args:
            spans: start, stop, and whether the row's last block is copied.
            keeps_past: all that it appends may be taken back.
        """
        rows = [*spans]
        return tuple(
            sum(
                len({*group.seen(start), *group.span(start if keeps_past else stop, stop)}) + copied
                for start, stop, copied in rows
            )
            for group in self.groups
        )

    def of_call(self, rows: Iterable[RowToCome], *, keeps_past: bool, num_ahead: int = 0) -> tuple[int, ...]:
        """Of each group, the most window blocks that a call needs at a time.

        Args:
            keeps_past: it may take back any number of its tokens.
            num_ahead: prefixes that are computed ahead of it; each is held until all are, the last in a forward that needs two.
        """
        rows, ahead = [*rows], num_ahead + (num_ahead > 0)
        return tuple(
            sum(self._of_row(group, row, keeps_past=keeps_past) + row.is_copied for row in rows)
            + ahead * group.num_blocks_of_a_row
            for group in self.groups
        )

    def _of_row(self, group: WindowBlocks, row: RowToCome, *, keeps_past: bool) -> int:
        num_prompt, max_tokens, num_copies, is_in_chunks, _, num_known = row
        whole, shared = -(-max_tokens // self._allocator.block_size), num_prompt // self._allocator.block_size
        if keeps_past:
            return shared + num_copies * (whole - shared)
        one = min(group.num_blocks_of_a_row, whole)
        kept = group.seen(num_prompt)
        first = min(one + len(kept), -(-num_prompt // self._allocator.block_size))
        if num_known is not None:
            first = len({*group.span(max(0, num_known - 1), num_known), *kept})
        if is_in_chunks:
            first = min(2 * one, whole)
        return max(first, one) if num_copies == 1 else first + num_copies * min(one, whole - shared)

    def num_obtainable(self, holder: Holder | None) -> list[float]:
        """Of each group, the window blocks that `holder` can have now, with those that it has.

        What several holders need is counted for each that has reserved: when they part, each needs its own.
        """
        counted = (
            set() if holder is None else {a.key for rows in (holder.rows, holder.previous) for a in rows.allocations()}
        )
        kept = [0] * len(self.groups)
        for other, reserved in self._reserved.items():
            if other is not holder:
                allocations = other.rows.allocations()
                counted.update(allocation.key for allocation in allocations)
                for number, group in enumerate(self.groups):
                    kept[number] += max(reserved[number], len(group.needed_by(allocations)))
        others = [allocation for allocation in self._allocator.allocations() if allocation.key not in counted]
        return [
            group.most - 1 - len(group.needed_by(others)) - number
            for group, number in zip(self.groups, kept, strict=True)
        ]

    def lacking(self, holder: Holder, demand: Sequence[int]) -> str | None:
        """Why a demand cannot be met, of each group as many window blocks in all; None where it can."""
        if not demand or self.are_implied:
            return None
        for group, needed, obtainable in zip(self.groups, demand, self.num_obtainable(holder), strict=True):
            if needed > obtainable:
                return (
                    f"{needed} blocks of {self._allocator.block_size} tokens in layers with {group.sight.words}, but "
                    f"{max(0, int(obtainable))} of {int(group.most) - 1} can be had"
                )
        return None

    def reserve(self, holder: Holder, demand: tuple[int, ...]) -> None:
        """Keep so many window blocks of each group for a call, with those that it has; none: give the reservation back."""
        if any(demand):
            self._reserved[holder] = demand
        else:
            self._reserved.pop(holder, None)
        self.count_to_come()

    def count_to_come(self) -> None:
        """Tell each group how many of its window blocks running calls may need that they do not need yet."""
        for number, group in enumerate(self.groups):
            group.num_to_come = sum(
                max(0, reserved[number] - len(group.needed_by(holder.rows.allocations())))
                for holder, reserved in self._reserved.items()
            )

    def reserved_for(self, holder: Holder) -> tuple[int, ...]:
        """What `reserve` was told."""
        return self._reserved.get(holder, ())

    @property
    def is_kept_to(self) -> bool:
        """Whether all that is reserved can be had."""
        return self.are_implied or min(self.num_obtainable(None), default=0) >= 0

    def check(self) -> None:
        """Prove the invariants of each group, or raise BlockStateError."""
        for group in self.groups:
            group.check()
