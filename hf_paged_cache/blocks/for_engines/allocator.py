"""Adds to the allocator what engines ask beyond what the cache does: rings, blocks by id, what a batch reads once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import BlockStateError, CacheArgumentError
from ..allocation import Allocation
from ..allocator import PrefixCachingBlockAllocator
from ..arguments import int_of_at_least
from ..hashing import BlockHash
from .ring import Ring, num_blocks_of_ring


class EngineAllocator(PrefixCachingBlockAllocator):
    """`EngineAllocator` is a `PrefixCachingBlockAllocator` for those who run forwards of their own.

    Examples:
        >>> allocator = EngineAllocator(num_blocks=8, block_size=2)
        >>> allocator.allocate(num_tokens=9, window=3)
        Ring(num_blocks=2, num_tokens=9, window=3)
    """

    def allocate(
        self,
        block_hashes: Iterable[BlockHash] = (),
        num_mutable_blocks: int = 0,
        *,
        num_blocks: int | None = None,
        namespace: bytes = b"",
        num_tokens: int | None = None,
        window: int | None = None,
    ) -> Allocation:
        """Hold blocks as a `PrefixCachingBlockAllocator` does, or hold a `Ring`.

        Args:
            num_tokens, window: given in place of hashes and numbers of blocks, for a ring of fresh blocks. The ring
                serves layers that see the last `window` of `num_tokens` tokens, and has `ceil(min(num_tokens, window) /
                block_size)` blocks.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a negative number, or a hash given twice; or `num_tokens` or `window` that is given
                without the other, is no int, is too small, or is given beside what the two replace.
        """
        if num_tokens is None and window is None:
            return super().allocate(block_hashes, num_mutable_blocks, num_blocks=num_blocks, namespace=namespace)
        if block_hashes or num_mutable_blocks or num_blocks is not None:
            raise CacheArgumentError(
                "block_hashes, num_mutable_blocks or num_blocks is given beside a window; its blocks follow from "
                "num_tokens and window alone, and are never hashed"
            )
        num_tokens = int_of_at_least("num_tokens", num_tokens, 0, "positions in all, given with window")
        window = int_of_at_least("window", window, 1, "tokens that a layer sees, given with num_tokens")
        num_blocks = num_blocks_of_ring(num_tokens, window, self.block_size)
        self.require(num_blocks, (), namespace)
        self._dirty = True
        return self._registered(Ring(self, self._states.take(num_blocks, namespace), num_tokens, window, namespace))

    def allocate_as(self, wanted: Sequence[int | BlockHash | None], namespace: bytes = b"") -> Allocation:
        """Hold blocks in the order of `wanted`: the block of each id, and a fresh block for each other entry.

        A fresh block that is wanted with a hash gets the hash as from `allocate_immutable`, and awaits `mark_computed`.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: an id that is no block's, or is given twice.
            BlockStateError: a named block is free, or of another namespace.
        """
        index, named = self._states.index, [each for each in wanted if isinstance(each, int)]
        self._check_ids(named)
        if len(set(named)) < len(named):
            raise CacheArgumentError(f"a block is given twice among {named}; a holder has a block once")
        for block_id in named:
            is_free = not self._states.ref_counts[block_id] and index.digests[block_id] is None
            if is_free or index.namespaces[block_id] != namespace:
                raise BlockStateError(
                    f"block {block_id} is free, or of another namespace; name blocks in use or cached"
                )
        allocation = super().allocate(namespace=namespace)
        self._extend(allocation, wanted)
        return allocation

    def fork(self, allocation: Allocation, num_blocks: int | None = None) -> Allocation:
        """Fork as a `PrefixCachingBlockAllocator` does; a ring is forked only as a whole."""
        if num_blocks is not None:
            self._refuse_ring(allocation)
        return super().fork(allocation, num_blocks)

    def allocate_mutable(self, allocation: Allocation, num_blocks: int) -> None:
        self._refuse_ring(allocation)
        super().allocate_mutable(allocation, num_blocks)

    def allocate_immutable(self, allocation: Allocation, block_hashes: Iterable[BlockHash]) -> None:
        self._refuse_ring(allocation)
        super().allocate_immutable(allocation, block_hashes)

    def truncate(self, allocation: Allocation, num_blocks: int) -> None:
        self._refuse_ring(allocation)
        super().truncate(allocation, num_blocks)

    def commit_many(self, allocation: Allocation, start: int, block_hashes: Iterable[BlockHash]) -> int:
        self._refuse_ring(allocation)
        return super().commit_many(allocation, start, block_hashes)

    def get_common_computed_block_ids(self, allocations: Sequence[Allocation]) -> list[int]:
        """Return the leading computed blocks that all `allocations` hold at the same places."""
        self._settle()
        index = self._states.index
        common: list[int] = []
        for block_id, *others in zip(*(self._list_of(allocation) for allocation in allocations), strict=False):
            if index.digests[block_id] is None or block_id in index.uncomputed or others.count(block_id) < len(others):
                break
            common.append(block_id)
        return common

    def mark_accessed(self, block_ids: Iterable[int]) -> None:
        """Evict these cached blocks last, in the order given; blocks in use are skipped.

        Raises:
            BlockStateError: a block is free.
        """
        touched = list(block_ids)
        self._check_ids(touched)
        states = self._states
        for block_id in touched:
            if not states.ref_counts[block_id] and states.index.digests[block_id] is None:
                raise BlockStateError(f"block {block_id} is free; only blocks in use or cached can be accessed")
        self._dirty = True
        states.touch(touched)
        self._dirty = False

    def check(self) -> None:
        """Prove the invariants of a `PrefixCachingBlockAllocator`, and those of rings.

        A ring holds the blocks of its window, none of which has a hash.
        """
        super().check()
        for ring in self.allocations():
            if isinstance(ring, Ring):
                num_blocks = num_blocks_of_ring(ring.num_tokens, ring.window, self.block_size)
                if len(ring.block_ids) != num_blocks or any(map(self.digest_of, ring.block_ids)):
                    raise BlockStateError(f"{ring!r} must hold {num_blocks} blocks without a hash: {ring.block_ids}")

    def _refuse_ring(self, allocation: Allocation) -> None:
        """Raise CacheArgumentError for a ring, in operations that hash, add or cut blocks."""
        if isinstance(allocation, Ring):
            self._list_of(allocation)
            raise CacheArgumentError(f"{allocation!r} is a ring; it keeps its length, and its blocks are never hashed")
