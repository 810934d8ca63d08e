"""Owns the leases of the blocks that calls read or write, and those of pinned prefixes.

A leased block is neither evicted nor written by others. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from ..blocks import (
    Allocation,
    BlockHash,
    Changing,
    Group,
    HashChain,
    PrefixCachingBlockAllocator,
    Resumption,
    Snapshots,
    TokenIds,
    WindowBlocks,
    resumable,
)
from ..blocks.image_tokens import whole_images
from ..errors import CacheArgumentError, OutOfBlocksError
from ..wording import counted


class Resumable(NamedTuple):
    """`Resumable` says what blocks hold of a row, in tokens."""

    num_tokens: int  # tokens after which the row resumes
    num_whole: int  # tokens after which the row could resume if it might do so anywhere
    num_matched: int  # tokens in known blocks, whether the row could resume after them or not


class Leases:
    """`Leases` leases blocks, with the window blocks that rows need to resume in them, and holds pinned prefixes."""

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        windows: Sequence[WindowBlocks],
        snapshots: Snapshots[Any],
        groups: Sequence[Group],
    ) -> None:
        self._allocator, self._windows, self._snapshots, self._groups = allocator, windows, snapshots, groups
        # (salt, token ids) -> lease of their blocks, and number of tokens pinned
        self._pinned: dict[tuple[bytes, bytes], tuple[Allocation, int]] = {}

    def look(self, hashes: Sequence[BlockHash], salt: bytes, tokens: TokenIds, most: int) -> Resumable:
        """Find the leading blocks that a row has, and after how many tokens, at `most`, all layers can resume.

        Effects: none.
        """
        block_ids = self._allocator.match_prefix(hashes, salt)
        num_matched = len(block_ids) * self._allocator.block_size
        num_whole = num_tokens = self._resumable(block_ids, tokens, num_matched)
        if num_tokens > most:
            num_tokens = self._resumable(block_ids, tokens, most)
        return Resumable(num_tokens, num_whole, num_matched)

    def _resumable(self, block_ids: Sequence[int], tokens: TokenIds, num_tokens: int) -> int:
        """Return the most tokens, up to `num_tokens`, after which all layers can resume and no image is cut."""
        while True:
            most = resumable(self._groups, block_ids, num_tokens)
            num_tokens = whole_images(tokens, most)
            if num_tokens == most:
                return most

    def take(self, hashes: Sequence[BlockHash], salt: bytes, num_tokens: int | None = None) -> Allocation:
        """Lease the leading blocks that are known; the caller frees the lease by `give_back`.

        If a row resumes after `num_tokens` tokens, no more blocks are leased, and their window blocks, too.
        """
        if num_tokens is None:
            return self._allocator.allocate(hashes, namespace=salt)
        with Changing(self._windows):
            lease = self.take(hashes[: -(-num_tokens // self._allocator.block_size)], salt)
            self.resume(lease, num_tokens)
        return lease

    def resume(self, lease: Allocation, num_tokens: int) -> None:
        """Note that rows resume `num_tokens` tokens into a lease, and hold what windows see there, as far as kept."""
        lease.resumption = Resumption(num_tokens, num_tokens)
        for group in self._windows:
            group.hold(lease.block_ids[index] for index in group.seen(num_tokens))

    def give_back(self, lease: Allocation) -> None:
        """Free a lease. Where its rows could resume, others are likely to resume, too."""
        resumption = lease.resumption
        if resumption is None:
            self._allocator.free(lease)
            return
        with Changing(self._windows):
            block_ids = [*lease.block_ids]
            self._allocator.free(lease)
            for group in self._windows:
                group.leave(block_ids, resumption)

    # Pins hold blocks until they are taken off; they outlive the cache that asked for them.

    def pinned_blocks(self, salt: bytes | None = None) -> set[int]:
        """Return the blocks that are pinned, of one salt or of all."""
        return set(chain.from_iterable(lease.block_ids for lease in self.pins(salt)))

    def pins(self, salt: bytes | None = None) -> list[Allocation]:
        """Return the leases of pinned blocks, of one salt or of all."""
        return [lease for (of_pin, _), (lease, _) in self._pinned.items() if salt in (None, of_pin)]

    def pin(self, salt: bytes, root: bytes, token_ids: TokenIds) -> int:
        """Hold the longest cached prefix of `token_ids` from which a prompt can resume; return its number of tokens.

        It takes the place of what was pinned for these tokens and this salt; nothing has changed where this raises.
        """
        hashes = HashChain(root, self._allocator.block_size, token_ids).hashes_of()
        found = self.look(hashes, salt, token_ids, len(token_ids))
        if not found.num_tokens:
            raise CacheArgumentError(_why_nothing(len(token_ids), found.num_matched, self._allocator.block_size))
        lease = self.take(hashes, salt, found.num_tokens)
        if not all(group.num_needed < group.most for group in self._windows):
            self.give_back(lease)
            raise OutOfBlocksError(
                f"pinning {found.num_tokens} tokens takes more blocks of layers with a window than there can be; pin "
                "fewer tokens, or build the cache with a larger num_blocks or max_bytes"
            )
        key = (salt, token_ids.tobytes())
        replaced = self._pinned.get(key)
        self._pinned[key] = lease, found.num_tokens  # if interrupted here, the other lease is collected
        self._spare_snapshots()
        if replaced is not None:
            self.give_back(replaced[0])
        return found.num_tokens

    def unpin(self, salt: bytes | None, token_ids: TokenIds | None) -> int:
        """Give back what is pinned for these tokens and this salt; None: for all of them.

        The blocks stay cached. Returns the number of tokens that were pinned.
        """
        wanted, num_given_back = None if token_ids is None else token_ids.tobytes(), 0
        for key in list(self._pinned):
            if salt in (None, key[0]) and wanted in (None, key[1]):
                lease, num_tokens = self._pinned.pop(key)
                self.give_back(lease)
                num_given_back += num_tokens
        self._spare_snapshots()
        return num_given_back

    def _spare_snapshots(self) -> None:
        """Let the states at the ends of pinned prefixes stay: a prompt cannot resume from blocks alone."""
        ends = {self._allocator.digest_of(lease.block_ids[-1]) for lease in self.pins()}
        self._snapshots.pinned = frozenset(digest for digest in ends if digest is not None)


def _why_nothing(num_tokens: int, num_cached: int, block_size: int) -> str:
    """Say why nothing can be pinned of a prefix with `num_cached` tokens in cached blocks, and what to do."""
    if num_tokens < block_size:
        return (
            f"the prefix has {counted(num_tokens, 'token')}, fewer than a block of {block_size}, and only whole blocks "
            f"are pinned; give at least {block_size} tokens"
        )
    if num_cached:
        return (
            f"blocks of {num_cached} tokens of this prefix of {num_tokens} are cached, but no prompt can resume within "
            "them: what layers with a state or a window keep there is not cached; compute it again, with prefill, "
            "or pin a longer prefix"
        )
    return (
        f"nothing of this prefix of {num_tokens} tokens is cached for the model as it is now, so there is nothing to "
        "pin; compute it first, with prefill, then pin it"
    )
