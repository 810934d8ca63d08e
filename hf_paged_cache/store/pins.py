"""Owns the leases that keep pinned prefixes from being evicted. Refuses prefixes for which there is no room.

Computes nothing: only what is cached is pinned. A pinned block is in use, so nothing evicts it. Pins belong to the
store and outlive the cache that asked for them. The caller holds the store's lock.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from ..blocks import Allocation, HashChain, PrefixCachingBlockAllocator
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, OutOfBlocksError
from ..wording import counted
from .leases import Leases
from .window_groups import WindowGroups


class Pins:
    """`Pins` holds the pinned prefixes of one store."""

    def __init__(self, allocator: PrefixCachingBlockAllocator, windows: WindowGroups, leases: Leases) -> None:
        self._allocator, self._windows, self._leases = allocator, windows, leases
        # (salt, token ids) -> lease of their blocks, and number of tokens pinned
        self._pinned: dict[tuple[bytes, bytes], tuple[Allocation, int]] = {}

    def block_ids(self, salt: bytes | None = None) -> set[int]:
        """Return the blocks that are pinned, of one salt or of all."""
        return set(chain.from_iterable(lease.block_ids for lease in self.allocations(salt)))

    def allocations(self, salt: bytes | None = None) -> list[Allocation]:
        """Return the leases of pinned blocks, of one salt or of all."""
        return [lease for (of_pin, _), (lease, _) in self._pinned.items() if salt in (None, of_pin)]

    @property
    def num_blocks_held_alone(self) -> int:
        """Number of pinned blocks that no row holds: unpinning everything would give them back."""
        counts = Counter(chain.from_iterable(lease.block_ids for lease in self.allocations()))
        return sum(self._allocator.ref_count(block_id) == count for block_id, count in counts.items())

    def pin(self, salt: bytes, root: bytes, token_ids: TokenIds) -> int:
        """Hold the longest cached prefix of `token_ids` from which a prompt can resume; return its number of tokens.

        It takes the place of what was pinned for these tokens and this salt.

        Raises:
            CacheArgumentError: there is no such prefix in the cache; nothing has changed.
            OutOfBlocksError: there is no room for its window blocks; nothing has changed.
        """
        hashes = HashChain(root, self._allocator.block_size, token_ids).hashes_of()
        found = self._leases.take_resumable(hashes, salt, token_ids, len(token_ids))
        has_room = self._windows.have_room
        if not has_room or not found.num_tokens:
            self._leases.give_back(found.lease)
        if not has_room:
            raise OutOfBlocksError(
                f"pinning {found.num_tokens} tokens takes more blocks of layers with a window than there can be; pin "
                "fewer tokens, or build the cache with a larger num_blocks or max_bytes"
            )
        if not found.num_tokens:
            raise CacheArgumentError(_why_nothing(len(token_ids), found.num_matched, self._allocator.block_size))
        key = (salt, token_ids.tobytes())
        replaced = self._pinned.get(key)
        self._pinned[key] = found.lease, found.num_tokens  # if interrupted here, the other lease is collected
        if replaced is not None:
            self._leases.give_back(replaced[0])
        return found.num_tokens

    def unpin(self, salt: bytes, token_ids: TokenIds | None) -> int:
        """Give back what is pinned for these tokens and this salt, or without tokens for the salt.

        The blocks stay cached. Returns the number of tokens that were pinned.
        """
        wanted = None if token_ids is None else token_ids.tobytes()
        return sum(self._release(key) for key in list(self._pinned) if key[0] == salt and wanted in (None, key[1]))

    def clear(self) -> None:
        """Give back the pins of all salts."""
        for key in list(self._pinned):
            self._release(key)

    def _release(self, key: tuple[bytes, bytes]) -> int:
        lease, num_tokens = self._pinned.pop(key)
        self._leases.give_back(lease)
        return num_tokens


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
