"""Owns which blocks have a snapshot: what layers with a state carry at the block's end.

Refuses a snapshot for a block that cannot be hit. A snapshot is kept under its block's digest, found with the block,
and gone with the block or before. The content of a snapshot is not looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import BlockStateError
from .allocator import PrefixCachingBlockAllocator

Content = TypeVar("Content")


class Snapshots(Generic[Content]):
    """`Snapshots` maps the digest of a block to its snapshot. If there are too many, the least recently used one goes.

    A snapshot whose block has gone cannot be found, for nobody holds a block with its digest; `settle` drops it.

    Args:
        allocator: allocator of the blocks.

    Attributes:
        most: most snapshots that there can be.
        num_evictions: number of snapshots that gave way to others so far.
        on_evict: function called with the block's digest and the content of each such snapshot; None: no function.

    Examples:
        >>> from . import BlockTable, PrefixCachingBlockAllocator, resumable, root_hash
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=2)
        >>> table = BlockTable(allocator, root_hash(b"model"))
        >>> table.allocate([1, 2, 3, 4, 5]), len(table.commit_full_blocks(5))
        (0, 2)
        >>> snapshots: Snapshots[str] = Snapshots(allocator, most=1)
        >>> snapshots.keep(table.block_ids[1], "after 4 tokens"), resumable([snapshots], table.block_ids, 5)
        (True, 4)
    """

    name = "states"

    def __init__(self, allocator: PrefixCachingBlockAllocator, most: int = 0) -> None:
        self.most = most
        self.num_evictions = 0
        self.on_evict: Callable[[bytes, Content], None] | None = None
        self._allocator = allocator
        self._contents: OrderedDict[bytes, Content] = OrderedDict()  # digest -> snapshot, the least recently used first
        self._seen = (0, 0)  # the allocator's evictions and version when all snapshots were looked at last

    def __len__(self) -> int:
        """Return the number of snapshots."""
        self.settle()
        return len(self._contents)

    def __bool__(self) -> bool:
        """Return True, also without snapshots."""
        return True

    @property
    def num_free(self) -> int:
        """Number of snapshots that can be kept beside those that there are."""
        return self.most - len(self)

    def num_of(self, namespace: bytes) -> int:
        """Return the number of snapshots of one namespace's blocks.  Cost: a look at each snapshot."""
        self.settle()
        blocks = map(self._allocator.hash_of_digest, self._contents)
        return sum(block is not None and block[1] == namespace for block in blocks)

    def keep(self, block_id: int, content: Content) -> bool:
        """Keep a snapshot at the end of a block that has none; return whether the block has one now.

        If there are as many as there may be, it takes the place of the least recently used one.
        """
        digest = self._allocator.digest_of(block_id)
        if digest is None:
            return False
        self.settle()
        if digest in self._contents:
            self._contents.move_to_end(digest)
            return True
        if self.most < 1:
            return False
        while len(self._contents) >= self.most:
            self._evict()
        self._contents[digest] = content
        return True

    def drop(self, block_id: int) -> None:
        """Forget a block's snapshot, if it has one."""
        digest = self._allocator.digest_of(block_id)
        if digest is not None:
            self._contents.pop(digest, None)

    def seen(self, num_tokens: int) -> range:
        """Return the index of the last full block, as a range; see `Group`."""
        num_blocks = num_tokens // self._allocator.block_size
        return range(max(0, num_blocks - 1), num_blocks)

    def has(self, block_id: int) -> bool:
        """Return whether a block has a snapshot."""
        return self._allocator.digest_of(block_id) in self._contents

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """Return the tokens up to the end of the last block with a snapshot, or 0; see `Group`."""
        size = self._allocator.block_size
        return next((index * size for index in range(num_tokens // size, 0, -1) if has(index - 1)), 0)

    def use(self, block_id: int) -> Content:
        """Return the snapshot of a block, and make it the most recently used. Raises BlockStateError if it has none."""
        digest = self._allocator.digest_of(block_id)
        if digest is None or digest not in self._contents:
            raise BlockStateError(f"block {block_id} has no snapshot")
        self._contents.move_to_end(digest)
        return self._contents[digest]

    def settle(self) -> None:
        """Forget snapshots whose blocks have gone."""
        now = (self._allocator.num_evictions, self._allocator.version)
        if self._seen != now:
            for digest in self._gone():
                del self._contents[digest]
            self._seen = now

    def _gone(self) -> list[bytes]:
        return [digest for digest in self._contents if self._allocator.hash_of_digest(digest) is None]

    def limit(self, most: int) -> None:
        """Allow `most` snapshots from now on; the least recently used ones beyond that number go."""
        self.most = most
        while len(self._contents) > most:
            self._evict()

    def of_digest(self, digest: bytes) -> Content | None:
        """Return the snapshot at the end of the block with this digest, or None. This does not count as a use."""
        return self._contents.get(digest)

    def _evict(self) -> None:
        digest, content = self._contents.popitem(last=False)
        self.num_evictions += 1
        if self.on_evict is not None:
            self.on_evict(digest, content)

    def reset(self) -> None:
        """Forget all snapshots."""
        self._contents.clear()

    def check(self) -> None:
        """Raise BlockStateError unless each snapshot's block can be hit, and there are at most `most` snapshots."""
        self.settle()
        gone = self._gone()
        if gone or len(self._contents) > max(0, self.most):
            digests = [digest.hex()[:8] for digest in self._contents]
            raise BlockStateError(
                f"{len(gone)} of {len(digests)} snapshots of at most {self.most} have no block: {digests}"
            )
