"""Owns the tokens and blocks of one sequence. Refuses to write a token into a block that others read.

Ranges, in tokens: `[0, num_committed_blocks * block_size)` hashed, read only | `[.., num_tokens)` ours or shared with
forks, copied on write | `[num_tokens, num_slots)` empty, ours alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import BlockStateError, CacheArgumentError
from .allocation import Allocation
from .allocator import PrefixCachingBlockAllocator
from .arguments import check_not_negative
from .hashing import BlockHash, HashChain, token_array


class PrefixMatch(NamedTuple):
    """What a table would hold of a prefix."""

    block_ids: list[int]
    num_tokens: int  # in these blocks
    num_matched_tokens: int  # more, where blocks are known that a window cannot go on from


class BlockTable:
    """One sequence: its tokens, the blocks that hold their keys and values, and how far these are committed.

    A token in the table may not have been written yet: the caller commits what was computed. Every method finishes or
    changes nothing. The blocks are given back by `free()`, on leaving a `with`, or when the table is collected.

    Args:
        root, extra_keys: see `HashChain`.
        namespace: see `PrefixCachingBlockAllocator.allocate`.

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

    __slots__ = ("__weakref__", "_allocation", "_allocator", "_block_size", "_chain", "_num_committed")

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        root: bytes,
        extra_keys: Callable[[int], bytes] | None = None,
        *,
        namespace: bytes = b"",
    ) -> None:
        self._allocator = allocator
        self._block_size = allocator.block_size
        self._chain = HashChain(root, allocator.block_size, extra_keys)
        self._allocation: Allocation = allocator.allocate(namespace=namespace)
        self._num_committed = 0

    def __repr__(self) -> str:
        return (
            f"BlockTable(num_tokens={self.num_tokens}, num_blocks={len(self.block_ids)}, "
            f"num_committed_blocks={self._num_committed}, num_cached_tokens={self.num_cached_tokens})"
        )

    def __len__(self) -> int:
        """Number of tokens, as `num_tokens`."""
        return len(self._chain.token_ids)

    def __bool__(self) -> bool:
        """True also without tokens."""
        return True

    @property
    def allocation(self) -> Allocation:
        """The holder of the table's blocks; only the table changes it."""
        return self._allocation

    @property
    def root(self) -> bytes:
        """Parent of the first block's hash."""
        return self._chain.root

    @property
    def namespace(self) -> bytes:
        """Whose blocks they are."""
        return self._allocation.namespace

    @property
    def block_ids(self) -> list[int]:
        """Logical block index -> block id; read only."""
        return self._allocation.block_ids

    @property
    def token_ids(self) -> array[int]:
        """Position -> token id; read only."""
        return self._chain.token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens, written or not."""
        return len(self._chain.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were hit when allocated and are still in the table."""
        return min(self._allocation.num_prefix_tokens, len(self._chain.token_ids))

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the last hit found; here all of them were hit."""
        return self.num_cached_tokens

    @property
    def num_committed_blocks(self) -> int:
        """Leading blocks that were hit or committed."""
        return self._num_committed

    @property
    def num_slots(self) -> int:
        """Tokens that fit into the blocks held."""
        return self._allocation.num_slots

    @property
    def num_empty_slots(self) -> int:
        """Tokens that can be appended without a block more, but for a copy on write of the last one."""
        return self._allocation.num_slots - len(self._chain.token_ids)

    def allocate(self, token_ids: Iterable[int], num_lookahead_slots: int = 0) -> int:
        """Fill an empty table: hold the longest prefix hit, and fresh blocks for the other tokens and the lookahead.

        A hit may cover all of `token_ids`; a caller that needs logits then computes the last token without writing it.

        Returns:
            The number of tokens hit, a multiple of block_size.

        Raises:
            OutOfBlocksError: nothing has changed.
            BlockStateError: the table is not empty, or was freed.
            CacheArgumentError: a token that is no 64-bit integer, a negative lookahead.
        """
        check_not_negative("num_lookahead_slots", num_lookahead_slots)
        return self._fill(token_ids, num_lookahead_slots)

    def hold_prefix(self, token_ids: Iterable[int]) -> int:
        """Fill an empty table with the longest prefix hit of `token_ids` and no other token. Takes no fresh block.

        Returns, Raises: as `allocate`, which alone can run out of blocks.
        """
        return self._fill(token_ids, None)

    def match_prefix(self, token_ids: Iterable[int]) -> PrefixMatch:
        """What `hold_prefix` would hold now.  Effects: none; the order of eviction stays as it is."""
        chain = HashChain(self._chain.root, self._block_size, self._chain.extra_keys)
        chain.extend(token_ids)
        matched = self._allocator.match_prefix(chain.hashes(), self.namespace)
        num_matched = len(matched) * self._block_size
        num_blocks = self.num_resumable_of(matched, num_matched) // self._block_size
        return PrefixMatch(matched[:num_blocks], num_blocks * self._block_size, num_matched)

    def _fill(self, token_ids: Iterable[int], num_lookahead_slots: int | None) -> int:
        """See `allocate`; None: see `hold_prefix`."""
        if self.num_tokens or self.block_ids or self._allocation.is_freed:
            raise BlockStateError(f"{self!r} is not empty, or was freed; only a fresh table is filled")
        chain = HashChain(self._chain.root, self._block_size, self._chain.extra_keys)
        chain.extend(token_ids)
        hashes = self._hashes_to_hit(chain)
        if num_lookahead_slots is None:
            allocation = self._allocator.allocate(hashes, namespace=self.namespace)
            chain.truncate(allocation.num_prefix_tokens)
        else:
            num_blocks = -(-(len(chain) + num_lookahead_slots) // self._block_size)
            allocation = self._allocator.allocate(hashes, num_blocks=num_blocks, namespace=self.namespace)
        self._num_committed = allocation.num_prefix_blocks
        self._allocation = allocation
        self._chain = chain
        return allocation.num_prefix_tokens

    def _hashes_to_hit(self, chain: HashChain) -> Iterator[BlockHash]:
        """Those of the blocks that may be held of a prefix."""
        return chain.hashes()

    def append_tokens(
        self, token_ids: Sequence[int] | array[int], num_lookahead_slots: int = 0, *, cut: int | None = None
    ) -> None:
        """Append tokens, with a slot that may be written for each of them and for the lookahead.

        A block that others hold, or that has a hash, is copied on write: see `PrefixCachingBlockAllocator.take_copies`.

        Args:
            cut: tokens to which the table may be cut again until more are appended; None: no fewer than it has then. Here
                any number may; see `WindowedTable`.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a token that is no 64-bit integer, a negative lookahead.
        """
        check_not_negative("num_lookahead_slots", num_lookahead_slots)
        tokens = token_array(token_ids)
        self.ensure_num_empty_slots(len(tokens) + num_lookahead_slots)
        self._chain.token_ids.extend(tokens)

    def append_in_place(self, token_id: int) -> int | None:
        """Append one token, an integer of 64 bits, and return its slot; the common case of a decode step.

        None, with nothing changed, where a block begins, even one that the table has already, or may not be written.
        """
        token_ids, block_size = self._chain.token_ids, self._block_size
        block_index, offset = divmod(len(token_ids), block_size)
        block_ids = self._allocation.block_ids
        if not offset or not self._allocator.is_writable(block_ids[block_index]):
            return None
        token_ids.append(token_id)
        return block_ids[block_index] * block_size + offset

    def append_token(self, token_id: int) -> int:
        """Append one token, an integer of 64 bits, after taking the block that it needs, or a copy; returns its slot.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        token_ids, block_ids, block_size = self._chain.token_ids, self._allocation.block_ids, self._block_size
        block_index, offset = divmod(len(token_ids), block_size)
        if block_index < len(block_ids):
            self._allocator.make_writable(self._allocation, block_index)
        else:
            self._allocator.allocate_mutable(self._allocation, 1)
        token_ids.append(token_id)
        return block_ids[block_index] * block_size + offset

    def replace_token(self, position: int, token_id: int) -> None:
        """Say which token one is that was appended before anybody knew, an integer of 64 bits.

        Raises:
            BlockStateError: its block is committed.
        """
        if position < self._num_committed * self._block_size:
            raise BlockStateError(f"token {position} of a table with {self._num_committed} committed blocks is known")
        self._chain.token_ids[position] = token_id

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        """Have at least that many empty slots that may be written: copy on write, then fresh blocks.

        Raises:
            OutOfBlocksError: nothing has changed.
            CacheArgumentError: a negative number.
        """
        check_not_negative("num_empty_slots", num_empty_slots)
        shared, num_fresh = self._blocks_to_take(num_empty_slots)
        self._allocator.require(len(shared) + num_fresh, (), self.namespace)
        for block_index in shared:
            self._allocator.make_writable(self._allocation, block_index)
        if num_fresh:
            self._allocator.allocate_mutable(self._allocation, num_fresh)

    def num_new_blocks_for_append(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` more tokens would take: fresh ones and copies on write.  Effects: none."""
        check_not_negative("num_tokens", num_tokens)
        shared, num_fresh = self._blocks_to_take(num_tokens)
        return len(shared) + num_fresh

    def slots(self, start: int, stop: int) -> list[int]:
        return self._allocation.slots(start, stop)

    def writable_block(self, start: int, stop: int) -> tuple[int, int]:
        """The block of positions `[start, stop)`, which are about to be written, and the offset of the first one in it.

        Raises:
            BlockStateError: others hold the block or can hit it, or the positions do not lie in one block.
        """
        block_index, offset = divmod(start, self._block_size)
        block_ids = self._allocation.block_ids
        if not start < stop <= (block_index + 1) * self._block_size or block_index >= len(block_ids):
            raise BlockStateError(f"positions {start} to {stop - 1} of a table do not lie in one of its blocks")
        block_id = block_ids[block_index]
        if not self._allocator.is_writable(block_id):
            raise BlockStateError(
                f"positions {start} to {stop - 1} would be written into block {block_id}, which others hold or can hit"
            )
        return block_id, offset

    def writable_slots(self, start: int, stop: int) -> list[int]:
        """`slots` of positions that are about to be written.

        Raises:
            BlockStateError: a slot lies in a block that others hold or can hit.
            CacheArgumentError: as `slots`.
        """
        slots = self._allocation.slots(start, stop)
        for block_id in self.block_ids[start // self._block_size : -(-stop // self._block_size)] if slots else ():
            if not self._allocator.is_writable(block_id):
                raise BlockStateError(
                    f"positions {start} to {stop - 1} would be written into block {block_id}, which others hold or can hit"
                )
        return slots

    def unseen_token_ids(self, sequence: Sequence[int] | array[int]) -> array[int]:
        """The tokens of `sequence` after the table's. Raises CacheArgumentError if it does not start with these."""
        tokens = token_array(sequence)
        if tokens[: self.num_tokens] != self._chain.token_ids:
            raise CacheArgumentError(
                f"a sequence of {len(tokens)} tokens does not start with the table's {self.num_tokens}"
            )
        return tokens[self.num_tokens :]

    def commit_full_blocks(self, num_computed_tokens: int) -> Sequence[BlockHash]:
        """Let others hit every full block of the first `num_computed_tokens` tokens; `block_ids` may change.

        Returns:
            The hashes of those that were not committed yet.

        Raises:
            CacheArgumentError: a number that is negative or above `num_tokens`.
        """
        if not 0 <= num_computed_tokens <= self.num_tokens:
            raise CacheArgumentError(f"{num_computed_tokens} tokens computed; the table has {self.num_tokens}")
        start, stop = self._num_committed, num_computed_tokens // self._block_size
        if start >= stop:
            return ()
        hashes = self._chain.hashes_of(start, stop)
        self._allocator.commit_many(self._allocation, start, hashes)
        self._num_committed = stop
        return hashes

    def num_resumable_tokens(self, num_tokens: int) -> int:
        """From how many of the first `num_tokens` tokens a sequence can go on: all, where every layer keeps every token."""
        return num_tokens

    def num_resumable_of(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """The same of other blocks than the table's own, that hold so many tokens.  Effects: none."""
        return num_tokens

    def hold_window(self, num_tokens: int) -> None:
        """The next forward reads what is before `num_tokens` tokens, and what follows. For layers with a window."""

    def let_pass(self) -> None:
        """The last forward has returned: what only that had to read may go. For layers with a window."""

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and their blocks; a committed block that is cut is copied on write.

        Raises:
            CacheArgumentError: a number that is negative or above `num_tokens`.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise CacheArgumentError(f"cannot keep {num_tokens} tokens; give 0 to {self.num_tokens}, what there is")
        self._num_committed = min(self._num_committed, num_tokens // self._block_size)
        self._chain.truncate(num_tokens)
        self._allocator.truncate(self._allocation, self._num_blocks_with_tokens())

    def fork(self) -> BlockTable:
        """A second table with the same tokens in the same blocks; blocks without tokens are not shared."""
        forked = object.__new__(type(self))
        forked._allocator = self._allocator
        forked._block_size = self._block_size
        forked._chain = self._chain.copy()
        forked._allocation = self._allocator.fork(self._allocation, self._num_blocks_with_tokens())
        forked._num_committed = self._num_committed
        return forked

    def move_to(self, allocator: PrefixCachingBlockAllocator, allocation: Allocation) -> None:
        """From here on the tokens lie in these blocks, of another allocator perhaps; those so far are the caller's to give back.

        Interrupted, it is to be done again before the table is used.
        """
        self._allocation = allocation
        self._allocator = allocator

    def free(self) -> None:
        """Give all blocks back; the table is not used again. Raises BlockStateError the second time."""
        self._allocator.free(self._allocation)
        self._num_committed = 0
        self._chain.truncate(0)

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._allocation.is_freed:
            self.free()

    def _num_blocks_with_tokens(self) -> int:
        return -(-len(self._chain.token_ids) // self._block_size)

    def _blocks_to_take(self, num_tokens: int) -> tuple[list[int], int]:
        """What `num_tokens` more tokens take: logical indices of the blocks to copy on write, number of fresh blocks."""
        if not num_tokens:
            return [], 0
        block_ids, start = self._allocation.block_ids, self.num_tokens
        first = start // self._block_size
        last = -(-(start + num_tokens) // self._block_size)
        held = range(first, min(last, len(block_ids)))
        shared = [i for i in held if not self._allocator.is_writable(block_ids[i])]
        return shared, max(0, last - len(block_ids))
