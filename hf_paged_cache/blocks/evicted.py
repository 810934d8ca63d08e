"""Owns the memory of hashes that were evicted: what their blocks were, in a number each. Refuses to grow beyond four for each block of the pool.

Two maps, of which the older one is dropped when the newer one is full: so between two and four times as many evictions as the pool
has blocks are remembered, in constant time. A key is 60 bits of a digest's hash, which two digests share once in 2^60 times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class EvictedHashes:
    """Digest of an evicted block -> a number.

    Args:
        num_blocks: of the pool.

    Examples:
        >>> evicted = EvictedHashes(num_blocks=4)
        >>> evicted.put([b"digest"], 7)
        >>> evicted.take([2, 1], [None, b"another", b"digest"])
        [(2, 7)]
    """

    __slots__ = ("_newer", "_older", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}

    @property
    def num_room(self) -> int:
        """The most digests to put at once; at least 1."""
        return 2 * self.num_blocks - len(self._newer)

    def put(self, digests: Iterable[bytes], number: int) -> None:
        """Remember digests that were evicted, with one number for all, which they share: it takes memory once."""
        newer = self._newer
        for digest in digests:
            newer[hash(digest) >> 4] = number
        if self.num_room <= 0:
            self._older, self._newer = newer, {}

    def take(self, block_ids: Iterable[int], digests: Sequence[bytes | None]) -> list[tuple[int, int]]:
        """Blocks up to the first whose digest is not remembered, and their numbers; these are forgotten.

        Of a sequence the tail is evicted, and forgotten, before the head: so nothing behind that block is remembered.

        Args:
            digests: block id -> digest, or None.
        """
        newer, older = self._newer, self._older
        found: list[tuple[int, int]] = []
        for block_id in block_ids:
            key = hash(digests[block_id]) >> 4
            if key in newer:
                found.append((block_id, newer.pop(key)))
            elif key in older:
                found.append((block_id, older.pop(key)))
            else:
                break
        return found

    def clear(self) -> None:
        """Forget all."""
        self._newer, self._older = {}, {}
