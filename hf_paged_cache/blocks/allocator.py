"""Records who holds which block; every change of the record is made here.

Blocks are taken, shared, hashed, copied on write and given back. Refuses a change that cannot finish, and an allocation
that it does not know. The lists of the live allocations are the truth; everything else (`BlockStates`) is derived from
these lists and from the blocks' own hashes. A change sets the mark `_dirty`, changes the lists last and clears the
mark. After a Ctrl-C inside a change, the next operation finds the mark set and derives everything again: the change has
either happened or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from weakref import ReferenceType

from ..errors import BlockStateError, CacheArgumentError, OutOfBlocksError
from .allocation import Allocation
from .arguments import check_eviction, negative
from .block_states import NEVER, BlockStates, OnEvict
from .hashing import BlockHash


class PrefixCachingBlockAllocator:
    """`PrefixCachingBlockAllocator` hands out block ids, shares blocks by hash, and evicts blocks that nobody holds.

    It knows nothing of the blocks' content. Every operation finishes or changes nothing. Each operation settles first:
    it repairs what was interrupted, and takes back the blocks of collected allocations. Block 0 is the null block: it
    is never handed out, and is in no state. Not thread-safe: use one lock for the allocator and the content.

    Args:
        num_blocks: number of blocks with the null block, at least 2.
        block_size: tokens of a block, at least 1.
        eviction: "reuse" evicts blocks first that are seldom used again; "lru" always evicts the least recently used
            block.

    Raises:
        CacheArgumentError: a size below its least value, or another eviction.

    Examples:
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=16)
        >>> allocation = allocator.allocate([], num_mutable_blocks=2)
        >>> allocation.block_ids, allocator.num_free_blocks
        ([1, 2], 1)
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: str = "reuse") -> None:
        check_eviction(eviction)
        if block_size < 1:
            raise CacheArgumentError(f"block_size is {block_size}; it must be at least 1 token")
        self.block_size, self.eviction = block_size, eviction
        self.collected: deque[ReferenceType[Allocation]] = deque()  # their blocks are to be taken back
        self._held: dict[ReferenceType[Allocation], list[int]] = {}  # live allocation -> its block ids
        self._states = BlockStates(num_blocks, eviction)
        self._num_before = (0, 0)  # evictions and missed blocks before the last reset
        self.version = 0  # changes where blocks may have gone by no eviction and by no doing of their holder
        self._copies: list[tuple[int, int]] = []  # (source, destination) of copies to be made in this order
        self._dirty = False

    # Questions, which change nothing.

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, the null block included."""
        return self._states.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without a holder and without a hash."""
        return self.num_available_blocks - self._states.num_cached

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks without a holder that a prefix can hit."""
        self._settle()
        return self._states.num_cached

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that can be handed out: free and cached ones."""
        self._settle()
        return self._states.queue.length

    @property
    def num_blocks_in_use(self) -> int:
        """Number of distinct blocks that somebody holds."""
        return self._states.num_blocks - 1 - self.num_available_blocks

    def num_cached_blocks_of(self, namespace: bytes) -> int:
        """Return the number of cached blocks of one namespace.  Cost: O(num_blocks)."""
        return self.kinds_of_blocks(namespace).count(1)

    def num_blocks_in_use_of(self, namespace: bytes) -> int:
        """Return the number of blocks in use of one namespace.  Cost: a look at each block that its holders have."""
        return len({i for each in self.allocations() if each.namespace == namespace for i in each.block_ids})

    @property
    def num_evictions(self) -> int:
        """Number of cached blocks that were handed out so far."""
        return self._num_before[0] + self._states.num_evictions

    @property
    def num_missed_blocks(self) -> int:
        """Number of blocks that were given a hash, and that a pool twice as large would still have had: an estimate."""
        return self._num_before[1] + self._states.num_missed

    def holds(self, allocation: Allocation) -> bool:
        """Return whether `allocation` was made by this allocator and has not been freed."""
        self._settle()
        return allocation.key in self._held

    def allocations(self) -> list[Allocation]:
        """Return the allocations that are alive and have not been freed."""
        self._settle()
        return [allocation for key in self._held if (allocation := key()) is not None]

    def ref_count(self, block_id: int) -> int:
        """Return the number of allocations that hold a block."""
        self._check_ids((block_id,))
        return self._states.ref_counts[block_id]

    def namespace_of(self, block_id: int) -> bytes:
        """Return the namespace of a block that somebody holds or can hit."""
        self._check_ids((block_id,))
        return self._states.index.namespaces[block_id]

    def block_hash_of(self, block_id: int) -> BlockHash | None:
        """Return the hash of a block, or None if it has no hash. The block may be uncomputed."""
        self._check_ids((block_id,))
        return self._states.index.hash_of(block_id)

    def digest_of(self, block_id: int) -> bytes | None:
        """Return the digest of a block that somebody holds, or None if the block has no hash."""
        return self._states.index.digests[block_id]

    def hash_of_digest(self, digest: bytes) -> tuple[BlockHash, bytes] | None:
        """Return the hash and the namespace of the block with this digest; None if no block has the digest."""
        index = self._states.index
        block_id = index.blocks.get(digest)
        block_hash = None if block_id is None else index.hash_of(block_id)
        return None if block_id is None or block_hash is None else (block_hash, index.namespaces[block_id])

    def is_writable(self, block_id: int) -> bool:
        """Return whether a block may be written: it has no hash, and one holder."""
        self._settle()
        return self._states.ref_counts[block_id] == 1 and self._states.index.digests[block_id] is None

    def hashes(self, namespace: bytes = b"") -> dict[int, BlockHash]:
        """Return block id -> hash for all blocks of a namespace that a prefix can hit.  Cost: O(num_blocks)."""
        self._settle()
        index = self._states.index
        found = ((i, index.hash_of(i)) for i in index.blocks.values() if index.namespaces[i] == namespace)
        return {i: each for i, each in found if each is not None and i not in index.uncomputed}

    def match_prefix(self, block_hashes: Iterable[BlockHash], namespace: bytes = b"") -> list[int]:
        """Return the blocks of the longest leading run of hashes whose content is here, in this namespace.

        Effects: none. Asks `block_hashes` for nothing after the first miss.
        """
        self._settle()
        return self._states.index.match(block_hashes, namespace)

    def kinds_of_blocks(self, namespace: bytes | None = None) -> bytes:
        """Return the state of each block as one byte: 0 free, 1 cached, 2 in use.  Cost: O(num_blocks).

        The null block is left out. With a namespace, only its blocks in use and cached are listed.
        """
        self._settle()
        counts, index = self._states.ref_counts, self._states.index
        return bytes(
            2 if counts[block_id] else 0 if index.digests[block_id] is None else 1
            for block_id in range(1, self._states.num_blocks)
            if namespace is None
            or (index.namespaces[block_id] == namespace and (counts[block_id] or index.digests[block_id] is not None))
        )

    def require(self, num_blocks: int, hits: Iterable[int] = (), namespace: bytes = b"") -> None:
        """Raise OutOfBlocksError unless `num_blocks` fresh blocks can be had beside `hits`.

        A namespace is told no numbers, which would tell what others hold.
        """
        self._settle()
        states = self._states
        counts = states.ref_counts
        num_cached_hits = [counts[block_id] for block_id in hits].count(0)
        if num_blocks + num_cached_hits > states.queue.length:
            num_free = states.queue.length - states.num_cached
            of_all = f"{num_free} free + {states.num_cached} cached of {states.num_blocks - 1}"
            raise OutOfBlocksError(
                f"need {num_blocks + num_cached_hits} blocks: {'there are fewer' if namespace else of_all}"
                + (f", {num_cached_hits} of them the prefix hit itself" if num_cached_hits else "")
                + "; free what is no longer needed or give the pool more blocks"
            )

    @property
    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) copies to be made, in this order, before the next write; then call `drop_copies`.

        A source may be an earlier destination, and a destination may come twice.
        """
        return tuple(self._copies)

    def check(self) -> None:
        """Prove the invariants, O(num_blocks):

        1. each block but the null block is in exactly one state, and the counts sum to num_blocks - 1;
        2. a block's ref_count is the number of live allocations that hold it;
        3. no allocation holds a block twice;
        4. index and hashes are inverse; cached blocks are computed, and queued after the free ones, in each line the
           least recently used first;
        5. all blocks of an allocation are of its namespace.

        Raises:
            BlockStateError: an invariant does not hold; the message has the whole state.
        """
        self._settle()
        states, lists = self._states, list(self._held.values())
        try:
            states.check(lists)
            for key, block_ids in self._held.items():
                allocation = key()
                if allocation and any(states.index.namespaces[i] != allocation.namespace for i in block_ids):
                    raise BlockStateError(f"{allocation!r} has blocks of another namespace: {block_ids}")
        except BlockStateError as error:
            hashes = {i: digest.hex()[:8] for i, digest in enumerate(states.index.digests) if digest is not None}
            raise BlockStateError(
                f"{error}\nallocations: {lists}\nref counts: {states.ref_counts}\nqueue: {list(states.queue)}, "
                f"{states.num_cached} cached\nhashes: {hashes}\nuncomputed: {sorted(states.index.uncomputed)}"
            ) from error

    # Blocks are taken and given back.

    def allocate(
        self,
        block_hashes: Iterable[BlockHash] = (),
        num_mutable_blocks: int = 0,
        *,
        namespace: bytes = b"",
    ) -> Allocation:
        """Hold the prefix hit of `block_hashes`, then fresh blocks to write into.

        No block of the hit is evicted for the fresh ones.

        Args:
            num_mutable_blocks: number of fresh blocks after the hit.
            namespace: namespace of the blocks. Only blocks of the same namespace are hit.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a negative number, or a hash given twice.
        """
        if num_mutable_blocks < 0:
            raise negative("num_mutable_blocks", num_mutable_blocks)
        self._settle()  # also where nothing is taken: `_registered` says that all is well
        hits = self._states.index.match(block_hashes, namespace) if block_hashes else []
        if len(set(hits)) < len(hits):
            raise CacheArgumentError("a block hash is given twice; the hashes of one sequence differ")
        if num_mutable_blocks:
            self.require(num_mutable_blocks, hits, namespace)
        self._dirty = True
        num_hits = len(hits)
        if hits:
            self._states.hold(hits)
        if num_mutable_blocks:
            hits += self._states.take(num_mutable_blocks, namespace)
        return self._registered(Allocation(self, hits, num_hits, namespace))

    def _registered(self, allocation: Allocation) -> Allocation:
        """Register an allocation whose blocks have been taken, and end the change."""
        self._held[allocation.key] = allocation.block_ids
        self._dirty = False
        return allocation

    def allocate_mutable(self, allocation: Allocation, num_blocks: int) -> None:
        """Append fresh blocks. Raises OutOfBlocksError, with nothing changed, and CacheArgumentError below 0."""
        if num_blocks < 0:
            raise negative("num_blocks", num_blocks)
        block_ids = self._list_of(allocation)
        self.require(num_blocks, (), allocation.namespace)
        self._dirty = True
        block_ids.extend(self._states.take(num_blocks, allocation.namespace))
        self._dirty = False

    def allocate_immutable(self, allocation: Allocation, block_hashes: Iterable[BlockHash]) -> None:
        """Append a block for each hash: the block that has the hash, or a fresh block.

        A fresh block gets the hash and awaits `mark_computed`. Until `mark_computed`, a fresh block is not hit, and
        loses its hash when it is freed. A fresh block gets no hash where the digest belongs to other tokens (a
        collision of 256 bits) or to another namespace.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a hash that is given twice, or is that of a block which `allocation` holds.
        """
        block_ids, index, hashes = self._list_of(allocation), self._states.index, list(block_hashes)
        found = [index.get(block_hash, allocation.namespace) for block_hash in hashes]
        hits = [block_id for block_id in found if block_id is not None]
        if len(set(hashes)) < len(hashes) or not set(hits).isdisjoint(block_ids):
            raise CacheArgumentError("a block hash is given twice; the hashes of one sequence differ")
        self._extend(allocation, [each if hit is None else hit for each, hit in zip(hashes, found, strict=True)])

    def _extend(self, allocation: Allocation, wanted: Sequence[int | BlockHash | None]) -> None:
        """Append one block for each entry of `wanted`, in order.

        Args:
            wanted: the id of a block that exists; or a hash, or None, for a fresh block with or without a hash.
        """
        block_ids, index = self._list_of(allocation), self._states.index
        named = [each for each in wanted if isinstance(each, int)]
        self.require(len(wanted) - len(named), named, allocation.namespace)
        self._dirty = True
        self._states.hold(named)
        fresh = iter(self._states.take(len(wanted) - len(named), allocation.namespace))
        added: list[int] = []
        for each in wanted:
            block_id = each if isinstance(each, int) else next(fresh)
            added.append(block_id)
            if isinstance(each, BlockHash) and each.digest not in index.blocks:
                index.insert(block_id, each, computed=False)
                self._states.remember((block_id,))
        block_ids.extend(added)
        self._dirty = False

    def allocate_as(self, wanted: Sequence[int | BlockHash | None], namespace: bytes = b"") -> Allocation:
        """Hold blocks in the order of `wanted`: the block of each id, and a fresh block for each other entry.

        A fresh block that is wanted with a hash gets the hash as from `allocate_immutable`, and awaits `mark_computed`.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: an id that is no block's, or is given twice.
            BlockStateError: a named block is free, or of another namespace.
        """
        named = [each for each in wanted if isinstance(each, int)]
        self._check_not_free(named)
        if len(set(named)) < len(named):
            raise CacheArgumentError(f"a block is given twice among {named}; a holder has a block once")
        for block_id in named:
            if self._states.index.namespaces[block_id] != namespace:
                raise BlockStateError(f"block {block_id} is of another namespace")
        allocation = self.allocate(namespace=namespace)
        self._extend(allocation, wanted)
        return allocation

    def fork(self, allocation: Allocation, num_blocks: int | None = None) -> Allocation:
        """Return a second holder of the same blocks, or of the first `num_blocks`. Takes no fresh block."""
        if num_blocks is not None and num_blocks < 0:
            raise negative("num_blocks", num_blocks)
        block_ids = self._list_of(allocation)[:num_blocks]
        self._dirty = True
        self._states.hold(block_ids)
        num_prefix_blocks = min(allocation.num_prefix_blocks, len(block_ids))
        return self._registered(Allocation(self, block_ids, num_prefix_blocks, allocation.namespace))

    def truncate(self, allocation: Allocation, num_blocks: int) -> None:
        """Keep the first `num_blocks` blocks; free the others, the last one first."""
        block_ids = self._list_of(allocation)
        if not 0 <= num_blocks <= len(block_ids):
            raise CacheArgumentError(f"cannot keep {num_blocks} blocks; give 0 to {len(block_ids)}, the number held")
        if num_blocks == len(block_ids):
            return
        self._dirty = True
        self._states.drop(reversed(block_ids[num_blocks:]))
        allocation.num_prefix_blocks = min(allocation.num_prefix_blocks, num_blocks)
        del block_ids[num_blocks:]
        self._dirty = False

    def free(self, allocation: Allocation) -> None:
        """Give all blocks back, the last one first. Raises BlockStateError for an allocation that was freed."""
        block_ids = self._list_of(allocation)
        self._dirty = True
        self._states.drop(reversed(block_ids))
        del self._held[allocation.key]
        block_ids.clear()
        self._dirty = False

    # Who may hit the content of blocks, and who may write it.

    def commit_many(self, allocation: Allocation, start: int, block_hashes: Iterable[BlockHash]) -> int:
        """Make full, written blocks immutable: give them their hashes, so that others hit them.

        Another block may have a block's digest already. If it has the same tokens and is computed, it replaces the
        block; if it is uncomputed, it gives the block its hash. If it has other tokens, is of another namespace, or
        belongs to the same allocation, the block stays without a hash.

        Args:
            start: logical index of the first block.

        Returns:
            Number of blocks that were replaced; `block_ids` has the new ids.

        Raises:
            CacheArgumentError: more hashes than there are blocks from `start`.
            BlockStateError: a block has another hash already.
        """
        block_ids, hashes = self._list_of(allocation), list(block_hashes)
        if not 0 <= start <= start + len(hashes) <= len(block_ids):
            raise CacheArgumentError(f"{len(hashes)} blocks to commit from {start}; there are {len(block_ids)} blocks")
        states, index = self._states, self._states.index
        blocks, digests, token_bytes, uncomputed = index.blocks, index.digests, index.token_bytes, index.uncomputed
        parents, namespaces, namespace = index.parents, index.namespaces, allocation.namespace
        own_ids = block_ids[start : start + len(hashes)]
        for own, block_hash in zip(own_ids, hashes, strict=True):
            if (digest := digests[own]) is not None and digest != block_hash[0]:
                raise BlockStateError(f"block {own} has another hash already; make it writable before it is written")
        replaced: dict[int, int] = {}  # logical block index -> block that replaces it
        held: set[int] = set()
        self._dirty = True
        for block_index, own, block_hash in zip(range(start, len(block_ids)), own_ids, hashes, strict=False):
            digest, tokens, parent = block_hash
            other = blocks.setdefault(digest, own)
            if other != own:
                if token_bytes[other] != tokens or namespaces[other] != namespace:
                    continue
                if other not in uncomputed:
                    held = held or set(block_ids)
                    if other not in held:
                        held.add(other)
                        replaced[block_index] = other
                    continue
                index.remove(other)
                blocks[digest] = own
            elif uncomputed:
                uncomputed.discard(own)
            token_bytes[own], parents[own] = tokens, parent
            digests[own] = digest
        states.remember(own_ids)
        if replaced:
            states.hold(replaced.values())
            states.drop([block_ids[block_index] for block_index in reversed(replaced)])
            for block_index, other in replaced.items():
                own_ids[block_index - start] = other
            block_ids[start : start + len(own_ids)] = own_ids
        self._dirty = False
        return len(replaced)

    def mark_computed(self, block_ids: Iterable[int]) -> None:
        """Let blocks of `allocate_immutable`, which are in use, be hit: their content is there."""
        computed = list(block_ids)
        self._check_ids(computed)
        for block_id in computed:
            if not self._states.ref_counts[block_id]:
                raise BlockStateError(f"block {block_id} marked computed with ref_count 0")
        self._states.index.uncomputed.difference_update(computed)

    def make_writable(self, allocation: Allocation, block_index: int) -> None:
        """Replace a block by a fresh copy on write unless it `is_writable`, and record the copy to be made.

        Raises OutOfBlocksError, with nothing changed, and CacheArgumentError if there is no such block.
        """
        block_ids = self._list_of(allocation)
        if not 0 <= block_index < len(block_ids):
            raise CacheArgumentError(f"there is no block {block_index}; blocks are 0 to {len(block_ids) - 1}")
        source = block_ids[block_index]
        if self.is_writable(source):
            return
        self.require(1, (), allocation.namespace)
        self._dirty = True
        (destination,) = self._states.take(1, allocation.namespace)
        self._states.spare_from_now()
        self._states.drop((source,))
        self._copies.append((source, destination))  # before the list: a copy too many does no harm, one too few does
        block_ids[block_index] = destination
        self._dirty = False

    def drop_copies(self, num_copies: int) -> None:
        """Forget the first `num_copies` of `pending_copies`, which were made."""
        del self._copies[:num_copies]
        if not self._copies:
            self._states.spared_from = NEVER

    def mark_accessed(self, block_ids: Sequence[int]) -> None:
        """Evict these cached blocks last, in the order given; blocks in use are skipped, free ones are refused."""
        self._check_not_free(block_ids)
        self._dirty = True
        self._states.touch(block_ids)
        self._dirty = False

    def watch_evictions(self, on_evict: OnEvict) -> None:
        """Call `on_evict` from now on for each cached block that is handed out anew, just before it loses its hash.

        The block's content is there until the next write. If the change is interrupted, `on_evict` may have been called
        for a block that stays.
        """
        self._states.on_evict = on_evict

    # The whole pool.

    def grow(self, num_blocks: int) -> None:
        """Raise the number of blocks; new blocks are handed out first. Raises CacheArgumentError for a lower number."""
        self._settle()
        if num_blocks < self.num_blocks:
            raise CacheArgumentError(f"cannot shrink to {num_blocks} blocks; give at least {self.num_blocks}")
        self._dirty = True
        self._states.grow(num_blocks)
        self._dirty = False

    def forget(self, block_hashes: Iterable[BlockHash], namespace: bytes = b"") -> None:
        """Let nobody hit the blocks with these hashes any more; those that nobody holds become free."""
        self._settle()
        found = [self._states.index.get(block_hash, namespace) for block_hash in dict.fromkeys(block_hashes)]
        if block_ids := [block_id for block_id in found if block_id is not None]:
            self._forget(block_ids)

    def forget_under(self, roots: Collection[bytes]) -> int:
        """Free every cached block whose sequence begins with one of these roots; return how many.

        Cost: O(num_blocks).
        """
        self._settle()
        index, found = self._states.index, dict[int, bool]()
        for block_id in index.blocks.values():
            path, at = list[int](), block_id
            while at not in found:
                path.append(at)
                before = index.blocks.get(index.parents[at])
                if before is None:
                    found[at] = index.parents[at] in roots
                else:
                    at = before
            found.update(dict.fromkeys(path, found[at]))
        stale = [i for i, is_stale in found.items() if is_stale and not self._states.ref_counts[i]]
        if stale:
            self._forget(stale)
        return len(stale)

    def forget_cached_blocks(self, namespace: bytes | None = None) -> None:
        """Free every cached block, of all namespaces or of one; blocks in use keep their hashes."""
        self._settle()
        if namespace is None:
            self._states.evicted.clear()
        self._forget(self._states.cached_blocks(namespace))

    def _forget(self, block_ids: list[int]) -> None:
        self._dirty = True
        self._states.forget(block_ids)
        self.version += 1
        self._dirty = False

    def reset_prefix_cache(self, num_blocks: int | None = None) -> None:
        """Forget every hash and start anew, with `num_blocks` blocks if given.

        Raises:
            BlockStateError: blocks are in use; nothing has changed.
            CacheArgumentError: `num_blocks` is below 2.
        """
        if self.num_blocks_in_use:
            raise BlockStateError(f"cannot reset: {self.num_blocks_in_use} blocks are in use; free their holders first")
        states = BlockStates(
            self.num_blocks if num_blocks is None else num_blocks, self.eviction, self._states.on_evict
        )
        self._num_before = self.num_evictions, self.num_missed_blocks
        self._copies.clear()
        self.version += 1
        self._states = states

    # The record.

    def _settle(self) -> None:
        if self._dirty:
            self._states.rebuild(self._held.values())
            self.version += 1  # blocks may have lost their hashes in what was interrupted
            self._dirty = False
        collected = self.collected
        while collected:  # further keys may come in meanwhile, at the other end
            key = collected[0]
            try:
                block_ids = self._held.get(key)
            except TypeError:  # a dead reference, never registered, cannot be hashed
                block_ids = None
            if block_ids is not None:
                self._dirty = True
                self._states.drop(reversed(block_ids))
                self.version += bool(block_ids)
                del self._held[key]
                self._dirty = False
            collected.popleft()

    def _list_of(self, allocation: Allocation) -> list[int]:
        """Settle, so that every change may begin with this call; return the registered list of a live allocation."""
        self._settle()
        block_ids = self._held.get(allocation.key)
        if block_ids is None:
            raise BlockStateError(f"{allocation!r} has ref_count 0: it was freed, or is another allocator's")
        return block_ids

    def _check_ids(self, block_ids: Iterable[int]) -> None:
        """Settle, then raise CacheArgumentError if an id is not that of a block."""
        self._settle()
        most = self._states.num_blocks
        for block_id in block_ids:
            if not 0 < block_id < most:
                raise CacheArgumentError(f"block {block_id} given; blocks are 1 to {most - 1}")

    def _check_not_free(self, block_ids: Collection[int]) -> None:
        """Settle, then raise BlockStateError if a block is neither in use nor cached."""
        self._check_ids(block_ids)
        for block_id in block_ids:
            if not self._states.ref_counts[block_id] and self._states.index.digests[block_id] is None:
                raise BlockStateError(f"block {block_id} is free; name blocks in use or cached")
