"""Owns the order in which blocks are handed out. Refuses to hold a block twice or to give up one that it does not hold.

A doubly linked list in two lists of ids, without objects. Block 0 is never handed out: its links are the two ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import BlockStateError

_ABSENT = -1


class FreeBlockQueue:
    """Ids of allocatable blocks in eviction order; every operation on one id is O(1), in the middle too.

    Attributes:
        length: number of blocks held; read only.

    Args:
        num_blocks: ids are 1 to num_blocks - 1; id 0 is the sentinel.
        block_ids: what the queue holds at first, the next to be handed out first.

    Examples:
        >>> queue = FreeBlockQueue(4, [1, 2, 3])
        >>> queue.remove(2)
        >>> queue.popleft(), list(queue)
        (1, [3])
    """

    __slots__ = ("_next", "_previous", "length")

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = ()) -> None:
        self._next = [_ABSENT] * num_blocks  # block id -> the one handed out after it; of 0: the first
        self._previous = [_ABSENT] * num_blocks  # block id -> the one handed out before it; of 0: the last
        self._next[0] = self._previous[0] = 0
        self.length = 0
        self.append_many(block_ids)

    def __len__(self) -> int:
        """Number of blocks held."""
        return self.length

    def __contains__(self, block_id: int) -> bool:
        """Whether `block_id` is held; O(1)."""
        return 0 < block_id < len(self._next) and self._next[block_id] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Ids in the order in which `popleft` would give them; the queue must not change meanwhile."""
        block_id = self._next[0]
        while block_id:
            yield block_id
            block_id = self._next[block_id]

    def __repr__(self) -> str:
        return f"FreeBlockQueue(length={self.length}, num_blocks={len(self._next)})"

    def append(self, block_id: int) -> None:
        """`append_many` of one block."""
        self.append_many((block_id,))

    def append_many(self, block_ids: Iterable[int]) -> None:
        """Put blocks at the end. Raises BlockStateError, with those before it put, if one is held or is no block."""
        self._put(block_ids, self._next, self._previous)

    def appendleft(self, block_id: int) -> None:
        """`appendleft_many` of one block."""
        self.appendleft_many((block_id,))

    def appendleft_many(self, block_ids: Iterable[int]) -> None:
        """Put blocks in front one after the other: the last one is handed out next. Raises as `append_many`."""
        self._put(block_ids, self._previous, self._next)

    def _put(self, block_ids: Iterable[int], following: list[int], previous: list[int]) -> None:
        """Put blocks at the end that `following` leads to."""
        last, length = previous[0], self.length
        try:
            for block_id in block_ids:
                if not 0 < block_id < len(following) or following[block_id] != _ABSENT:
                    raise self._refusal(block_id, "queued twice")
                following[last] = block_id
                previous[block_id] = last
                following[block_id] = 0
                last = block_id
                length += 1
        finally:
            previous[0], self.length = last, length

    def remove(self, block_id: int) -> None:
        """`remove_many` of one block."""
        self.remove_many((block_id,))

    def remove_many(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of anywhere. Raises BlockStateError, with those before it taken out, if one is not held."""
        following, previous = self._next, self._previous
        for block_id in block_ids:
            if not 0 < block_id < len(following) or following[block_id] == _ABSENT:
                raise self._refusal(block_id, "removed from a queue that does not hold it")
            before, after = previous[block_id], following[block_id]
            following[before] = after
            previous[after] = before
            following[block_id] = previous[block_id] = _ABSENT
            self.length -= 1

    def popleft(self) -> int:
        """Take out and return the first block. Raises BlockStateError if there is none."""
        return self.popleft_many(1)[0]

    def popleft_many(self, num_blocks: int) -> list[int]:
        """Take out and return the first `num_blocks` blocks, in order. Raises BlockStateError if there are fewer."""
        if not 0 <= num_blocks <= self.length:
            raise BlockStateError(f"{num_blocks} blocks taken from a queue that holds {self.length}")
        following, previous = self._next, self._previous
        taken: list[int] = []
        block_id = following[0]
        for _ in range(num_blocks):
            taken.append(block_id)
            after = following[block_id]
            following[block_id] = previous[block_id] = _ABSENT
            block_id = after
        following[0] = block_id
        previous[block_id] = 0
        self.length -= num_blocks
        return taken

    def grow(self, num_blocks: int) -> None:
        """Allow ids below `num_blocks`; none of the new ones is held yet."""
        added = [_ABSENT] * (num_blocks - len(self._next))
        self._next.extend(added)
        self._previous.extend(added)

    def check(self) -> None:
        """Follow all links both ways. Raises BlockStateError if they disagree.  Cost: O(num_blocks)."""
        forward = list(self)
        backward = []
        block_id = self._previous[0]
        while block_id:
            backward.append(block_id)
            block_id = self._previous[block_id]
        linked = sum(link != _ABSENT for link in self._next) - 1
        if forward != backward[::-1] or not len(forward) == linked == self.length:
            raise BlockStateError(f"queue links disagree: {forward} forward, {backward} backward, {self.length} long")

    def _refusal(self, block_id: int, what: str) -> BlockStateError:
        return BlockStateError(f"block {block_id} {what}; blocks are 1 to {len(self._next) - 1}")
