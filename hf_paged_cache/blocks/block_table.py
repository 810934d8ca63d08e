"""Owns the tokens and blocks of one sequence. Refuses to write a token into a block that others read.

Ranges, in tokens: `[0, num_committed_blocks * block_size)` hashed, read only | `[.., num_tokens)` ours or shared with
forks, copied on write | `[num_tokens, num_slots)` empty, ours alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from ..errors import BlockStateError, CacheArgumentError, OutOfBlocksError
from .allocator import Allocation, PrefixCachingBlockAllocator, Resumption
from .arguments import negative
from .groups import Changing, WindowBlocks, resumable
from .hashing import BlockHash, HashChain, token_array


class BlockTable:
    """`BlockTable` holds one sequence: its tokens, their blocks, and how many of these blocks are committed.

    A token in the table may not have been written yet: the caller commits what was computed. Every method finishes or
    changes nothing. The blocks are given back by `free()`, on leaving a `with`, or when the table is collected. Of
    layers with a window, a table needs what they see where it may resume, see `release_passed`, and all from there on.

    Args:
        root, extra_keys: see `HashChain`.
        namespace: see `PrefixCachingBlockAllocator.allocate`.
        groups: groups of the layers with a window, one group for each window.

    Attributes:
        allocation: holder of the table's blocks; only the table changes it.
        num_committed_blocks: number of leading blocks that were hit or committed.

    Examples:
        >>> from . import PrefixCachingBlockAllocator, root_hash
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=2)
        >>> table = BlockTable(allocator, root_hash(b"model"))
        >>> table.allocate([1, 2, 3]), table.block_ids  # tokens hit, blocks held
        (0, [1, 2])
        >>> len(table.commit_full_blocks(3))
        1
        >>> BlockTable(allocator, root_hash(b"model")).allocate([1, 2, 9])
        2
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        root: bytes,
        extra_keys: Callable[[int], bytes] | None = None,
        *,
        namespace: bytes = b"",
        groups: Sequence[WindowBlocks] = (),
    ) -> None:
        self._allocator, self._block_size = allocator, allocator.block_size
        self._chain = HashChain(root, allocator.block_size, (), extra_keys)
        self.allocation: Allocation = allocator.allocate(namespace=namespace)
        self.groups = groups
        self.num_committed_blocks = 0

    def __repr__(self) -> str:
        return (
            f"BlockTable(num_tokens={self.num_tokens}, num_blocks={len(self.block_ids)}, "
            f"num_committed_blocks={self.num_committed_blocks}, num_cached_tokens={self.num_cached_tokens})"
        )

    @property
    def namespace(self) -> bytes:
        """Namespace of the table's blocks."""
        return self.allocation.namespace

    @property
    def block_ids(self) -> list[int]:
        """Map of logical block index -> block id, as a list; read only."""
        return self.allocation.block_ids

    @property
    def token_ids(self) -> array[int]:
        """Map of position -> token id, as an array; read only."""
        return self._chain.token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens, written or not."""
        return len(self._chain.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that were hit when the table was filled and are still in it."""
        return min(self.allocation.num_prefix_blocks * self._block_size, self.num_tokens)

    @property
    def num_empty_slots(self) -> int:
        """Number of tokens that can be appended without a further block, except to copy the last one on write."""
        return len(self.block_ids) * self._block_size - self.num_tokens

    def allocate(self, token_ids: Iterable[int], num_lookahead_slots: int = 0) -> int:
        """Fill an empty table: hold the longest prefix hit, and fresh blocks for the other tokens and the lookahead.

        A hit may cover all of `token_ids`; a caller that needs logits then computes the last token without writing it.

        Returns:
            Number of tokens hit, a multiple of block_size.

        Raises:
            OutOfBlocksError: nothing has changed.
            BlockStateError: the table is not empty, or was freed.
            CacheArgumentError: a token that is no 64-bit integer, or a negative lookahead.
        """
        if num_lookahead_slots < 0:
            raise negative("num_lookahead_slots", num_lookahead_slots)
        tokens = token_array(token_ids)
        num_hit = self.hold_prefix(tokens)
        try:
            self.append_tokens(tokens[num_hit:], num_lookahead_slots)
        except OutOfBlocksError:
            self.truncate(0)
            raise
        return num_hit

    def hold_prefix(self, token_ids: Iterable[int]) -> int:
        """Fill an empty table with the longest prefix hit after which every window can resume; see `allocate`."""
        chain = HashChain(self._chain.root, self._block_size, token_array(token_ids), self._chain.extra_keys)
        if self._chain.token_ids or self.block_ids or self.allocation.is_freed:
            raise BlockStateError(f"{self!r} is not empty, or was freed; only a fresh table is filled")
        hashes = chain.hashes_of()
        with Changing(self.groups):
            if self.groups:
                matched = self._allocator.match_prefix(hashes, self.namespace)
                num_tokens = resumable(self.groups, matched, len(matched) * self._block_size)
                hashes = hashes[: num_tokens // self._block_size]
            allocation = self._allocator.allocate(hashes, namespace=self.namespace)
            num_hit = allocation.num_prefix_blocks * self._block_size
            chain.truncate(num_hit)
            if self.groups:
                allocation.resumption = Resumption(num_hit, num_hit)
            self.num_committed_blocks = allocation.num_prefix_blocks
            self.allocation = allocation
            self._chain = chain
            for group in self.groups:
                group.hold(allocation.block_ids[index] for index in group.seen(num_hit))
        return num_hit

    def append_tokens(self, token_ids: Sequence[int] | array[int], num_lookahead_slots: int = 0) -> None:
        """Append tokens, with a writable slot for each token and for the lookahead.

        A block that others hold, or that has a hash, is copied on write: see `pending_copies`, `WindowBlocks.copies`.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a token that is no 64-bit integer, a negative lookahead, or a window lacks what
                it needs to go on.
        """
        if num_lookahead_slots < 0:
            raise negative("num_lookahead_slots", num_lookahead_slots)
        tokens = token_array(token_ids)
        if not tokens and not num_lookahead_slots:
            return
        shared, num_fresh = self._blocks_to_take(len(tokens) + num_lookahead_slots)
        if shared:
            self._allocator.require(len(shared) + num_fresh, (), self.namespace)
        first, stop = self.num_tokens // self._block_size, self.num_tokens + len(tokens)
        end, num_held, start = -(-stop // self._block_size), len(self.block_ids), self._resumption.start
        with Changing(self.groups):
            self._check_windows(self.num_tokens)
            sources = [(self.block_ids[index], index) for index in shared]
            written = self.block_ids[first + len(shared) : end]
            for group in self.groups:
                num_needed = group.num_to_take(written) + len(shared) + max(0, end - num_held)
                group.require(num_needed, self.namespace)
            if self.groups and shared:  # until its window blocks are copied, too, nobody resumes from a block
                self.allocation.resumption = Resumption(start, shared[0] * self._block_size)
            for index in shared:
                self._allocator.make_writable(self.allocation, index)
            if num_fresh:
                self._allocator.allocate_mutable(self.allocation, num_fresh)
            for group in self.groups:
                for source, index in sources:
                    group.copy(source, self.block_ids[index])
                group.attach(self.block_ids[first:end])
            if self.groups:
                self.allocation.resumption = Resumption(start, stop)
        self._chain.token_ids.extend(tokens)

    def append_token(self, token_id: int) -> int:
        """Append one token, as `append_tokens` does, and return its slot."""
        self.append_tokens((token_id,))
        return self.slots(self.num_tokens - 1, self.num_tokens)[0]

    def num_new_blocks_for_append(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` more tokens would take: fresh ones and copies on write."""
        shared, num_fresh = self._blocks_to_take(num_tokens)
        return len(shared) + num_fresh

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slot of each position in `[start, stop)`; see `Allocation.slots`."""
        return self.allocation.slots(start, stop)

    def writable_slots(self, start: int, stop: int) -> list[int]:
        """Return the `slots` of positions that are about to be written.

        Raises BlockStateError if a slot lies in a block that others hold or can hit.
        """
        slots = self.allocation.slots(start, stop)
        for index in range(start // self._block_size, -(-stop // self._block_size)) if slots else ():
            block_id = self.block_ids[index]
            if not self._allocator.is_writable(block_id):
                raise BlockStateError(
                    f"positions {start} to {stop - 1} would be written into block {block_id}, "
                    "which others hold or can hit"
                )
        return slots

    def commit_full_blocks(self, num_computed_tokens: int) -> Sequence[BlockHash]:
        """Let others hit every full block of the first `num_computed_tokens` tokens; return the hashes committed now.

        A block that is known already takes the place of the table's own, so `block_ids` may change. With windows, the
        table's own block has what the window shows, and so becomes the one that is known.

        Raises CacheArgumentError if `num_computed_tokens` is negative or above `num_tokens`.
        """
        if not 0 <= num_computed_tokens <= self.num_tokens:
            raise CacheArgumentError(f"{num_computed_tokens} tokens computed; the table has {self.num_tokens}")
        start, stop = self.num_committed_blocks, num_computed_tokens // self._block_size
        if start >= stop:
            return ()
        hashes = self._chain.hashes_of(start, stop)
        if self.groups:
            own = self.block_ids[start:stop]
            known = [self._allocator.match_prefix((each,), self.namespace) for each in hashes]
            others = [each for each, found, at in zip(hashes, known, own, strict=True) if found and found != [at]]
            self._allocator.forget(others, self.namespace)
        self._allocator.commit_many(self.allocation, start, hashes)
        self.num_committed_blocks = stop
        return hashes

    def num_resumable_tokens(self, num_tokens: int) -> int:
        """Return the most tokens, up to `num_tokens`, after which each window has all blocks that it sees."""
        for group in self.groups:
            group.settle()
        return resumable(self.groups, self.block_ids, num_tokens)

    def release_passed(self, num_tokens: int | None = None) -> None:
        """Say that the sequence resumes after `num_tokens` tokens (None: all) or more: windows have passed the rest.

        Blocks that are to be hit are committed before. Only layers with a window need this.
        """
        if self.groups:
            start = self.num_tokens if num_tokens is None else max(self._resumption.start, num_tokens)
            with Changing(self.groups):
                self._need(Resumption(start, self.num_tokens), self.block_ids)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and their blocks; a committed block that is cut is copied on write.

        Raises:
            CacheArgumentError: `num_tokens` is negative or above the number of tokens, or a window lacks what it needs
                to resume there: see `num_resumable_tokens`.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise CacheArgumentError(f"cannot keep {num_tokens} tokens; give 0 to {self.num_tokens}, what there is")
        with Changing(self.groups):
            self._check_windows(num_tokens)
            before, old = list(self.block_ids) if self.groups else (), self._resumption
            start = min(old.start, num_tokens)
            if self.groups:  # if this is interrupted, the table needs too much, never too little
                self.allocation.resumption = Resumption(start, old.stop)
            self.num_committed_blocks = min(self.num_committed_blocks, num_tokens // self._block_size)
            self._chain.truncate(num_tokens)
            self._allocator.truncate(self.allocation, -(-num_tokens // self._block_size))
            if self.groups:
                self._need(Resumption(start, num_tokens), before)

    def fork(self) -> BlockTable:
        """Return a second table with the same tokens in the same blocks; blocks without tokens are not shared."""
        forked = object.__new__(type(self))
        forked._allocator, forked._block_size = self._allocator, self._block_size
        forked._chain = self._chain.continued(self._chain.token_ids)
        forked.allocation = self._allocator.fork(self.allocation, -(-self.num_tokens // self._block_size))
        forked.num_committed_blocks, forked.groups = self.num_committed_blocks, self.groups
        forked.allocation.resumption = self.allocation.resumption
        return forked

    def move_to(self, allocation: Allocation) -> None:
        """Let the tokens lie in the blocks of `allocation`; the caller gives the previous blocks back."""
        self.allocation, self._allocator = allocation, allocation.allocator

    def free(self) -> None:
        """Give all blocks back; the table is not used again. Raises BlockStateError the second time."""
        with Changing(self.groups):
            held = list(self.block_ids) if self.groups else ()
            self._allocator.free(self.allocation)
            for group in self.groups:
                group.leave(held, self._resumption)
        self.num_committed_blocks = 0
        self._chain.truncate(0)

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.allocation.is_freed:
            self.free()

    @property
    def _resumption(self) -> Resumption:
        return self.allocation.resumption or Resumption(0, 0)

    def _blocks_to_take(self, num_slots: int) -> tuple[list[int], int]:
        """Return what more slots take: logical indices of blocks to copy on write, and the number of fresh blocks."""
        if not num_slots:
            return [], 0
        block_ids, start = self.allocation.block_ids, len(self._chain.token_ids)
        stop, num_held = -(-(start + num_slots) // self._block_size), len(block_ids)
        held = range(start // self._block_size, min(stop, num_held))
        return [i for i in held if not self._allocator.is_writable(block_ids[i])], max(0, stop - num_held)

    def _check_windows(self, num_tokens: int) -> None:
        """Raise CacheArgumentError unless each window has what it needs to resume after `num_tokens` tokens."""
        most = resumable(self.groups, self.block_ids, num_tokens)
        if most < num_tokens:
            raise CacheArgumentError(
                f"{self!r} cannot resume after {num_tokens} tokens, which a window has passed; truncate it to {most}"
            )

    def _need(self, new: Resumption, before: Sequence[int]) -> None:
        """Hold the window blocks that `new` needs, and release others, those of blocks that were cut off, too."""
        old, block_ids = self._resumption, self.block_ids
        self.allocation.resumption = new
        for group in self.groups:
            needed = group.span(*new)
            group.hold(block_ids[needed.start : needed.stop])
            span = group.span(*old)
            group.release(block_ids[span.start : needed.start], num_own=1, is_end=False)
            group.release(before[max(needed.stop, span.start) : span.stop], num_own=0, is_end=True)
