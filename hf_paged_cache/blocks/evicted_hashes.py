"""Owns the memory of hashes that were evicted, and what is known of each. Refuses to grow much beyond eight for each block of the pool.

Two maps, of which the older one is dropped when the newer one is full: so at least twice as many evictions as the pool has blocks are
remembered, in constant time. Full is a map that would have to grow: so in a large pool a digest takes 100 bytes, 65 of them its own.
"""

from __future__ import annotations

from collections.abc import Iterable

Remembered = tuple[int, int, int]
"""Of a block when it was evicted: its kind, when it was used last, evictions before it."""


class EvictedHashes:
    """Digest of an evicted block -> what is remembered.

    Args:
        num_blocks: of the pool.

    Attributes:
        newer: put them here, one tuple for many, and call `turn` after a few.

    Examples:
        >>> evicted = EvictedHashes(num_blocks=4)
        >>> evicted.newer |= {b"first": (2, 7, 0), b"second": (2, 8, 0)}
        >>> evicted.take([b"second", b"another", b"first"])
        [(2, 8, 0)]
    """

    __slots__ = ("_most", "_older", "newer")

    def __init__(self, num_blocks: int) -> None:
        self.newer: dict[bytes, Remembered] = {}
        self._older: dict[bytes, Remembered] = {}
        self.grow(num_blocks)

    def __len__(self) -> int:
        """Number of digests; one that was evicted twice may count twice."""
        return len(self.newer) + len(self._older)

    def __contains__(self, digest: bytes | None) -> bool:
        """Whether anything is remembered of a digest."""
        return digest in self.newer or digest in self._older

    def turn(self) -> dict[bytes, Remembered]:
        """Where the newer map is full, begin another one. Returns the newer one."""
        if len(self.newer) >= self._most:
            self._older, self.newer = self.newer, {}
        return self.newer

    def take(self, digests: Iterable[bytes | None]) -> list[Remembered]:
        """What is remembered of digests, up to the first of which nothing is; these are forgotten.  None: no digest.

        Of a sequence the tail is evicted, and forgotten, before the head: so nothing behind that one is remembered.
        """
        newer, older = self.newer, self._older
        found: list[Remembered] = []
        for digest in digests:
            if digest is None or (what := newer.pop(digest, None) or older.pop(digest, None)) is None:
                break
            found.append(what)
        return found

    def grow(self, num_blocks: int) -> None:
        """The pool has so many blocks."""
        self._most = (2 << (3 * num_blocks).bit_length()) // 3  # two to four a block: two thirds of a power of two

    def clear(self) -> None:
        """Forget all."""
        self.newer, self._older = {}, {}
