"""Owns what is reserved of window blocks: what a call needs in its worst case, whether it can be had, and is kept for it.

The caller holds the store's lock.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from ..blocks import Allocation, PrefixCachingBlockAllocator, WindowBlocks
from .window_groups import WindowGroups


class HeldRows(Protocol):
    """Rows of a call."""

    def block_ids(self) -> set[int]: ...

    def allocations(self) -> list[Allocation]: ...

    def free(self) -> None: ...


class WindowHolder(Protocol):
    """A call that may need window blocks."""

    @property
    def rows(self) -> HeldRows: ...

    @property
    def previous(self) -> HeldRows: ...  # given back before any is taken


class RowToCome(NamedTuple):
    """A row of a call in its worst case, in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    num_copies: int  # rows of the batch that it stands for
    is_in_chunks: bool  # the prompt comes in several forwards
    is_copied: bool = False  # its last block is, before it is written
    num_known: int | None = None  # its first forward begins behind so many, or one less; None: nobody knows


class WindowAdmission:
    """Which calls may have the window blocks of a store.

    Args:
        allocator: of the blocks.
        windows: the groups whose window blocks these are.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator, windows: WindowGroups) -> None:
        self._allocator = allocator
        self._windows = windows
        # call -> of each group, all that it may need
        self._reserved: WeakKeyDictionary[WindowHolder, tuple[int, ...]] = WeakKeyDictionary()

    def of_forward(self, spans: Iterable[tuple[int, int, bool]], *, keeps_past: bool = False) -> tuple[int, ...]:
        """Of each group, the window blocks that a forward needs of rows that go on from and to so many tokens.

        Args:
            spans: start, stop, and whether the row's last block is copied.
            keeps_past: all that it appends may be taken back.
        """
        rows = [*spans]
        return tuple(
            sum(
                len({*group.span(start, start), *group.span(start if keeps_past else stop, stop)}) + copied
                for start, stop, copied in rows
            )
            for group in self._windows.groups
        )

    def of_call(self, rows: Iterable[RowToCome], *, keeps_past: bool) -> tuple[int, ...]:
        """Of each group, the most window blocks that a call needs at a time.

        Args:
            keeps_past: it may take back any number of its tokens.
        """
        rows = [*rows]
        return tuple(
            sum(self._of_row(group, row, keeps_past=keeps_past) + row.is_copied for row in rows)
            for group in self._windows.groups
        )

    def _of_row(self, group: WindowBlocks, row: RowToCome, *, keeps_past: bool) -> int:
        num_prompt, max_tokens, num_copies, is_in_chunks, _, num_known = row
        whole, shared = -(-max_tokens // self._allocator.block_size), num_prompt // self._allocator.block_size
        if keeps_past:
            return shared + num_copies * (whole - shared)
        one = min(group.num_blocks_of_a_row, whole)
        kept = group.span(num_prompt, num_prompt)
        first = min(one + len(kept), -(-num_prompt // self._allocator.block_size))
        if num_known is not None:
            first = len({*group.span(max(0, num_known - 1), num_known), *kept})
        if is_in_chunks:
            first = min(2 * one, whole)
        return max(first, one) if num_copies == 1 else first + num_copies * min(one, whole - shared)

    def num_obtainable(self, holder: WindowHolder | None) -> list[float]:
        """Of each group, the window blocks that `holder` can have now, with those that it has.

        What several holders need is counted for each that has reserved: when they part, each needs its own.
        """
        counted = (
            set() if holder is None else {a.key for rows in (holder.rows, holder.previous) for a in rows.allocations()}
        )
        kept = [0] * len(self._windows.groups)
        for other, reserved in self._reserved.items():
            if other is not holder:
                allocations = other.rows.allocations()
                counted.update(allocation.key for allocation in allocations)
                for number, group in enumerate(self._windows.groups):
                    kept[number] += max(reserved[number], len(group.needed_by(allocations)))
        others = [allocation for allocation in self._allocator.allocations() if allocation.key not in counted]
        return [
            group.most - 1 - len(group.needed_by(others)) - number
            for group, number in zip(self._windows.groups, kept, strict=True)
        ]

    def lacking(self, holder: WindowHolder, demand: Sequence[int]) -> str | None:
        """Why a demand cannot be met, of each group as many window blocks in all; None where it can."""
        if self._windows.are_implied or not demand:
            return None
        for group, needed, obtainable in zip(self._windows.groups, demand, self.num_obtainable(holder), strict=True):
            if needed > obtainable:
                return (
                    f"{needed} blocks of {self._allocator.block_size} tokens in layers with a window of {group.window}, but "
                    f"{max(0, int(obtainable))} of {int(group.most) - 1} can be had"
                )
        return None

    def reserve(self, holder: WindowHolder, demand: tuple[int, ...]) -> None:
        """Keep so many window blocks of each group for a call, with those that it has; none: give the reservation back."""
        if any(demand):
            self._reserved[holder] = demand
        else:
            self._reserved.pop(holder, None)
        self.count_to_come()

    def count_to_come(self) -> None:
        """Tell each group how many of its window blocks running calls may need that they do not need yet."""
        for number, group in enumerate(self._windows.groups):
            group.num_to_come = sum(
                max(0, reserved[number] - len(group.needed_by(holder.rows.allocations())))
                for holder, reserved in self._reserved.items()
            )

    def reserved_for(self, holder: WindowHolder) -> tuple[int, ...]:
        """What `reserve` was told."""
        return self._reserved.get(holder, ())

    @property
    def is_kept_to(self) -> bool:
        """Whether all that is reserved can be had."""
        return self._windows.are_implied or min(self.num_obtainable(None), default=0) >= 0

    def forget(self) -> None:
        """Nothing is reserved any more: the layers are about to have other windows."""
        self._reserved.clear()
