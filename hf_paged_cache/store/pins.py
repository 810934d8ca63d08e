"""Prefixes that nobody may evict. Owns the block tables that hold them, and computes nothing: only what is there is pinned.

A pinned block is in use, so neither a flood nor a reset of rows takes it. Pins outlive the cache that asked for them:
they belong to its store. Whoever calls a method here holds the store's lock.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from ..blocks import BlockTable, HashChain, PrefixCachingBlockAllocator
from ..blocks.tokens import TokenIds
from ..errors import OutOfBlocksError


class Pins:
    """The pinned prefixes of one store.

    Args:
        allocator: where their blocks are.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator) -> None:
        self._allocator = allocator
        self._tables: dict[tuple[bytes, bytes], BlockTable] = {}  # salt, token ids -> what holds them

    def __repr__(self) -> str:
        return f"Pins({len(self._tables)} prefixes, {self.num_blocks} blocks)"

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are pinned."""
        return len(self._counts())

    @property
    def num_blocks_held_alone(self) -> int:
        """Blocks that unpinning everything would give back: no row holds them."""
        ref_count = self._allocator.ref_count
        return sum(ref_count(block_id) == count for block_id, count in self._counts().items())

    def pin(self, salt: bytes, root: bytes, token_ids: TokenIds, num_obtainable: float) -> int:
        """Hold the longest cached prefix of `token_ids`, in place of what these tokens held before under this salt.

        Args:
            root: under which the blocks are looked up.
            num_obtainable: blocks that may be taken out of circulation.
        Returns:
            The number of tokens pinned, a multiple of the block size; 0 leaves no pin.
        Raises:
            OutOfBlocksError: holding them would take blocks that running calls were promised; nothing has changed.
        """
        allocator, hashes = self._allocator, HashChain(root, self._allocator.block_size)
        hashes.extend(token_ids)
        hits = allocator.match_prefix(hashes.hashes())
        num_taken = sum(not allocator.ref_count(block_id) for block_id in hits)
        if num_taken > num_obtainable:
            raise OutOfBlocksError(
                f"pinning {len(hits)} blocks needs {num_taken} that nobody holds, but {max(0, int(num_obtainable))} can be "
                "had: the others are promised to running calls; pin when these have ended, or build the cache with a "
                "larger num_blocks or max_bytes"
            )
        key = (salt, token_ids.tobytes())
        replaced = self._tables.get(key)
        if hits:
            table = BlockTable(allocator, root)
            table.hold_prefix(token_ids)
            self._tables[key] = table  # interrupted before or behind this line, the other table is collected
        else:
            self._tables.pop(key, None)
        if replaced is not None:
            replaced.free()
        return len(hits) * allocator.block_size

    def unpin(self, salt: bytes, token_ids: TokenIds | None) -> int:
        """Give back what is pinned of these tokens under this salt, or all that is; full blocks stay cached.

        Returns:
            The number of tokens that were pinned; 0 when none were.
        """
        keys = [key for key in self._tables if key[0] == salt]
        if token_ids is not None:
            keys = [key for key in keys if key[1] == token_ids.tobytes()]
        return sum(self._release(key) for key in keys)

    def clear(self) -> None:
        """Give everything back, whatever its salt."""
        for key in list(self._tables):
            self._release(key)

    def _release(self, key: tuple[bytes, bytes]) -> int:
        table = self._tables.pop(key)
        num_tokens = table.num_tokens
        table.free()
        return num_tokens

    def _counts(self) -> Counter[int]:
        """Block id -> pins that hold it."""
        return Counter(chain.from_iterable(table.block_ids for table in self._tables.values()))
