"""Owns the memory of hashes that were evicted: a number for each. Refuses to grow beyond about six for each block of the pool.

Two maps, of which the older one is dropped when the newer one is full: so at least three times as many evictions as the pool has blocks
are remembered, in constant time. A key is 60 bits of a digest's hash, which two digests share once in 2^60 times.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import rshift


class EvictedHashes:
    """Digest of an evicted block -> a number.

    Args:
        num_blocks: of the pool.

    Examples:
        >>> evicted = EvictedHashes(num_blocks=4)
        >>> evicted.put([b"first", b"second"], [7, 8])
        >>> evicted.take([b"second", b"another", b"first"])
        [8]
    """

    __slots__ = ("_newer", "_older", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of digests; one that was evicted twice may count twice."""
        return len(self._newer) + len(self._older)

    def put(self, digests: Iterable[bytes], numbers: Iterable[int]) -> None:
        """Remember digests that were evicted. Numbers that are one object take memory once."""
        self._newer.update(zip(_keys(digests), numbers, strict=True))
        if len(self._newer) >= 3 * self.num_blocks:
            self._older, self._newer = self._newer, {}

    def take(self, digests: Iterable[bytes | None]) -> list[int]:
        """The numbers of digests up to the first that is not remembered; these are forgotten.

        Of a sequence the tail is evicted, and forgotten, before the head: so nothing behind that one is remembered.
        """
        newer, older = self._newer, self._older
        found: list[int] = []
        for key in _keys(digests):
            number = newer.pop(key, None)
            if number is None and (number := older.pop(key, None)) is None:
                break
            found.append(number)
        return found

    def clear(self) -> None:
        """Forget all."""
        self._newer, self._older = {}, {}


def _keys(digests: Iterable[bytes | None]) -> Iterable[int]:
    """As many bits as two digits of an int hold: one more, and each takes half as much memory again."""
    return map(rshift, map(hash, digests), repeat(4))
