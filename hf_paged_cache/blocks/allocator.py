"""Records who holds which block; every change of the record is made here.

The lists of the live allocations are the truth; everything else (`BlockStates`) is derived from these lists and from
the blocks' own hashes. A change sets the mark `_dirty`, changes the lists last and clears the mark. After a Ctrl-C
inside a change, the next operation finds the mark set and derives everything again: the change has happened or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn
from weakref import ReferenceType, ref

from ..errors import BlockStateError, CacheArgumentError, OutOfBlocksError
from .arguments import negative
from .block_states import BlockStates, OnEvict
from .hashing import BlockHash


class Resumption(NamedTuple):
    """`Resumption` says after how many tokens a sequence may resume: after any number from `start` to `stop`."""

    start: int
    stop: int


class Allocation:
    """`Allocation` lists the blocks of one holder until they are given back.

    They are given back once: by `free()`, on leaving a `with`, or at the allocator's next operation after the
    allocation was collected.

    Attributes:
        block_ids: logical block index -> block id; read only.
        num_prefix_blocks: number of leading blocks that were a prefix hit.
        key: key of the allocation in the allocator, valid also after the allocation was collected.
        resumption: numbers of tokens after which the holder may resume, for layers with a window; see `WindowBlocks`.

    Examples:
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=16)
        >>> with allocator.allocate([], num_mutable_blocks=2) as allocation:
        ...     allocation.slots(0, 3)
        [16, 17, 18]
    """

    __slots__ = ("__weakref__", "allocator", "block_ids", "key", "namespace", "num_prefix_blocks", "resumption")

    def __init__(
        self, allocator: PrefixCachingBlockAllocator, block_ids: list[int], num_prefix_blocks: int, namespace: bytes
    ) -> None:
        self.allocator = allocator
        # The callback is a C function: the collector may run inside any of our lines, and must run no Python there.
        self.key = ref(self, allocator.collected.append)
        self.block_ids = block_ids
        self.num_prefix_blocks = num_prefix_blocks
        self.namespace = namespace
        self.resumption: Resumption | None = None

    def __repr__(self) -> str:
        return f"Allocation(num_blocks={len(self.block_ids)}, num_prefix_blocks={self.num_prefix_blocks})"

    @property
    def is_freed(self) -> bool:
        """True if the blocks were given back."""
        return not self.allocator.holds(self)

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slot of each position in `[start, stop)`: block id * block_size + offset.

        Raises CacheArgumentError if a position lies in no block.
        """
        size, block_ids = self.allocator.block_size, self.block_ids
        if not 0 <= start <= stop <= len(block_ids) * size:
            raise CacheArgumentError(f"no slots for positions [{start}, {stop}); there are {len(block_ids) * size}")
        return [block_ids[position // size] * size + position % size for position in range(start, stop)]

    def free(self) -> None:
        """Give all blocks back, the last one first. Raises BlockStateError the second time."""
        self.allocator.free(self)

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.is_freed:
            self.free()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Allocation cannot be copied or pickled; allocator.fork(allocation) holds its blocks again")


class PrefixCachingBlockAllocator:
    """`PrefixCachingBlockAllocator` hands out block ids, shares blocks by hash, and evicts blocks that nobody holds.

    Every operation settles first (it repairs what was interrupted, and takes back the blocks of collected allocations),
    and then finishes or changes nothing. Block 0, the null block, is never handed out. `BlockStates` says which block
    is evicted. Not thread-safe: use one lock for the allocator and the content.

    Args:
        num_blocks: number of blocks with the null block, at least 2.
        block_size: tokens of a block, at least 1.

    Examples:
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=16)
        >>> allocation = allocator.allocate([], num_mutable_blocks=2)
        >>> allocation.block_ids, allocator.num_free_blocks
        ([1, 2], 1)
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise CacheArgumentError(f"block_size is {block_size}; it must be at least 1 token")
        self.block_size = block_size
        self.collected: deque[ReferenceType[Allocation]] = deque()  # their blocks are to be taken back
        self._held: dict[ReferenceType[Allocation], list[int]] = {}  # live allocation -> its block ids
        self._states = BlockStates(num_blocks)
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
        self._settle()
        return len(self._states.free)

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks without a holder that a prefix can hit."""
        self._settle()
        return len(self._states.once) + len(self._states.again)

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that can be handed out: free and cached ones."""
        self._settle()
        return len(self._states.free) + len(self._states.once) + len(self._states.again)

    @property
    def num_blocks_in_use(self) -> int:
        """Number of distinct blocks that somebody holds."""
        return self._states.num_blocks - 1 - self.num_available_blocks

    def num_cached_blocks_of(self, namespace: bytes) -> int:
        """Return the number of cached blocks of one namespace, in O(num_blocks)."""
        self._settle()
        return len(self._states.cached_blocks(namespace))

    def num_blocks_in_use_of(self, namespace: bytes) -> int:
        """Return the number of blocks in use of one namespace, after a look at each block that its holders have."""
        return len({i for each in self.allocations() if each.namespace == namespace for i in each.block_ids})

    @property
    def num_evictions(self) -> int:
        """Number of cached blocks that were handed out so far."""
        return self._states.num_evictions

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
        self._check_id(block_id)
        return self._states.ref_counts[block_id]

    def namespace_of(self, block_id: int) -> bytes:
        """Return the namespace of a block that somebody holds or can hit."""
        return self._states.namespaces[block_id]

    def block_hash_of(self, block_id: int) -> BlockHash | None:
        """Return the hash of a block, or None if it has no hash. The block may be uncomputed."""
        self._check_id(block_id)
        return self._states.hashes[block_id]

    def digest_of(self, block_id: int) -> bytes | None:
        """Return the digest of a block that somebody holds, or None if the block has no hash."""
        block_hash = self._states.hashes[block_id]
        return None if block_hash is None else block_hash.digest

    def hash_of_digest(self, digest: bytes) -> tuple[BlockHash, bytes] | None:
        """Return the hash and the namespace of the block with this digest; None if no block has the digest."""
        block_id = self._states.blocks.get(digest)
        if block_id is None or (block_hash := self._states.hashes[block_id]) is None:
            return None
        return block_hash, self._states.namespaces[block_id]

    def is_writable(self, block_id: int) -> bool:
        """Return whether a block may be written: it has no hash, and one holder."""
        self._settle()
        return self._states.ref_counts[block_id] == 1 and self._states.hashes[block_id] is None

    def hashes(self, namespace: bytes = b"") -> dict[int, BlockHash]:
        """Return block id -> hash for all blocks of a namespace that a prefix can hit.  Cost: O(num_blocks)."""
        self._settle()
        states = self._states
        computed = [each for each in states.blocks.values() if each not in states.uncomputed]
        found = {i: states.hashes[i] for i in computed if states.namespaces[i] == namespace}
        return {i: block_hash for i, block_hash in found.items() if block_hash is not None}

    def match_prefix(self, block_hashes: Iterable[BlockHash], namespace: bytes = b"") -> list[int]:
        """Return the blocks of the longest leading run of hashes whose content is here, in this namespace."""
        if self._dirty or self.collected:
            self._settle()
        return self._states.match(block_hashes, namespace)

    def require(self, num_blocks: int, hits: Iterable[int] = (), namespace: bytes = b"") -> None:
        """Raise OutOfBlocksError unless `num_blocks` fresh blocks can be had beside `hits`.

        A namespace is told no numbers: these would tell what others hold.
        """
        states, num_available = self._states, self.num_available_blocks
        num_cached_hits = [states.ref_counts[block_id] for block_id in hits].count(0)
        num_needed = num_blocks + num_cached_hits
        if num_needed > num_available:
            num_free = len(states.free)
            of_all = f"{num_free} free + {num_available - num_free} cached of {states.num_blocks - 1}"
            raise OutOfBlocksError(
                f"need {num_needed} blocks: {'there are fewer' if namespace else of_all}"
                + (f", {num_cached_hits} of them the prefix hit itself" if num_cached_hits else "")
                + "; free what is no longer needed or give the pool more blocks"
            )

    @property
    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) copies to be made, in this order, before the next write; then call `drop_copies`."""
        return tuple(self._copies)

    def check(self) -> None:
        """Raise BlockStateError, with the whole state, unless these hold, in O(num_blocks):

        1. no allocation holds a block twice, or one of another namespace;
        2. all that is known of blocks is what the allocations' lists and the blocks' hashes and times say.
        """
        allocations, states = self.allocations(), self._states
        try:
            states.check(list(self._held.values()))
            for each in allocations:
                if any(states.namespaces[block_id] != each.namespace for block_id in each.block_ids):
                    raise BlockStateError(f"{each!r} has blocks of another namespace: {each.block_ids}")
        except BlockStateError as error:
            hashes = [each and each.digest.hex()[:8] for each in states.hashes]  # and no tokens
            state = {**vars(states), "hashes": hashes, "blocks": len(states.blocks)}
            raise BlockStateError(f"{error}\nallocations: {[*self._held.values()]}\n{state}") from error

    # Blocks are taken and given back.

    def allocate(
        self, block_hashes: Iterable[BlockHash] = (), num_mutable_blocks: int = 0, *, namespace: bytes = b""
    ) -> Allocation:
        """Hold the prefix hit of `block_hashes` in this namespace, then fresh blocks to write into.

        Raises OutOfBlocksError, with nothing changed, and CacheArgumentError below 0 or for a hash given twice.
        """
        if num_mutable_blocks < 0:
            raise negative("num_mutable_blocks", num_mutable_blocks)
        if self._dirty or self.collected:
            self._settle()
        block_ids = self._states.match(block_hashes, namespace) if block_hashes else []
        num_hits = len(block_ids)
        if len(set(block_ids)) < num_hits:
            raise CacheArgumentError("a block hash is given twice; the hashes of one sequence differ")
        if num_mutable_blocks:
            self.require(num_mutable_blocks, block_ids, namespace)
        self._dirty = True
        self._states.hold(block_ids)
        if num_mutable_blocks:
            block_ids += self._states.take(num_mutable_blocks, namespace)
        allocation = Allocation(self, block_ids, num_hits, namespace)
        self._held[allocation.key] = block_ids
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

        A fresh block gets the hash, but is not hit, and loses the hash when it is freed, until `mark_computed`. It gets
        none where the digest belongs to other tokens (a collision of 256 bits) or to another namespace.

        Raises OutOfBlocksError, with nothing changed, and CacheArgumentError for a hash given twice, or held already.
        """
        block_ids, hashes = self._list_of(allocation), list(block_hashes)
        found = [self._states.find(block_hash, allocation.namespace) for block_hash in hashes]
        hits = [block_id for block_id in found if block_id is not None]
        if len(set(hashes)) < len(hashes) or not set(hits).isdisjoint(block_ids):
            raise CacheArgumentError("a block hash is given twice; the hashes of one sequence differ")
        self._extend(allocation, [each if hit is None else hit for each, hit in zip(hashes, found, strict=True)])

    def allocate_as(self, wanted: Sequence[int | BlockHash | None], namespace: bytes = b"") -> Allocation:
        """Hold the block of each id in `wanted`, which is in use or cached in this namespace, and a fresh block for
        each other entry; its hash awaits `mark_computed`, as in `allocate_immutable`.

        Raises OutOfBlocksError, with nothing changed.
        """
        allocation = self.allocate(namespace=namespace)
        self._extend(allocation, wanted)
        return allocation

    def _extend(self, allocation: Allocation, wanted: Sequence[int | BlockHash | None]) -> None:
        """Append one block for each entry of `wanted`, as `allocate_as` says."""
        block_ids, states = self._list_of(allocation), self._states
        named = [each for each in wanted if isinstance(each, int)]
        self.require(len(wanted) - len(named), named, allocation.namespace)
        self._dirty = True
        states.hold(named)
        fresh = iter(states.take(len(wanted) - len(named), allocation.namespace))
        added: list[int] = []
        for each in wanted:
            block_id = each if isinstance(each, int) else next(fresh)
            added.append(block_id)
            if isinstance(each, BlockHash) and each.digest not in states.blocks:
                states.set_hash(block_id, each, is_computed=False)
        block_ids.extend(added)
        self._dirty = False

    def fork(self, allocation: Allocation, num_blocks: int | None = None) -> Allocation:
        """Return a second holder of the same blocks, or of the first `num_blocks`. Takes no fresh block."""
        if num_blocks is not None and num_blocks < 0:
            raise negative("num_blocks", num_blocks)
        block_ids = self._list_of(allocation)[:num_blocks]
        self._dirty = True
        self._states.hold(block_ids)
        forked = Allocation(self, block_ids, min(allocation.num_prefix_blocks, len(block_ids)), allocation.namespace)
        self._held[forked.key] = block_ids
        self._dirty = False
        return forked

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

    def commit_many(self, allocation: Allocation, start: int, block_hashes: Iterable[BlockHash]) -> None:
        """Make full, written blocks immutable from logical index `start` on: give them their hashes, to be hit by.

        Another block may have a block's digest already. If it has the same tokens and is computed, it replaces the
        block in `block_ids`. If it is uncomputed, has other tokens, is of another namespace, or belongs to the same
        allocation, the block stays without a hash.

        Raises CacheArgumentError for more hashes than blocks, and BlockStateError if a block has another hash already.
        """
        block_ids, hashes, states = self._list_of(allocation), list(block_hashes), self._states
        if not 0 <= start <= start + len(hashes) <= len(block_ids):
            raise CacheArgumentError(f"{len(hashes)} blocks to commit from {start}; there are {len(block_ids)} blocks")
        new_ids = block_ids[start : start + len(hashes)]
        for own, block_hash in zip(new_ids, hashes, strict=True):
            if (has := states.hashes[own]) is not None and has[0] != block_hash[0]:
                raise BlockStateError(f"block {own} has another hash already; make it writable before it is written")
        replaced: list[int] = []
        held: set[int] = set()
        self._dirty = True
        for index, block_hash in enumerate(hashes):
            own, other = new_ids[index], states.blocks.get(block_hash[0])
            if other is None:
                states.set_hash(own, block_hash)
            elif other == own:
                states.uncomputed.discard(own)
            elif states.match((block_hash,), allocation.namespace) and other not in (held := held or set(block_ids)):
                held.add(other)
                replaced.append(own)
                new_ids[index] = other
        if replaced:
            states.hold(set(new_ids).difference(block_ids))
            states.drop(reversed(replaced))
            block_ids[start : start + len(new_ids)] = new_ids
        self._dirty = False

    def mark_computed(self, block_ids: Iterable[int]) -> None:
        """Let blocks of `allocate_immutable`, which are in use, be hit: their content is there."""
        self._settle()
        self._states.uncomputed.difference_update(block_ids)

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
        self._states.drop((source,))
        self._copies.append((source, destination))  # before the list: a copy too many does no harm, one too few does
        block_ids[block_index] = destination
        self._dirty = False

    def drop_copies(self, num_copies: int) -> None:
        """Forget the first `num_copies` of `pending_copies`, which were made."""
        del self._copies[:num_copies]

    def watch_evictions(self, on_evict: OnEvict) -> None:
        """Call `on_evict` from now on for each cached block that is handed out anew.

        Its content is there until the next write. If the change is interrupted, the block may stay.
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
        found = dict.fromkeys(self._states.find(block_hash, namespace) for block_hash in block_hashes)
        self._forget([block_id for block_id in found if block_id is not None])

    def forget_cached_blocks(self, namespace: bytes | None = None) -> None:
        """Free every cached block, of all namespaces or of one; blocks in use keep their hashes."""
        self._settle()
        self._forget(self._states.cached_blocks(namespace))

    def _forget(self, block_ids: list[int]) -> None:
        if block_ids:
            self._dirty = True
            self._states.forget(block_ids)
            self.version += 1
            self._dirty = False

    def reset_prefix_cache(self, num_blocks: int | None = None) -> None:
        """Forget every hash and start anew, with `num_blocks` blocks if given.

        Raises BlockStateError, with nothing changed, if blocks are in use, and CacheArgumentError below 2 blocks.
        """
        if self.num_blocks_in_use:
            raise BlockStateError(f"cannot reset: {self.num_blocks_in_use} blocks are in use; free their holders first")
        states = BlockStates(self.num_blocks if num_blocks is None else num_blocks)
        states.on_evict, states.num_evictions = self._states.on_evict, self._states.num_evictions
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
        if self._dirty or self.collected:
            self._settle()
        block_ids = self._held.get(allocation.key)
        if block_ids is None:
            raise BlockStateError(f"{allocation!r} has ref_count 0: it was freed, or is another allocator's")
        return block_ids

    def _check_id(self, block_id: int) -> None:
        """Settle, then raise CacheArgumentError if this is not the id of a block."""
        self._settle()
        if not 0 < block_id < self._states.num_blocks:
            raise CacheArgumentError(f"block {block_id} given; blocks are 1 to {self._states.num_blocks - 1}")
