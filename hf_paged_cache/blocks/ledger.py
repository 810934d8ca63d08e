"""Owns the record of who holds which block, and its repair. Refuses an allocation that it does not know.

The lists of the live allocations are the truth; states, queue and index (`BlockStates`) are derived from them and from
the blocks' own hashes. Every change first marks what is derived as dirty, changes the lists last and clears the mark.
After a Ctrl-C anywhere inside, the next operation finds the mark and derives it again: the change has happened or has not.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from weakref import ReferenceType

from ..errors import BlockStateError, CacheArgumentError, OutOfBlocksError
from .allocation import Allocation, num_blocks_of_ring
from .block_states import BlockStates
from .hashing import BlockHash, bytes_of, tokens_of


class BlockLedger:
    """Everything that can be asked of an allocator. Asking changes nothing.

    But every operation settles first: it repairs what was interrupted and takes back what collected allocations held.

    Args:
        num_blocks: at least 2, with the null block.
        block_size: tokens of a block, at least 1.

    Raises:
        CacheArgumentError: a size below that.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise CacheArgumentError(f"block_size is {block_size}; it must be at least 1 token")
        self.block_size = block_size
        self.collected: deque[ReferenceType[Allocation]] = deque()  # collected, blocks not yet taken back
        self._held: dict[ReferenceType[Allocation], list[int]] = {}  # live allocation -> its block ids
        self._states = BlockStates(num_blocks)
        self.num_lapses = 0  # how often blocks went without their holder's doing: collected, or forgotten
        self._dirty = False

    def __repr__(self) -> str:
        states = self._states
        return (
            f"{type(self).__name__}(num_blocks={states.num_blocks}, block_size={self.block_size}, "
            f"free={len(states.queue) - states.num_cached}, cached={states.num_cached})"
        )

    @property
    def num_blocks(self) -> int:
        """Size of the pool with the null block."""
        return self._states.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder and without a hash."""
        return self.num_available_blocks - self._states.num_cached

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a holder that a prefix can hit."""
        self._settle()
        return self._states.num_cached

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free and cached."""
        self._settle()
        return len(self._states.queue)

    @property
    def num_blocks_in_use(self) -> int:
        """Distinct blocks that somebody holds."""
        return self._states.num_blocks - 1 - self.num_available_blocks

    def num_cached_blocks_of(self, namespace: bytes) -> int:
        """`num_cached_blocks` of one namespace."""
        self._settle()
        return self._states.num_cached_of.get(namespace, 0)

    def num_blocks_in_use_of(self, namespace: bytes) -> int:
        """`num_blocks_in_use` of one namespace."""
        self._settle()
        return self._states.num_in_use_of.get(namespace, 0)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were handed out so far."""
        return self._states.num_evictions

    def holds(self, allocation: Allocation) -> bool:
        """Whether `allocation` is one of this allocator's and has not been freed."""
        self._settle()
        return allocation.key in self._held

    def allocations(self) -> list[Allocation]:
        """Those that live and have not been freed."""
        self._settle()
        return [allocation for key in self._held if (allocation := key()) is not None]

    def ref_count(self, block_id: int) -> int:
        """Number of allocations that hold a block."""
        self._check_ids((block_id,))
        return self._states.ref_counts[block_id]

    def ref_counts(self, block_ids: Collection[int]) -> list[int]:
        """The same of many blocks."""
        self._check_ids(block_ids)
        return [*map(self._states.ref_counts.__getitem__, block_ids)]

    def namespace_of(self, block_id: int) -> bytes:
        """Whose a block is that somebody holds or can hit."""
        self._check_ids((block_id,))
        return self._states.index.namespaces[block_id]

    def block_hash_of(self, block_id: int) -> BlockHash | None:
        """The hash of a block, computed or not, or None."""
        self._check_ids((block_id,))
        return self._states.index.hash_of(block_id)

    def digest_of(self, block_id: int) -> bytes | None:
        """The digest of a block that somebody holds, or None."""
        return self._states.index.digests[block_id]

    def namespace_of_digest(self, digest: bytes) -> bytes | None:
        """Whose the block with this digest is; None where no block has it."""
        block_id = self._states.index.blocks.get(digest)
        return None if block_id is None else self._states.index.namespaces[block_id]

    def hash_of_digest(self, digest: bytes) -> tuple[BlockHash, bytes] | None:
        """The hash and the namespace of the block with this digest; None where no block has it."""
        index = self._states.index
        block_id = index.blocks.get(digest)
        block_hash = None if block_id is None else index.hash_of(block_id)
        return None if block_id is None or block_hash is None else (block_hash, index.namespaces[block_id])

    def is_writable(self, block_id: int) -> bool:
        """Whether a block has one holder and no hash: only such a block may be written."""
        if self._dirty or self.collected:
            self._settle()
        states = self._states
        return states.ref_counts[block_id] == 1 and states.index.digests[block_id] is None

    def hashes(self, namespace: bytes = b"") -> dict[int, BlockHash]:
        """Block id -> hash, of all blocks of a namespace that a prefix can hit.  Cost: O(num_blocks)."""
        self._settle()
        index = self._states.index
        found = {
            block_id: index.hash_of(block_id) for block_id in index.blocks.values() if block_id not in index.uncomputed
        }
        return {
            block_id: block_hash
            for block_id, block_hash in found.items()
            if block_hash is not None and index.namespaces[block_id] == namespace
        }

    def match_prefix(self, block_hashes: Iterable[BlockHash], namespace: bytes = b"") -> list[int]:
        """Blocks of the longest leading run of hashes whose content is here, in this namespace.

        Effects: none; asks `block_hashes` for nothing after the first miss.
        """
        self._settle()
        return self._states.index.match(block_hashes, namespace)

    def continuations(self, parent: bytes, namespace: bytes = b"") -> list[array[int]]:
        """Tokens of the computed blocks straight behind the prefix with this digest, or behind a root.  Cost: O(num_blocks)."""
        self._settle()
        return [tokens_of(tokens) for tokens in self._states.index.continuations(parent, namespace)]

    def has_tokens(self, token_ids: array[int], namespace: bytes = b"") -> bool:
        """Whether a full block has these tokens, behind whatever prefix.  Cost: O(num_blocks)."""
        self._settle()
        return self._states.index.has_tokens(bytes_of(token_ids), namespace)

    def kinds_of_blocks(self, namespace: bytes | None = None) -> bytes:
        """Of each block but the null block, or of a namespace: 0 it is free, 1 cached, 2 in use.  Cost: O(num_blocks)."""
        self._settle()
        counts, index = self._states.ref_counts, self._states.index
        return bytes(
            2 if counts[block_id] else 0 if index.digests[block_id] is None else 1
            for block_id in range(1, self._states.num_blocks)
            if namespace is None
            or (index.namespaces[block_id] == namespace and (counts[block_id] or index.digests[block_id] is not None))
        )

    def get_common_computed_block_ids(self, allocations: Sequence[Allocation]) -> list[int]:
        """Leading computed blocks that all `allocations` hold at the same places."""
        self._settle()
        index = self._states.index
        common: list[int] = []
        for block_id, *others in zip(*(self._list_of(allocation) for allocation in allocations), strict=False):
            if index.digests[block_id] is None or block_id in index.uncomputed or others.count(block_id) < len(others):
                break
            common.append(block_id)
        return common

    def require(self, num_blocks: int, hits: Iterable[int] = (), namespace: bytes = b"") -> None:
        """Raises OutOfBlocksError unless `num_blocks` fresh blocks can be had beside `hits`.

        With the arithmetic, but for a namespace: it would tell what others hold.
        """
        self._settle()
        states = self._states
        ref_counts = states.ref_counts
        num_cached_hits = len([block_id for block_id in hits if not ref_counts[block_id]])
        if num_blocks + num_cached_hits > len(states.queue):
            of_all = (
                f"{len(states.queue) - states.num_cached} free + {states.num_cached} cached of {states.num_blocks - 1}"
            )
            raise OutOfBlocksError(
                f"need {num_blocks + num_cached_hits} blocks: {'there are fewer' if namespace else of_all}"
                + (f", {num_cached_hits} of them the prefix hit itself" if num_cached_hits else "")
                + "; free what is no longer needed or give the pool more blocks"
            )

    def snapshot(self) -> tuple[object, ...]:
        """A value that is equal while nothing has changed, the order of eviction included.  Cost: O(num_blocks)."""
        self._settle()
        states, index = self._states, self._states.index
        times = [time if index.digests[block_id] else 0 for block_id, time in enumerate(states.last_access)]
        hashes = [index.hash_of(block_id) for block_id in range(states.num_blocks)]
        lists = [list(block_ids) for block_ids in self._held.values()]
        counts, queue = states.ref_counts[:], list(states.queue)
        namespaces = dict(states.num_in_use_of), dict(states.num_cached_of)
        return counts, queue, times, states.num_evictions, hashes, set(index.uncomputed), lists, namespaces

    def check(self) -> None:
        """Prove the invariants, O(num_blocks):

        1. each block but the null block is in exactly one state, and the counts sum to num_blocks - 1;
        2. a block's ref_count is the number of live allocations that hold it;
        3. no allocation holds a block twice;
        4. index and hashes are inverse; cached blocks are computed and queued after the free ones, oldest first;
        5. all blocks of an allocation are of its namespace, and what is counted of each namespace is what there is;
        6. an allocation with a window holds the blocks of its ring, and none of them has a hash.

        Raises:
            BlockStateError: one does not hold; with the whole state.
        """
        self._settle()
        states, lists = self._states, list(self._held.values())
        try:
            states.check(lists)
            for key, block_ids in self._held.items():
                allocation = key()
                if allocation and any(states.index.namespaces[i] != allocation.namespace for i in block_ids):
                    raise BlockStateError(f"{allocation!r} has blocks of another namespace: {block_ids}")
                if allocation and allocation.num_tokens is not None and allocation.window is not None:
                    num_blocks = num_blocks_of_ring(allocation.num_tokens, allocation.window, self.block_size)
                    if len(block_ids) != num_blocks or any(states.index.digests[i] for i in block_ids):
                        raise BlockStateError(
                            f"{allocation!r} must hold {num_blocks} blocks without a hash: {block_ids}"
                        )
        except BlockStateError as error:
            hashes = {i: digest.hex()[:8] for i, digest in enumerate(states.index.digests) if digest is not None}
            raise BlockStateError(
                f"{error}\nallocations: {lists}\nref counts: {states.ref_counts}\nqueue: {list(states.queue)}, "
                f"{states.num_cached} cached\nhashes: {hashes}\nuncomputed: {sorted(states.index.uncomputed)}"
            ) from error

    def _settle(self) -> None:
        if self._dirty:
            self._states.rebuild(self._held.values())
            self._dirty = False
        collected = self.collected
        while collected:  # more may come in meanwhile, at the other end
            key = collected[0]
            try:
                block_ids = self._held.get(key)
            except TypeError:  # collected before it was registered; a dead reference cannot be hashed
                block_ids = None
            if block_ids is not None:
                self._dirty = True
                self._states.drop(reversed(block_ids))
                self.num_lapses += bool(block_ids)
                del self._held[key]
                self._dirty = False
            collected.popleft()

    def _list_of(self, allocation: Allocation) -> list[int]:
        """The registered list of a live allocation; settles, so that every change may begin with it."""
        self._settle()
        block_ids = self._held.get(allocation.key)
        if block_ids is None:
            raise BlockStateError(f"{allocation!r} has ref_count 0: it was freed, or is another allocator's")
        return block_ids

    def _windowless_list_of(self, allocation: Allocation) -> list[int]:
        """`_list_of`, for what hashes, adds or cuts blocks. Raises CacheArgumentError for an allocation with a window."""
        block_ids = self._list_of(allocation)
        if allocation.window is not None:
            raise CacheArgumentError(f"{allocation!r} is a ring; it keeps its length, and its blocks are never hashed")
        return block_ids

    def _check_ids(self, block_ids: Iterable[int]) -> None:
        """Settle; raises CacheArgumentError if one is no block."""
        self._settle()
        most = self._states.num_blocks
        for block_id in block_ids:
            if not 0 < block_id < most:
                raise CacheArgumentError(f"block {block_id} given; blocks are 1 to {most - 1}")
