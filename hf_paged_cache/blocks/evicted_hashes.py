"""Remembers hashes that were evicted, and what is known of each.

Refuses to grow much beyond eight hashes for each block of the pool. There are two maps, of which the older one is
dropped when the newer one is full: so at least twice as many evictions as the pool has blocks are remembered, in
constant time. A map is full when it would have to grow: so in a large pool a digest takes 100 bytes, 65 of them its
own.
"""

from __future__ import annotations

from collections.abc import Iterable

Remembered = tuple[int, int, int]
"""(kind, time of the last use, number of evictions before) of a block when it was evicted."""


class EvictedHashes:
    """`EvictedHashes` maps the digest of an evicted block to what is remembered of the block.

    Args:
        num_blocks: number of blocks in the pool.

    Attributes:
        newer: map to put digests into; one tuple may serve many digests. Call `turn` after a few.

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

    def __contains__(self, digest: bytes | None) -> bool:
        """Return whether anything is remembered of a digest."""
        return digest in self.newer or digest in self._older

    def turn(self) -> dict[bytes, Remembered]:
        """Begin another newer map if it is full, and return the newer map."""
        if len(self.newer) >= self._most:
            self._older, self.newer = self.newer, {}
        return self.newer

    def take(self, digests: Iterable[bytes | None]) -> list[Remembered]:
        """Return and forget what is remembered of the leading digests, up to the first that is unknown or None.

        The tail of a sequence is forgotten before its head: no digest after an unknown one is remembered.
        """
        newer, older = self.newer, self._older
        found: list[Remembered] = []
        for digest in digests:
            if digest is None or (what := newer.pop(digest, None) or older.pop(digest, None)) is None:
                break
            found.append(what)
        return found

    def grow(self, num_blocks: int) -> None:
        """Set the size of the maps for a pool of `num_blocks` blocks."""
        self._most = (2 << (3 * num_blocks).bit_length()) // 3  # 2 to 4 digests a block: 2/3 of a power of two

    def clear(self) -> None:
        """Forget everything."""
        self.newer, self._older = {}, {}
