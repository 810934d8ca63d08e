"""Owns the lines in which blocks wait to be handed out.

Refuses to hold a block twice, or to give up a block that it does not hold. The lines are doubly linked lists, in two
lists of ids, without objects. Behind the ids, each list has the ends of the lines, indexed from the end of the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..errors import BlockStateError

_ABSENT = 0  # link of a block that is not held; block 0 is never handed out


class FreeBlockQueue:
    """`FreeBlockQueue` holds the ids of allocatable blocks in one line or several.

    Every operation costs O(1) for each id, in the middle of a line, too. One that is refused at an id has been done for
    the ids before it.

    Attributes:
        length: number of blocks held in all lines; read only.

    Args:
        num_blocks: number of blocks with the null block; ids are 1 to num_blocks - 1.
        block_ids: ids that line 0 holds at first, the next to be handed out first.
        num_lines: number of lines, which are 0 to num_lines - 1.

    Examples:
        >>> queue = FreeBlockQueue(4, [1, 2, 3])
        >>> queue.remove([2])
        >>> queue.popleft(line=0, most=1), list(queue)
        ([1], [3])
    """

    __slots__ = ("_next", "_num_blocks", "_num_lines", "_previous", "length")

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = (), num_lines: int = 1) -> None:
        self._num_blocks, self._num_lines = num_blocks, num_lines
        ends = range(-num_lines, 0)  # end of line n: -1 - n, an index from the end of both lists
        # block id -> block handed out after it; end of a line -> its first block
        self._next: list[int] = [_ABSENT] * num_blocks + [*ends]
        # block id -> block before it; end of a line -> its last block
        self._previous = [_ABSENT] * num_blocks + [*ends]
        self.length = 0
        self.extend(block_ids)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of all lines, from line 0 on, each in the order in which its ids are handed out."""
        for line in range(self._num_lines):
            yield from self.line(line)

    def line(self, line: int) -> Iterator[int]:
        """Iterate over the ids of one line, from its first on; the queue must not change meanwhile."""
        block_id = self._next[-1 - line]
        while block_id > 0:
            yield block_id
            block_id = self._next[block_id]

    def firsts(self) -> list[int]:
        """Return line -> its first id, or a number below 0 for an empty line."""
        return self._next[: -1 - self._num_lines : -1]

    def extend(self, block_ids: Iterable[int], line: int = 0) -> None:
        """Put blocks at the end of a line."""
        self._put(block_ids, self._next, self._previous, -1 - line)

    def extendleft(self, block_ids: Iterable[int]) -> None:
        """Put blocks in front of line 0, one after the other: the last block is handed out next."""
        self._put(block_ids, self._previous, self._next, -1)

    def _put(self, block_ids: Iterable[int], following: list[int], previous: list[int], end: int) -> None:
        """Put blocks at the back of a line if `following` is `_next`, or at its front if `following` is `_previous`."""
        last, length, num_blocks = previous[end], self.length, self._num_blocks
        try:
            for block_id in block_ids:
                if not 0 < block_id < num_blocks or following[block_id] != _ABSENT:
                    raise BlockStateError(f"block {block_id} queued twice; blocks are 1 to {num_blocks - 1}")
                following[last] = block_id
                previous[block_id] = last
                following[block_id] = end
                last = block_id
                length += 1
        finally:
            previous[end], self.length = last, length

    def remove(self, block_ids: Iterable[int]) -> None:
        """Take blocks out, wherever they are in their lines."""
        following, previous, num_blocks, length = self._next, self._previous, self._num_blocks, self.length
        try:
            for block_id in block_ids:
                if not 0 < block_id < num_blocks or (after := following[block_id]) == _ABSENT:
                    raise BlockStateError(f"block {block_id} removed from a queue that does not hold it")
                before = previous[block_id]
                following[before] = after
                previous[after] = before
                following[block_id] = previous[block_id] = _ABSENT
                length -= 1
        finally:
            self.length = length

    def popleft(self, line: int, most: int, times: Sequence[int] | None = None, latest: int = 0) -> list[int]:
        """Take out and return the first blocks of a line, in order: at most `most` of them.

        Args:
            times: block id -> a number; the first block with a number above `latest` stays, and so do those behind it.
        """
        following, previous, end = self._next, self._previous, -1 - line
        taken: list[int] = []
        block_id = following[end]
        for _ in range(most):
            if block_id < 0 or (times is not None and times[block_id] > latest):
                break
            taken.append(block_id)
            after = following[block_id]
            following[block_id] = previous[block_id] = _ABSENT
            block_id = after
        following[end] = block_id
        previous[block_id] = end
        self.length -= len(taken)
        return taken

    def grow(self, num_blocks: int) -> None:
        """Allow ids below `num_blocks`; no new id is held yet."""
        before, added = self._num_blocks, [_ABSENT] * (num_blocks - self._num_blocks)
        self._next[before:before] = added
        self._previous[before:before] = added
        self._num_blocks = num_blocks

    def check(self) -> None:
        """Follow all links both ways, and raise BlockStateError if they disagree.  Cost: O(num_blocks)."""
        forward = list(self)
        backward = []
        for end in range(-self._num_lines, 0):
            block_id = self._previous[end]
            while block_id > 0:
                backward.append(block_id)
                block_id = self._previous[block_id]
        linked = sum(link != _ABSENT for link in self._next) - self._num_lines
        if forward != backward[::-1] or not len(forward) == linked == self.length:
            raise BlockStateError(f"queue links disagree: {forward} forward, {backward} backward, {self.length} long")
