"""Owns every change: blocks are taken, shared, hashed, copied on write and given back. Refuses a change that cannot finish.

`ledger` says how a change survives an interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import BlockStateError, CacheArgumentError
from .allocation import Allocation, num_blocks_of_ring
from .arguments import check_not_negative, int_of_at_least
from .block_states import BlockStates, OnEvict
from .hashing import BlockHash
from .ledger import BlockLedger


class PrefixCachingBlockAllocator(BlockLedger):
    """Hands out block ids, shares them by hash, and evicts the least recently used. Knows nothing of their content.

    Every operation finishes or changes nothing. Block 0 is the null block: never handed out, in no state. Not
    thread-safe: use one lock for the allocator and the content.

    Examples:
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=16)
        >>> allocation = allocator.allocate([], num_mutable_blocks=2)
        >>> allocation.block_ids, allocator.num_free_blocks
        ([1, 2], 1)
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_copies_on_write = 0
        self._copies: list[tuple[int, int]] = []  # (source, destination) in the order in which they must be made

    @property
    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """What `take_copies` would return. A copier that may be interrupted reads this and then calls `drop_copies`."""
        return tuple(self._copies)

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
        """Hold the prefix hit of `block_hashes`, then fresh blocks to write into. No block of the hit is evicted for them.

        Args:
            num_mutable_blocks: fresh blocks after the hit.
            num_blocks: in its place, the number of blocks with the hit; a longer hit is held whole.
            namespace: whose blocks they are; only blocks of the same are hit, and each is counted by itself.
            num_tokens, window: in place of hashes and numbers of blocks, a ring of fresh blocks for layers that see the
                last `window` of `num_tokens` tokens, `ceil(min(num_tokens, window) / block_size)`; see `Allocation`.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a negative number, or a hash given twice; one of `num_tokens` and `window` alone, no
                int or too small, or beside what they replace.
        """
        check_not_negative("num_mutable_blocks", num_mutable_blocks)
        if num_tokens is not None or window is not None:
            if block_hashes or num_mutable_blocks or num_blocks is not None:
                raise CacheArgumentError(
                    "block_hashes, num_mutable_blocks or num_blocks is given beside a window; its blocks follow from "
                    "num_tokens and window alone, and are never hashed"
                )
            num_tokens = int_of_at_least("num_tokens", num_tokens, 0, "positions in all, given with window")
            window = int_of_at_least("window", window, 1, "tokens that a layer sees, given with num_tokens")
            num_blocks = num_blocks_of_ring(num_tokens, window, self.block_size)
        hits = self.match_prefix(block_hashes, namespace)
        num_fresh = num_mutable_blocks if num_blocks is None else max(0, num_blocks - len(hits))
        if len(set(hits)) < len(hits):
            raise CacheArgumentError("a block hash is given twice; the hashes of one sequence differ")
        self.require(num_fresh, hits, namespace)
        states = self._states
        self._dirty = True
        states.hold(hits)
        block_ids = hits + states.take(num_fresh, namespace)
        allocation = Allocation(self, block_ids, len(hits), namespace, num_tokens, window)
        self._held[allocation.key] = block_ids
        self._dirty = False
        return allocation

    def allocate_mutable(self, allocation: Allocation, num_blocks: int) -> None:
        """Append fresh blocks. Raises OutOfBlocksError with nothing changed; CacheArgumentError for a negative number."""
        check_not_negative("num_blocks", num_blocks)
        block_ids = self._windowless_list_of(allocation)
        self.require(num_blocks, (), allocation.namespace)
        self._dirty = True
        block_ids.extend(self._states.take(num_blocks, allocation.namespace))
        self._dirty = False

    def allocate_immutable(self, allocation: Allocation, block_hashes: Iterable[BlockHash]) -> None:
        """Append the block of each hash: the one that has it, or a fresh one, which gets it and awaits `mark_computed`.

        Before `mark_computed` a fresh block is not hit, and loses its hash when freed. It gets no hash where the digest
        belongs to other tokens (a collision of 256 bits) or to another namespace.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a hash twice, or of a block that `allocation` holds.
        """
        block_ids, index, hashes = self._windowless_list_of(allocation), self._states.index, list(block_hashes)
        namespace = allocation.namespace
        found = [index.get(block_hash, namespace) for block_hash in hashes]
        hits = [block_id for block_id in found if block_id is not None]
        if len(set(hashes)) < len(hashes) or not set(hits).isdisjoint(block_ids):
            raise CacheArgumentError("a block hash is given twice; the hashes of one sequence differ")
        self.require(len(hashes) - len(hits), hits, namespace)
        self._dirty = True
        self._states.hold(hits)
        fresh = iter(self._states.take(len(hashes) - len(hits), namespace))
        added: list[int] = []
        for block_hash, hit in zip(hashes, found, strict=True):
            block_id = next(fresh) if hit is None else hit
            added.append(block_id)
            if hit is None and block_hash.digest not in index.blocks:
                index.insert(block_id, block_hash, computed=False)
        block_ids.extend(added)
        self._dirty = False

    def allocate_as(self, wanted: Sequence[int | BlockHash | None], namespace: bytes = b"") -> Allocation:
        """Hold blocks in this order: those that are named by their ids, and a fresh one for each other entry.

        A fresh block that is wanted with a hash gets it as from `allocate_immutable`, and awaits `mark_computed`.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: an id that is no block, or is given twice.
            BlockStateError: a block that is free, or of another namespace.
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
        num_fresh = len(wanted) - len(named)
        self.require(num_fresh, named, namespace)
        self._dirty = True
        self._states.hold(named)
        fresh = iter(self._states.take(num_fresh, namespace))
        block_ids: list[int] = []
        for each in wanted:
            block_id = each if isinstance(each, int) else next(fresh)
            block_ids.append(block_id)
            if isinstance(each, BlockHash) and each.digest not in index.blocks:
                index.insert(block_id, each, computed=False)
        allocation = Allocation(self, block_ids, 0, namespace)
        self._held[allocation.key] = block_ids
        self._dirty = False
        return allocation

    def fork(self, allocation: Allocation, num_blocks: int | None = None) -> Allocation:
        """A second holder of the same blocks, or of the first `num_blocks`. Takes no fresh block."""
        check_not_negative("num_blocks", num_blocks or 0)
        list_of = self._list_of if num_blocks is None else self._windowless_list_of
        block_ids = list_of(allocation)[:num_blocks]
        num_prefix_blocks = min(allocation.num_prefix_blocks, len(block_ids))
        namespace, num_tokens, window = allocation.namespace, allocation.num_tokens, allocation.window
        self._dirty = True
        self._states.hold(block_ids)
        forked = Allocation(self, block_ids, num_prefix_blocks, namespace, num_tokens, window)
        self._held[forked.key] = block_ids
        self._dirty = False
        return forked

    def truncate(self, allocation: Allocation, num_blocks: int) -> None:
        """Keep the first `num_blocks` blocks, free the last one first. Raises CacheArgumentError if fewer are held."""
        block_ids = self._windowless_list_of(allocation)
        if not 0 <= num_blocks <= len(block_ids):
            raise CacheArgumentError(f"cannot keep {num_blocks} blocks; give 0 to {len(block_ids)}, the number held")
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

    # Content: who may hit it and who may write it.

    def commit(self, allocation: Allocation, block_index: int, block_hash: BlockHash) -> bool:
        """`commit_many` of one block; whether an equal block has replaced it."""
        return self.commit_many(allocation, block_index, (block_hash,)) == 1

    def commit_many(self, allocation: Allocation, start: int, block_hashes: Iterable[BlockHash]) -> int:
        """Give full, written blocks their hashes, so that others hit them. A block may be committed again.

        What happens to a block whose digest another block has: a computed one with the same tokens replaces it; an
        uncomputed one gives it the hash; one with other tokens, of another namespace or of the same allocation leaves
        it without a hash.

        Args:
            start: logical index of the first block.

        Returns:
            The number of blocks replaced; `block_ids` has the new ids.

        Raises:
            CacheArgumentError: more hashes than blocks from `start`.
            BlockStateError: a block has another hash already.
        """
        block_ids, hashes = self._windowless_list_of(allocation), list(block_hashes)
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
        if replaced:
            states.hold(replaced.values())
            states.drop([block_ids[block_index] for block_index in reversed(replaced)])
            for block_index, other in replaced.items():
                own_ids[block_index - start] = other
            block_ids[start : start + len(own_ids)] = own_ids
        self._dirty = False
        return len(replaced)

    def mark_computed(self, block_ids: Iterable[int]) -> None:
        """Let blocks of `allocate_immutable` be hit: their content is there. One that has lost its hash is skipped.

        Raises BlockStateError if one is not in use.
        """
        computed = list(block_ids)
        self._check_ids(computed)
        for block_id in computed:
            if not self._states.ref_counts[block_id]:
                raise BlockStateError(f"block {block_id} marked computed with ref_count 0")
        self._states.index.uncomputed.difference_update(computed)

    def make_writable(self, allocation: Allocation, block_index: int) -> None:
        """Copy on write: replace the block by a fresh one, unless `is_writable`, and record the copy to be made.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: no such block.
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
        self.num_copies_on_write += 1
        self._copies.append((source, destination))  # before the list: a copy too many does no harm, one too few does
        block_ids[block_index] = destination
        self._dirty = False

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and forget the (source, destination) copies to be made before the next write.

        Make them in this order: a source may be an earlier destination, and a destination may come twice.
        """
        copies, self._copies = self._copies, []
        return copies

    def drop_copies(self, num_copies: int) -> None:
        """Forget the first `num_copies` of `pending_copies`: they were made."""
        del self._copies[:num_copies]

    def watch_evictions(self, on_evict: OnEvict) -> None:
        """From here on, tell of each cached block that is handed out for something else, just before it loses its hash.

        What it holds is there until the next write. A block may be told of that stays, where the change is interrupted.
        """
        self._states.on_evict = on_evict

    def mark_accessed(self, block_ids: Iterable[int]) -> None:
        """Evict cached blocks last, in the order given; ignores blocks in use. Raises BlockStateError for a free one."""
        touched = list(block_ids)
        self._check_ids(touched)
        states = self._states
        for block_id in touched:
            if not states.ref_counts[block_id] and states.index.digests[block_id] is None:
                raise BlockStateError(f"block {block_id} is free; only blocks in use or cached can be accessed")
        self._dirty = True
        states.touch(touched)
        self._dirty = False

    # The whole pool.

    def grow(self, num_blocks: int) -> None:
        """Raise the number of blocks; the new ones are handed out first. Raises CacheArgumentError for a lower number."""
        self._settle()
        if num_blocks < self.num_blocks:
            raise CacheArgumentError(f"cannot shrink to {num_blocks} blocks; give at least {self.num_blocks}")
        self._dirty = True
        self._states.grow(num_blocks)
        self._dirty = False

    def forget(self, block_hashes: Iterable[BlockHash], namespace: bytes = b"") -> None:
        """Let nobody hit the blocks of these hashes any more; those that nobody holds become free. Unknown ones are skipped."""
        self._settle()
        found = (self._states.index.get(block_hash, namespace) for block_hash in dict.fromkeys(block_hashes))
        block_ids = [block_id for block_id in found if block_id is not None]
        if block_ids:
            self._dirty = True
            self._states.forget(block_ids)
            self.num_lapses += 1
            self._dirty = False

    def forget_cached_blocks(self, namespace: bytes | None = None) -> None:
        """Make every cached block free, or every one of `namespace`; blocks in use keep their hashes."""
        self._settle()
        self._dirty = True
        self._states.forget(self._states.cached_blocks(namespace))
        self.num_lapses += 1
        self._dirty = False

    def reset_prefix_cache(self, num_blocks: int | None = None) -> None:
        """Forget every hash and start anew, with `num_blocks` blocks if given.

        Raises:
            BlockStateError: blocks are in use; nothing has changed.
            CacheArgumentError: `num_blocks` below 2.
        """
        if self.num_blocks_in_use:
            raise BlockStateError(f"cannot reset: {self.num_blocks_in_use} blocks are in use; free their holders first")
        states = BlockStates(self.num_blocks if num_blocks is None else num_blocks, self._states.on_evict)
        states.num_evictions = self.num_evictions
        self._copies.clear()
        self._states = states
