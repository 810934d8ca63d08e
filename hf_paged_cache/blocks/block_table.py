"""Owns the tokens and blocks of one sequence. Refuses to write a token into a block that others read.

Ranges, in tokens: `[0, num_committed_blocks * block_size)` hashed, read only | `[.., num_tokens)` ours or shared with
forks, copied on write | `[num_tokens, num_slots)` empty, ours alone.

Ranges in a group of layers with the window W, for a sequence that resumes after n tokens: `[0, n - W + 1)` passed, its
blocks may have window blocks until somebody else takes them | `[n - W + 1, n)` needed; see `Resumption`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from ..errors import BlockStateError, CacheArgumentError, OutOfBlocksError
from .allocation import Allocation, Resumption
from .allocator import PrefixCachingBlockAllocator
from .arguments import negative
from .groups import resumable
from .hashing import BlockHash, HashChain, token_array
from .image_tokens import WholeImages, whole_images
from .window_blocks import Changing, WindowBlocks


class PrefixMatch(NamedTuple):
    """`PrefixMatch` says what a table would hold of a prefix."""

    block_ids: list[int]
    num_tokens: int  # tokens of the prefix in these blocks
    num_matched_tokens: int  # tokens of all blocks known: more where a window cannot resume after all of them


class BlockTable:
    """`BlockTable` holds one sequence: its tokens, their blocks, and how many of these blocks are committed.

    A token in the table may not have been written yet: the caller commits what was computed. Every method finishes or
    changes nothing. The blocks are given back by `free()`, on leaving a `with`, or when the table is collected.

    Args:
        root, extra_keys: see `HashChain`.
        namespace: see `PrefixCachingBlockAllocator.allocate`.
        groups: groups of the layers with a window, one group for each window.

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

    __slots__ = (
        "__weakref__",
        "_allocation",
        "_allocator",
        "_block_size",
        "_chain",
        "_end",
        "_num_committed",
        "_num_hit",
        "_num_matched",
        "groups",
    )

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        root: bytes,
        extra_keys: Callable[[int], bytes] | None = None,
        *,
        namespace: bytes = b"",
        groups: Sequence[WindowBlocks] = (),
    ) -> None:
        self._allocator = allocator
        self._block_size = allocator.block_size
        self._chain = HashChain(root, allocator.block_size, extra_keys)
        self._allocation: Allocation = allocator.allocate(namespace=namespace)
        self.groups = groups
        self._num_committed = 0
        self._num_hit = self._num_matched = 0  # numbers of tokens when the table was filled
        self._end = 0  # number of tokens at the end of the last forward that `release_passed` was told of

    def __repr__(self) -> str:
        return (
            f"BlockTable(num_tokens={self.num_tokens}, num_blocks={len(self.block_ids)}, "
            f"num_committed_blocks={self._num_committed}, num_cached_tokens={self.num_cached_tokens})"
        )

    def __len__(self) -> int:
        """Return the number of tokens, as `num_tokens`."""
        return len(self._chain.token_ids)

    def __bool__(self) -> bool:
        """Return True, also for a table without tokens."""
        return True

    @property
    def allocation(self) -> Allocation:
        """Holder of the table's blocks; only the table changes it."""
        return self._allocation

    @property
    def root(self) -> bytes:
        """Parent of the first block's hash."""
        return self._chain.root

    @property
    def namespace(self) -> bytes:
        """Namespace of the table's blocks."""
        return self._allocation.namespace

    @property
    def block_ids(self) -> list[int]:
        """Map of logical block index -> block id, as a list; read only."""
        return self._allocation.block_ids

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
        return min(self._allocation.num_prefix_tokens, len(self._chain.token_ids))

    @property
    def num_matched_tokens(self) -> int:
        """Number of tokens in the blocks that the hit found.

        It is larger than the number of tokens held where a window cannot resume after all of them.
        """
        return self._num_matched

    @property
    def num_committed_blocks(self) -> int:
        """Number of leading blocks that were hit or committed."""
        return self._num_committed

    @property
    def _resumption(self) -> Resumption:
        return self._allocation.resumption or Resumption.at(0)

    @property
    def num_slots(self) -> int:
        """Number of tokens that fit into the blocks held."""
        return self._allocation.num_slots

    @property
    def num_empty_slots(self) -> int:
        """Number of tokens that can be appended without a further block, except to copy the last one on write."""
        return self._allocation.num_slots - len(self._chain.token_ids)

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
        if not self.groups:
            return self._fill(self._chain_of(token_ids), num_lookahead_slots)
        tokens = token_array(token_ids)
        num_hit = self.hold_prefix(tokens)
        try:
            self.append_tokens(tokens[num_hit:], num_lookahead_slots)
        except OutOfBlocksError:
            self.truncate(0)
            raise
        return num_hit

    def hold_prefix(self, token_ids: Iterable[int]) -> int:
        """Fill an empty table with the longest prefix hit after which every window can resume, and with no other token.

        Takes no fresh block.

        Returns and raises as `allocate` does, but cannot run out of blocks.
        """
        return self._fill(self._chain_of(token_ids), None)

    def match_prefix(self, token_ids: Iterable[int]) -> PrefixMatch:
        """Return what `hold_prefix` would hold now.  Effects: none; the order of eviction stays as it is."""
        chain = self._chain_of(token_ids)
        matched = self._allocator.match_prefix(chain.hashes(), self.namespace)
        num_matched = len(matched) * self._block_size
        num_tokens = resumable((*self.groups, WholeImages(chain.token_ids)), matched, num_matched)
        return PrefixMatch(matched[: -(-num_tokens // self._block_size)], num_tokens, num_matched)

    def _chain_of(self, token_ids: Iterable[int]) -> HashChain:
        chain = HashChain(self._chain.root, self._block_size, self._chain.extra_keys)
        chain.extend(token_ids)
        return chain

    def _fill(self, chain: HashChain, num_lookahead_slots: int | None) -> int:
        """Fill the table as `allocate` does, or, if `num_lookahead_slots` is None, as `hold_prefix` does."""
        if self._chain.token_ids or self._allocation.block_ids or self._allocation.is_freed:
            raise BlockStateError(f"{self!r} is not empty, or was freed; only a fresh table is filled")
        hashes, num_blocks, allocator = chain.hashes(), None, self._allocator
        if self.groups:
            for group in self.groups:
                group.settle()
            matched = allocator.match_prefix(hashes, self.namespace)
            self._num_matched = len(matched) * self._block_size
            hashes = islice(chain.hashes(), resumable(self.groups, matched, self._num_matched) // self._block_size)
        if num_lookahead_slots is not None:
            num_blocks = -(-(len(chain) + num_lookahead_slots) // self._block_size)
        allocation = allocator.allocate(hashes, num_blocks=num_blocks, namespace=self.namespace)
        self._num_hit = num_hit = allocation.num_prefix_tokens
        if num_lookahead_slots is None and num_hit < len(chain.token_ids):
            chain.truncate(num_hit)
        self._num_committed = allocation.num_prefix_blocks
        self._allocation = allocation
        self._chain = chain
        self._num_matched = max(self._num_matched, num_hit)
        if self.groups:
            self._resume(Resumption.at(num_hit))
        return num_hit

    def append_tokens(
        self, token_ids: Sequence[int] | array[int], num_lookahead_slots: int = 0, *, cut: int | None = None
    ) -> None:
        """Append tokens, with a writable slot for each token and for the lookahead.

        A block that others hold, or that has a hash, is copied on write: see `PrefixCachingBlockAllocator.take_copies`.

        Args:
            cut: least number of tokens to which the table may be cut until more are appended; None: the number that it
                has after this call. Without windows, the table may be cut to any number.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a token that is no 64-bit integer, or a negative lookahead.
        """
        if num_lookahead_slots < 0:
            raise negative("num_lookahead_slots", num_lookahead_slots)
        tokens = token_array(token_ids)
        num_slots = len(tokens) + num_lookahead_slots
        if self.groups:
            before, start = self._resumption, self.num_tokens
            stop = start + len(tokens)
            cut = stop if cut is None else max(start, min(cut, stop))
            self._take_for(Resumption(min(before.start, start), min(before.first, start), cut, stop), num_slots)
        else:
            self._take(num_slots)
        self._chain.token_ids.extend(tokens)

    def append_in_place(self, token_id: int) -> int | None:
        """Append one token, an integer of 64 bits, and return its slot; this is the common case of a decode step.

        Returns None, with nothing changed, where the token begins a block, even one that the table has already, or
        where its block may not be written.
        """
        token_ids, block_size = self._chain.token_ids, self._block_size
        block_index, offset = divmod(len(token_ids), block_size)
        block_ids = self._allocation.block_ids
        if not offset or not self._allocator.is_writable(block_ids[block_index]):
            return None
        token_ids.append(token_id)
        return block_ids[block_index] * block_size + offset

    def append_token(self, token_id: int) -> int:
        """Append one token, an integer of 64 bits, and return its slot.

        The block that the token needs, or a copy on write of its block, is taken first.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        token_ids, block_ids, block_size = self._chain.token_ids, self._allocation.block_ids, self._block_size
        start = len(token_ids)
        block_index, offset = divmod(start, block_size)
        if self.groups:
            self._take_for(Resumption(start, start, start, start + 1), 1)
        elif block_index < len(block_ids):
            self._allocator.make_writable(self._allocation, block_index)
        else:
            self._allocator.allocate_mutable(self._allocation, 1)
        token_ids.append(token_id)
        return block_ids[block_index] * block_size + offset

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        """Have at least `num_empty_slots` writable empty slots, by a copy on write and then by fresh blocks.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a negative number.
        """
        if num_empty_slots < 0:
            raise negative("num_empty_slots", num_empty_slots)
        self.append_tokens((), num_empty_slots)

    def num_new_blocks_for_append(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` more tokens would take: fresh ones and copies on write.

        Effects: none.
        """
        if num_tokens < 0:
            raise negative("num_tokens", num_tokens)
        shared, num_fresh = self._blocks_to_take(num_tokens)
        return len(shared) + num_fresh

    def slots(self, start: int, stop: int) -> list[int]:
        return self._allocation.slots(start, stop)

    def writable_block(self, start: int, stop: int, num_holders: int = 1) -> tuple[int, int]:
        """Return the block of positions `[start, stop)`, about to be written, and the offset of `start` in it.

        Args:
            num_holders: number of tables that hold the block, this one included, and that have the same to write there.

        Raises:
            BlockStateError: others hold the block or can hit it, or the positions do not lie in one block.
        """
        block_index, offset = divmod(start, self._block_size)
        block_ids = self._allocation.block_ids
        if not start < stop <= (block_index + 1) * self._block_size or block_index >= len(block_ids):
            raise BlockStateError(f"positions {start} to {stop - 1} of a table do not lie in one of its blocks")
        block_id = block_ids[block_index]
        self._check_writable(block_id, start, stop, num_holders)
        return block_id, offset

    def writable_slots(self, start: int, stop: int) -> list[int]:
        """Return the `slots` of positions that are about to be written.

        Raises:
            BlockStateError: a slot lies in a block that others hold or can hit.
            CacheArgumentError: as `slots`.
        """
        slots = self._allocation.slots(start, stop)
        for index in range(start // self._block_size, -(-stop // self._block_size)) if slots else ():
            self._check_writable(self._allocation.block_ids[index], start, stop)
        return slots

    def _check_writable(self, block_id: int, start: int, stop: int, num_holders: int = 1) -> None:
        if not self._allocator.is_writable(block_id, num_holders):
            raise BlockStateError(
                f"positions {start} to {stop - 1} would be written into block {block_id}, which others hold or can hit"
            )

    def unseen_token_ids(self, sequence: Sequence[int] | array[int]) -> array[int]:
        """Return the tokens of `sequence` that come after the table's tokens.

        Raises:
            CacheArgumentError: `sequence` does not start with the table's tokens.
        """
        tokens = token_array(sequence)
        if tokens[: self.num_tokens] != self._chain.token_ids:
            raise CacheArgumentError(
                f"a sequence of {len(tokens)} tokens does not start with the table's {self.num_tokens}"
            )
        return tokens[self.num_tokens :]

    def commit_full_blocks(self, num_computed_tokens: int) -> Sequence[BlockHash]:
        """Let others hit every full block of the first `num_computed_tokens` tokens; `block_ids` may change.

        Returns:
            Hashes of the blocks that this call has committed.

        Raises:
            CacheArgumentError: `num_computed_tokens` is negative or above `num_tokens`.
        """
        most = len(self._chain.token_ids)
        if not 0 <= num_computed_tokens <= most:
            raise CacheArgumentError(f"{num_computed_tokens} tokens computed; the table has {most}")
        start, stop = self._num_committed, num_computed_tokens // self._block_size
        if start >= stop:
            return ()
        hashes = self._chain.hashes_of(start, stop)
        if self.groups:
            return self._commit_in_groups(start, hashes)
        self._allocator.commit_many(self._allocation, start, hashes)
        self._num_committed = stop
        return hashes

    def num_resumable_tokens(self, num_tokens: int, token_ids: array[int] | None = None) -> int:
        """Return the most tokens, up to `num_tokens`, after which the sequence can resume.

        No image is cut there, and each window has all blocks that it sees.

        Args:
            token_ids: tokens of the sequence, also those after the table's: an image may go on in them.
        """
        tokens = self._chain.token_ids if token_ids is None else token_ids
        if not self.groups:
            return whole_images(tokens, num_tokens)
        return resumable((*self.groups, WholeImages(tokens)), self._allocation.block_ids, num_tokens)

    def hold_window(self, num_tokens: int) -> None:
        """Mark as needed the window blocks that a forward after `num_tokens` tokens reads, and all that follow.

        Only layers with a window need this.
        """
        if self.groups:
            self._resume(Resumption(num_tokens, *(max(number, num_tokens) for number in self._resumption[1:])))

    def release_passed(self) -> None:
        """Release the window blocks that only the last forward, which has returned, had to read.

        Only layers with a window need this.
        """
        if not self.groups:
            return
        _, _, cut, self._end = self._resumption
        self._resume(Resumption(cut, cut, cut, self._end))

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and their blocks; a committed block that is cut is copied on write.

        A window may lack what it needs to resume after `num_tokens` tokens: see `num_resumable_tokens`.

        Raises:
            CacheArgumentError: `num_tokens` is negative or above the number of tokens.
        """
        most = len(self._chain.token_ids)
        if not 0 <= num_tokens <= most:
            raise CacheArgumentError(f"cannot keep {num_tokens} tokens; give 0 to {most}, what there is")
        if not self.groups:
            self._cut(num_tokens)
            return
        with Changing(self.groups):
            before, stop = list(self.block_ids), self._resumption.stop
            shorter = Resumption(*(min(number, num_tokens) for number in self._resumption))
            # If this is interrupted, the table needs too much, never too little.
            self._allocation.resumption = shorter._replace(stop=stop)
            self._cut(num_tokens)
            self._end = min(self._end, num_tokens)
            self._need(shorter._replace(stop=num_tokens), before)

    def _cut(self, num_tokens: int) -> None:
        self._num_committed = min(self._num_committed, num_tokens // self._block_size)
        self._chain.truncate(num_tokens)
        self._allocator.truncate(self._allocation, -(-num_tokens // self._block_size))

    def fork(self) -> BlockTable:
        """Return a second table with the same tokens in the same blocks; blocks without tokens are not shared."""
        return self._forked(self._allocator.fork(self._allocation, self._num_blocks_of_tokens))

    @property
    def _num_blocks_of_tokens(self) -> int:
        return -(-len(self._chain.token_ids) // self._block_size)

    def _forked(self, allocation: Allocation) -> BlockTable:
        """Return a table of the same tokens, whose blocks `allocation` holds."""
        forked = object.__new__(type(self))
        forked._allocator = self._allocator
        forked._block_size = self._block_size
        forked._chain = self._chain.copy()
        forked._allocation = allocation
        forked._num_committed, forked.groups, forked._end = self._num_committed, self.groups, self._end
        forked._num_hit, forked._num_matched = self._num_hit, self._num_matched
        forked._allocation.resumption = self._allocation.resumption
        return forked

    def move_to(self, allocator: PrefixCachingBlockAllocator, allocation: Allocation) -> None:
        """Let the tokens lie in the blocks of `allocation` from now on, which may be another allocator's.

        The caller gives the previous blocks back. If the move is interrupted, repeat it before the table is used.
        """
        self._allocation = allocation
        self._allocator = allocator

    def free(self) -> None:
        """Give all blocks back; the table is not used again. Raises BlockStateError the second time."""
        if not self.groups:
            self._allocator.free(self._allocation)
        else:
            with Changing(self.groups):
                held = list(self.block_ids)
                self._allocator.free(self._allocation)
                for group in self.groups:
                    group.leave(held, self._resumption)
        self._num_committed = 0
        self._chain.truncate(0)

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._allocation.is_freed:
            self.free()

    def _blocks_to_take(self, num_tokens: int) -> tuple[list[int], int]:
        """Return what more tokens take: logical indices of blocks to copy on write, and the number of fresh blocks."""
        if not num_tokens:
            return [], 0
        block_ids, start = self._allocation.block_ids, len(self._chain.token_ids)
        first = start // self._block_size
        last = -(-(start + num_tokens) // self._block_size)
        held = range(first, min(last, len(block_ids)))
        shared = [i for i in held if not self._allocator.is_writable(block_ids[i])]
        return shared, max(0, last - len(block_ids))

    def _take(self, num_slots: int) -> None:
        """Have `num_slots` empty slots that may be written.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        shared, num_fresh = self._blocks_to_take(num_slots)
        if shared:
            self._allocator.require(len(shared) + num_fresh, (), self.namespace)
        for block_index in shared:
            self._allocator.make_writable(self._allocation, block_index)
        if num_fresh:
            self._allocator.allocate_mutable(self._allocation, num_fresh)

    # Groups of layers with a window.

    def _resume(self, new: Resumption) -> None:
        """Mark as needed the window blocks that `new` says, and release those that are needed no more."""
        with Changing(self.groups):
            self._need(new)

    def _need(self, new: Resumption, before: Sequence[int] = ()) -> None:
        """Do what `_resume` does, inside of a change.

        Args:
            before: blocks of the table before some were cut off; empty if none were.
        """
        old, block_ids = self._resumption, self.block_ids
        self._allocation.resumption = new
        for group in self.groups:
            seen, kept = group.needed_of(new)
            for span in (seen, kept):
                group.hold(block_ids[span.start : span.stop])
            cut_off = len(block_ids)
            for span in group.needed_of(old):
                passed = [i for i in range(span.start, min(span.stop, cut_off)) if i not in seen and i not in kept]
                for is_end in (False, True):
                    released = [block_ids[i] for i in passed if self._is_end(group, i) == is_end]
                    group.release(released, num_own=1, is_end=is_end)
                group.release(before[max(cut_off, span.start) : span.stop], num_own=0, is_end=True)

    def _is_end(self, group: WindowBlocks, block_index: int) -> bool:
        """Return whether a block is seen from where others are likely to resume.

        They are likely to resume where the prompt ends, or where it parted from what was known.
        """
        places = (self._end, self._num_hit, self._num_matched)
        return any(block_index in group.seen(num_tokens) for num_tokens in places if num_tokens)

    def _take_for(self, forward: Resumption, num_slots: int) -> None:
        """Take slots as `_take` does, with the window blocks that a forward needs.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        before, start, block_ids = self._resumption, self.num_tokens, self.block_ids
        index, offset = divmod(start, self._block_size)
        source = None  # the block that is copied on write
        if offset and num_slots and not self._allocator.is_writable(block_ids[index]):
            source = block_ids[index]
        first, end = index + (source is not None), -(-forward.stop // self._block_size)
        with Changing(self.groups):
            self._need(forward._replace(stop=start))
            needed_from = [max(first, group.span(forward.cut, forward.stop).start) for group in self.groups]
            try:
                for group, needed in zip(self.groups, needed_from, strict=True):
                    held = block_ids[needed:end]
                    num_taken = group.num_to_take(held) + max(0, end - needed - len(held))
                    is_shared = source is not None and group.is_needed_by_others(source, self._allocation)
                    group.require(num_taken + is_shared, self.namespace)
                self._take(num_slots)
            except OutOfBlocksError:
                self._need(before)
                raise
            copied = None if source is None else (source, block_ids[index])
            for group, needed in zip(self.groups, needed_from, strict=True):
                parting = group.seen(self._num_matched)
                likely = block_ids[max(first, parting.start) : min(needed, parting.stop)]
                group.attach(block_ids[needed:end], block_ids[first:needed], copied, likely=likely)
            self._allocation.resumption = forward

    def _commit_in_groups(self, start: int, hashes: list[BlockHash]) -> list[BlockHash]:
        """Commit blocks from `start` on in a table with windows, and return the hashes of those committed.

        A block that forks hold, too, may have an equal block that would replace it, and after which a window could not
        resume. Then the block waits, and so do all blocks after it.
        """
        with Changing(self.groups):
            equal, waiting = self._equal_blocks(start, hashes), start + len(hashes)
            waiting = next((index for index, other in equal.items() if self._must_wait(index, other)), waiting)
            replaced = {index: (self.block_ids[index], other) for index, other in equal.items() if index < waiting}
            shared = [{index for index, pair in replaced.items() if group.share(*pair)} for group in self.groups]
            committed = hashes[: waiting - start]
            self._allocator.commit_many(self._allocation, start, committed)
            self._num_committed = waiting
            for group, of_group in zip(self.groups, shared, strict=True):
                seen, kept = group.needed_of(self._resumption)
                for index, (own, other) in replaced.items():
                    is_replaced = self.block_ids[index] == other
                    if index in of_group:
                        group.end_share(own, other, replaced=is_replaced)
                        if index not in seen and index not in kept:
                            group.release((other,), num_own=1, is_end=self._is_end(group, index))
                    elif is_replaced:
                        group.release((own,), num_own=0, is_end=False)
            if replaced:
                self._need(self._resumption)
        return committed

    def _must_wait(self, index: int, other: int) -> bool:
        """Return whether `other` in place of a block would leave this table or a fork without a window block."""
        return self._allocator.ref_count(self.block_ids[index]) > 1 and any(
            other not in group.places and any(index in span for span in group.needed_of(self._resumption))
            for group in self.groups
        )

    def _equal_blocks(self, start: int, hashes: Iterable[BlockHash]) -> dict[int, int]:
        """Return logical index -> block that may replace the table's own block when this is committed."""
        equal = {}
        for index, block_hash in enumerate(hashes, start):
            found = self._allocator.match_prefix((block_hash,), self.namespace)
            if found and found[0] != self.block_ids[index]:
                equal[index] = found[0]
        return equal


@contextmanager
def forks_in_place_of(sources: Sequence[BlockTable], freed: Sequence[BlockTable]) -> Iterator[list[BlockTable]]:
    """Fork each of `sources`; on leaving, the tables `freed` have given their blocks back.

    Inside the `with`, only record who has the forks. Cost: the blocks that a fork and the freed table in its place do
    not have in common, so little where both are of one prompt.

    Examples:
        >>> from . import PrefixCachingBlockAllocator, root_hash
        >>> tables = [BlockTable(PrefixCachingBlockAllocator(num_blocks=8, block_size=2), root_hash(b"model"))]
        >>> _ = tables[0].allocate([1, 2, 3])
        >>> tables.append(tables[0].fork())
        >>> with forks_in_place_of(tables[:1], tables[1:]) as forks:
        ...     tables[1:] = forks
        >>> tables[1].block_ids
        [1, 2]
    """
    if not sources and not freed:
        yield []
        return
    one = [*sources, *freed][0]
    wanted = [(table._allocation, table._num_blocks_of_tokens) for table in sources]
    with Changing(one.groups):
        held = [list(table.block_ids) for table in freed] if one.groups else []
        with one._allocator.exchanging(wanted, [table._allocation for table in freed]) as allocations:
            yield [table._forked(each) for table, each in zip(sources, allocations, strict=True)]
        for table, block_ids in zip(freed, held, strict=False):
            for group in table.groups:
                group.leave(block_ids, table._resumption)
    for table in freed:
        table._num_committed = 0
        table._chain.truncate(0)


def append_to_each(tables: Sequence[BlockTable], token_ids: Sequence[int]) -> list[int]:
    """Append one token to each table, as `append_token` does, in one pass; return the slots.

    Raises:
        OutOfBlocksError: with windows, some tables may have grown; without, nothing has changed.
    """
    if not tables or tables[0].groups:
        return [table.append_token(token_id) for table, token_id in zip(tables, token_ids, strict=True)]
    places = [divmod(len(table._chain.token_ids), table._block_size) for table in tables]
    wanted = [(table._allocation, index) for table, (index, _) in zip(tables, places, strict=True)]
    tables[0]._allocator.make_each_writable(wanted)
    slots = []
    for table, token_id, (index, offset) in zip(tables, token_ids, places, strict=True):
        table._chain.token_ids.append(token_id)
        slots.append(table._allocation.block_ids[index] * table._block_size + offset)
    return slots
