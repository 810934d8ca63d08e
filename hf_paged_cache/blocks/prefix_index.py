"""Owns which block has which hash, one to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..errors import BlockStateError
from .hashing import BlockHash


class PrefixIndex:
    """`PrefixIndex` finds the block of a digest and the digest of a block.

    The blocks' own digests are the truth; the map from digests to blocks is derived from them, see `rebuild`. The
    tokens of a block are kept beside its digest and compared on every hit. Digests and tokens are lists of bytes: the
    garbage collector need not visit an object for each of a million blocks.

    Attributes (read by the allocator's loops):
        blocks: digest -> block id.
        digests: block id -> digest, or None for a block without a hash.
        token_bytes: block id -> token ids of its hash; anything for a block without a digest.
        parents: block id -> digest of the block before, or the root; anything for a block without a digest.
        namespaces: block id -> namespace that the block was taken for; anything for a free block.
        uncomputed: ids of blocks that have a hash but not yet their content.
    """

    __slots__ = ("blocks", "digests", "namespaces", "parents", "token_bytes", "uncomputed")

    def __init__(self, num_blocks: int) -> None:
        self.blocks: dict[bytes, int] = {}
        self.digests: list[bytes | None] = [None] * num_blocks
        self.token_bytes: list[bytes] = [b""] * num_blocks
        self.parents: list[bytes] = [b""] * num_blocks
        self.namespaces: list[bytes] = [b""] * num_blocks
        self.uncomputed: set[int] = set()

    def get(self, block_hash: BlockHash, namespace: bytes = b"") -> int | None:
        """Return the block of a namespace with this digest and these tokens, computed or not; None if there is none."""
        block_id = self.blocks.get(block_hash.digest)
        if block_id is None or self.token_bytes[block_id] != block_hash.token_bytes:
            return None
        return block_id if self.namespaces[block_id] == namespace else None

    def hash_of(self, block_id: int) -> BlockHash | None:
        """Return the hash of a block, or None if it has none."""
        digest = self.digests[block_id]
        return None if digest is None else BlockHash(digest, self.token_bytes[block_id], self.parents[block_id])

    def match(self, block_hashes: Iterable[BlockHash], namespace: bytes = b"") -> list[int]:
        """Return the blocks of the longest leading run of hashes that are here, in this namespace, and computed.

        Asks for no hash after the first miss.  Effects: none.
        """
        find, token_bytes, uncomputed = self.blocks.get, self.token_bytes, self.uncomputed
        namespaces = self.namespaces
        hits: list[int] = []
        append = hits.append
        for block_hash in block_hashes:
            block_id = find(block_hash[0])
            if block_id is None or token_bytes[block_id] != block_hash[1] or block_id in uncomputed:
                break
            if namespaces[block_id] != namespace:
                break
            append(block_id)
        return hits

    def insert(self, block_id: int, block_hash: BlockHash, *, computed: bool) -> None:
        """Give a block that has no hash a hash that no other block has.

        Args:
            computed: True if the block's content is there; `match` stops at a block without content.
        """
        if not computed:  # first: if interrupted, the block must not look computed
            self.uncomputed.add(block_id)
        self.token_bytes[block_id] = block_hash.token_bytes
        self.parents[block_id] = block_hash.parent
        self.digests[block_id] = block_hash.digest
        self.blocks[block_hash.digest] = block_id

    def remove(self, block_id: int) -> None:
        """Take a block's hash away."""
        digest = self.digests[block_id]
        self.digests[block_id] = None
        if digest is not None:
            del self.blocks[digest]
        self.uncomputed.discard(block_id)  # last: if interrupted, the block must not look computed

    def grow(self, num_blocks: int) -> None:
        """Allow block ids below `num_blocks`."""
        added = num_blocks - len(self.digests)
        self.token_bytes.extend([b""] * added)
        self.parents.extend([b""] * added)
        self.namespaces.extend([b""] * added)
        self.digests.extend([None] * added)

    def rebuild(self, ref_counts: Sequence[int]) -> None:
        """Derive the map again after an interrupted change. An uncomputed block that nobody holds loses its hash.

        Cost: O(num_blocks).
        """
        num_blocks = len(ref_counts)
        for of_blocks in (self.token_bytes, self.parents, self.namespaces, self.digests):
            del of_blocks[num_blocks:]
        for block_id in self.uncomputed:
            if block_id < num_blocks and not ref_counts[block_id]:
                self.digests[block_id] = None
        self.blocks = {digest: block_id for block_id, digest in enumerate(self.digests) if digest is not None}
        self.uncomputed = {block_id for block_id in self.blocks.values() if block_id in self.uncomputed}

    def check(self, in_use: Collection[int]) -> None:
        """Raise BlockStateError unless both maps are inverse and only blocks `in_use` are uncomputed."""
        inverse = {digest: block_id for block_id, digest in enumerate(self.digests) if digest is not None}
        same_length = len(self.digests) == len(self.token_bytes) == len(self.parents) == len(self.namespaces)
        if inverse != self.blocks or self.digests[0] is not None or not same_length:
            raise BlockStateError("index and hashes are not inverse")
        if not self.uncomputed <= set(self.blocks.values()) & set(in_use):
            raise BlockStateError(f"uncomputed blocks {sorted(self.uncomputed)} must be in use and have a hash")
