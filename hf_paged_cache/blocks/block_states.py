"""Owns the state of each block, and which block is handed out next; `PrefixCachingBlockAllocator` alone calls it.

free (no holder, no hash) | in use (has holders) | cached (no holder, and its hash finds its content)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from itertools import chain

from ..errors import BlockStateError, CacheArgumentError
from .hashing import BlockHash

OnEvict = Callable[[int, BlockHash, bytes], None]
"""Function called with the id, hash and namespace of a cached block that is handed out. It must neither ask anything of
the allocator nor raise."""


class BlockStates:
    """`BlockStates` changes holders, hashes and the order of eviction together.

    Free blocks are handed out first, the last freed one before the others. Then the least recently used cached block is
    evicted: of one sequence the tail before the head. But blocks that were used again are spared as long as they take
    no more than half of the pool (segmented LRU; 2Q, Johnson and Shasha, VLDB 1994). A block was used again if it was
    held while it was cached, or if its hash came back soon after it was evicted.

    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CacheArgumentError(f"num_blocks is {num_blocks}; give at least 2, as block 0 is never handed out")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # block id -> number of holders
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        self.blocks: dict[bytes, int] = {}  # digest -> block id
        self.namespaces = [b""] * num_blocks  # that blocks were taken for; anything for a free block
        self.uncomputed: set[int] = set()  # blocks that have a hash but not yet their content
        self.free = list(range(num_blocks - 1, 0, -1))  # the next to be handed out last
        self.once: OrderedDict[int, None] = OrderedDict()  # cached blocks that were used once, least recently first
        self.again: OrderedDict[int, None] = OrderedDict()  # and those that were used again
        self.on_evict: OnEvict | None = None  # called for each cached block just before it loses its hash
        self.num_evictions = 0
        self._reused: set[int] = set()  # blocks in use or cached that were used again
        self._last_used = [0] * num_blocks  # block id -> time of its last drop
        self._clock = 0  # number of drops
        self._evicted: set[bytes] = set()  # digests evicted lately ...
        self._evicted_before: set[bytes] = set()  # ... and as many that were evicted before them

    # Which block has which hash.

    def find(self, block_hash: BlockHash, namespace: bytes) -> int | None:
        """Return the block of a namespace with this digest and these tokens, computed or not; None if there is none."""
        block_id = self.blocks.get(block_hash.digest)
        has = None if block_id is None else self.hashes[block_id]
        if block_id is None or has is None or has.token_bytes != block_hash.token_bytes:
            return None
        return block_id if self.namespaces[block_id] == namespace else None

    def match(self, block_hashes: Iterable[BlockHash], namespace: bytes) -> list[int]:
        """Return the blocks of the longest leading run of hashes that are here, in this namespace, and computed."""
        blocks, hashes, namespaces, uncomputed = self.blocks, self.hashes, self.namespaces, self.uncomputed
        hits: list[int] = []
        for block_hash in block_hashes:
            block_id = blocks.get(block_hash[0])
            if block_id is None or block_id in uncomputed or namespaces[block_id] != namespace:
                break
            has = hashes[block_id]
            if has is None or has[1] != block_hash[1]:
                break
            hits.append(block_id)
        return hits

    def set_hash(self, block_id: int, block_hash: BlockHash, *, is_computed: bool = True) -> None:
        """Give a block that has no hash a hash that no other block has."""
        if not is_computed:  # first: if interrupted, the block must not look computed
            self.uncomputed.add(block_id)
        digest = block_hash[0]
        if digest in self._evicted or digest in self._evicted_before:
            self._reused.add(block_id)
        self.hashes[block_id] = block_hash
        self.blocks[digest] = block_id

    def remove_hash(self, block_id: int) -> None:
        """Take a block's hash away."""
        block_hash = self.hashes[block_id]
        self.hashes[block_id] = None
        if block_hash is not None:
            del self.blocks[block_hash.digest]
        self.uncomputed.discard(block_id)  # last: if interrupted, the block must not look computed

    # Moves between the states.

    def take(self, num_blocks: int, namespace: bytes) -> list[int]:
        """Hand out blocks with one holder and no hash; cached ones of any namespace. There are so many."""
        taken = self.free[: -num_blocks - 1 : -1]
        del self.free[len(self.free) - len(taken) :]
        if len(taken) < num_blocks:
            taken += self._evict(num_blocks - len(taken))
        for block_id in taken:
            self.ref_counts[block_id] = 1
            self.namespaces[block_id] = namespace
        self._reused.difference_update(taken)
        return taken

    def _evict(self, num_blocks: int) -> list[int]:
        once, again, times, taken = self.once, self.again, self._last_used, list[int]()
        for _ in range(num_blocks):
            line = once
            if not once or (2 * len(again) > self.num_blocks and times[next(iter(again))] < times[next(iter(once))]):
                line = again
            block_id, _ = line.popitem(last=False)
            block_hash = self.hashes[block_id]
            if block_hash is None:
                raise BlockStateError(f"block {block_id} is cached without a hash")
            if self.on_evict is not None:
                self.on_evict(block_id, block_hash, self.namespaces[block_id])
            self.hashes[block_id] = None
            del self.blocks[block_hash[0]]
            self._evicted.add(block_hash[0])
            taken.append(block_id)
        if len(self._evicted) > self.num_blocks:
            self._evicted_before, self._evicted = self._evicted, set()
        self.num_evictions += num_blocks
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block, which is in use or cached."""
        ref_counts, reused = self.ref_counts, self._reused
        for block_id in block_ids:
            if not ref_counts[block_id]:
                if block_id in reused:
                    del self.again[block_id]
                else:
                    del self.once[block_id]
                    reused.add(block_id)
            ref_counts[block_id] += 1

    def drop(self, block_ids: Iterable[int]) -> None:
        """Take one holder from each block, in the order given; BlockStateError if one has none.

        A block without a holder is cached if it has a hash and is computed; otherwise it becomes free, without a hash.
        """
        ref_counts, hashes, uncomputed, reused = self.ref_counts, self.hashes, self.uncomputed, self._reused
        for block_id in block_ids:
            if ref_counts[block_id] < 1:
                raise BlockStateError(f"block {block_id} freed with ref_count 0")
            ref_counts[block_id] -= 1
            if ref_counts[block_id]:
                continue
            self._clock += 1
            self._last_used[block_id] = self._clock
            if block_id in uncomputed:
                self.remove_hash(block_id)
            if hashes[block_id] is None:
                self.free.append(block_id)
            elif block_id in reused:
                self.again[block_id] = None
            else:
                self.once[block_id] = None

    def cached_blocks(self, namespace: bytes | None = None) -> list[int]:
        """Return the cached blocks of one namespace or of all."""
        return [each for each in (*self.once, *self.again) if namespace in (None, self.namespaces[each])]

    def forget(self, block_ids: list[int]) -> None:
        """Take the hashes of these blocks away. Those that nobody holds become free, and are handed out next."""
        for block_id in block_ids:
            self.remove_hash(block_id)
            if not self.ref_counts[block_id]:
                del (self.again if block_id in self._reused else self.once)[block_id]
                self.free.append(block_id)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks, which are handed out first, the lowest of them first."""
        added = num_blocks - self.num_blocks
        self.ref_counts += [0] * added
        self.hashes += [None] * added
        self.namespaces += [b""] * added
        self._last_used += [0] * added
        self.free += range(num_blocks - 1, self.num_blocks - 1, -1)
        self.num_blocks = num_blocks  # last: until here, `rebuild` cuts all lists to the old number

    def rebuild(self, holders: Iterable[list[int]]) -> None:
        """Derive the state again from `holders` and from the blocks' hashes and times.  Cost: O(num_blocks)."""
        counts, times = Counter(chain.from_iterable(holders)), self._last_used
        self.ref_counts = [counts[block_id] for block_id in range(self.num_blocks)]
        for of_blocks in (self.hashes, self.namespaces, times):
            del of_blocks[self.num_blocks :]
        for block_id in self.uncomputed:
            if block_id < self.num_blocks and not counts[block_id]:
                self.hashes[block_id] = None
        self.blocks = {each.digest: block_id for block_id, each in enumerate(self.hashes) if each is not None}
        self.uncomputed = self.uncomputed.intersection(self.blocks.values())
        idle = [block_id for block_id in range(self.num_blocks - 1, 0, -1) if not counts[block_id]]
        idle.sort(key=times.__getitem__)
        cached = [block_id for block_id in idle if self.hashes[block_id] is not None]
        self.free = [block_id for block_id in idle if self.hashes[block_id] is None]
        self.once = OrderedDict.fromkeys(block_id for block_id in cached if block_id not in self._reused)
        self.again = OrderedDict.fromkeys(block_id for block_id in cached if block_id in self._reused)

    def check(self, holders: list[list[int]]) -> None:
        """Raise BlockStateError unless everything here is what `holders` and the blocks' hashes and times say."""
        for block_ids in holders:
            if len(set(block_ids)) < len(block_ids) or not all(0 < each < self.num_blocks for each in block_ids):
                raise BlockStateError(f"a holder has a block twice, or one that there is not: {block_ids}")
        derived = copy(self)
        derived.hashes = [*self.hashes]
        derived.rebuild(holders)
        for name in ("ref_counts", "hashes", "blocks", "uncomputed", "once", "again", "free"):
            found, expected = getattr(self, name), getattr(derived, name)
            if found != expected and (name != "free" or sorted(found) != sorted(expected)):
                raise BlockStateError(f"{name.replace('_', ' ')}: not what holders, hashes and times of blocks say")
