"""Owns which blocks have a snapshot: what layers with a state carry at the block's end.

A snapshot is kept under its block's digest, found with the block, and gone with the block or before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import BlockStateError
from .allocator import PrefixCachingBlockAllocator

Content = TypeVar("Content")


class Snapshots(Generic[Content]):
    """`Snapshots` is the `Group` of layers with a state: it maps the digest of a block to its snapshot.

    If there are too many, the least recently used one goes. `settle` drops snapshots whose blocks have gone.

    Attributes:
        most: most snapshots that there can be.
        pinned: digests of blocks whose snapshots give way to no others.
        on_evict: function called with the block's digest and the content of each snapshot that gives way; None: none.
    """

    name = "states"

    def __init__(self, allocator: PrefixCachingBlockAllocator, most: int = 0) -> None:
        self.most = most
        self.pinned: frozenset[bytes] = frozenset()
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
        """Return the number of snapshots of one namespace's blocks, after a look at each."""
        blocks = map(self._allocator.hash_of_digest, self._contents)
        return sum(block is not None and block[1] == namespace for block in blocks)

    def keep(self, block_id: int, content: Content) -> bool:
        """Keep a snapshot at the end of a block that has none; return whether the block has one now."""
        digest = self._allocator.digest_of(block_id)
        if digest is None:
            return False
        self.settle()
        if digest not in self._contents:
            if self.most <= len(self.pinned & self._contents.keys()):
                return False
            self._shrink(self.most - 1)
            self._contents[digest] = content
        self._contents.move_to_end(digest)
        return True

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

    def of_digest(self, digest: bytes) -> Content | None:
        """Return the snapshot at the end of the block with this digest, or None. This does not count as a use."""
        return self._contents.get(digest)

    def limit(self, most: int) -> None:
        """Allow `most` snapshots from now on; the least recently used ones beyond that number go, pinned ones last."""
        self.most = most
        self._shrink(most)

    def _shrink(self, most: int) -> None:
        while len(self._contents) > most:
            oldest = next(iter(self._contents))
            digest = next((each for each in self._contents if each not in self.pinned), oldest)
            content = self._contents.pop(digest)
            if self.on_evict is not None:
                self.on_evict(digest, content)

    def settle(self) -> None:
        """Forget snapshots whose blocks have gone."""
        now = (self._allocator.num_evictions, self._allocator.version)
        if self._seen != now:
            for digest in [each for each in self._contents if self._allocator.hash_of_digest(each) is None]:
                del self._contents[digest]
            self._seen = now

    def reset(self) -> None:
        """Forget all snapshots."""
        self._contents.clear()

    def check(self) -> None:
        """Raise BlockStateError unless each snapshot's block can be hit, and there are at most `most` snapshots."""
        self.settle()
        gone = [digest for digest in self._contents if self._allocator.hash_of_digest(digest) is None]
        if gone or len(self._contents) > max(0, self.most):
            digests = [digest.hex()[:8] for digest in self._contents]
            raise BlockStateError(
                f"{len(gone)} of {len(digests)} snapshots of at most {self.most} have no block: {digests}"
            )
