"""Owns what a block hash covers, and the hashes of one sequence. Refuses to hash a block that is not full.

digest(i) = SHA-256(digest(i - 1) + token ids of block i as int64 little-endian + extra keys of block i)
digest(-1) = root: everything besides tokens that shapes a sequence's keys and values
So a digest names the whole prefix up to the end of its block, and is the same in every process.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple

from ..errors import CacheArgumentError
from .tokens import TokenIds, common_prefix_length

TOKEN_BYTES = 8  # bytes of one token id, in a hash and in `array('q')`
_PORTION_BYTES = 32 * 1024
_HOST_IS_BIG_ENDIAN = sys.byteorder == "big"


class BlockHash(NamedTuple):
    """`BlockHash` identifies a full block.

    A hit needs an equal digest (256 bits) and equal tokens, so a collision is no hit.
    """

    digest: bytes  # 32 bytes; covers root, all tokens up to the block's end, and extra keys
    token_bytes: bytes  # the block's own token ids, int64 little-endian
    parent: bytes = b""  # digest of the block before, or the root


def root_hash(*parts: bytes) -> bytes:
    """Return the digest of `parts`, 32 bytes: the parent of a sequence's first block.

    The parts `("ab", "c")` and `("a", "bc")` give different digests.

    Effects: none.  Example: `root_hash(model_digest, b"salt of one tenant")`.
    """
    return sha256(b"".join([field for part in parts for field in (len(part).to_bytes(8, "little"), part)])).digest()


def tokens_of(token_bytes: bytes) -> array[int]:
    """Return the token ids that a block's `token_bytes` hold."""
    token_ids = array("q", token_bytes)
    if _HOST_IS_BIG_ENDIAN:
        token_ids.byteswap()
    return token_ids


def bytes_of(token_ids: array[int]) -> bytes:
    """Return the `token_bytes` of a block with these tokens."""
    if _HOST_IS_BIG_ENDIAN:
        token_ids = token_ids[:]
        token_ids.byteswap()
    return token_ids.tobytes()


def digest_behind(parent: bytes, token_bytes: bytes) -> bytes:
    """Return the digest of a block without extra keys, after the block or the root with the digest `parent`."""
    return sha256(parent + token_bytes).digest()


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Return token ids as `array('q')`, which may be `token_ids` itself.

    Raises:
        CacheArgumentError: a token id is no integer of 64 bits.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return token_ids
    try:
        return array("q", token_ids)
    except (TypeError, OverflowError) as error:
        raise CacheArgumentError(f"token ids must be integers of 64 bits: {error}") from error


class HashChain:
    """`HashChain` holds the tokens and the block hashes of one sequence, which may grow and be cut.

    A hash is computed once, when it is asked for.
    Ranges, in blocks: `[0, len(_hashes))` hashed | `[len(_hashes), len(token_ids) // block_size)` full | the rest.

    Args:
        root: parent of the first block's hash, see `root_hash`.
        block_size: tokens of a block, at least 1.
        token_ids: tokens of the sequence, which are copied.
        extra_keys: function of a logical block index that returns bytes for the block's hash to cover besides tokens;
            empty for none.

    Attributes:
        token_ids: position -> token id; others may append to it.

    Examples:
        >>> chain = HashChain(root_hash(b"model"), 2, [1, 2, 3])
        >>> [len(block_hash.digest) for block_hash in chain.hashes()]
        [32]
    """

    __slots__ = ("_hashes", "block_size", "extra_keys", "root", "token_ids")

    def __init__(
        self,
        root: bytes,
        block_size: int,
        token_ids: Iterable[int] = (),
        extra_keys: Callable[[int], bytes] | None = None,
    ) -> None:
        self.root = root
        self.block_size = block_size
        self.extra_keys = extra_keys
        self.token_ids: TokenIds = array("q", token_ids)
        self._hashes: list[BlockHash] = []  # logical block index -> hash, as far as asked for

    def continued(self, token_ids: TokenIds) -> HashChain:
        """Return a chain of these tokens, which need not hash again the blocks that both begin with."""
        other = HashChain(self.root, self.block_size, token_ids, self.extra_keys)
        other._hashes = self._hashes[: common_prefix_length(self.token_ids, token_ids) // self.block_size]
        return other

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and their hashes."""
        del self._hashes[num_tokens // self.block_size :]
        del self.token_ids[num_tokens:]

    def hashes(self, start: int = 0, stop: int | None = None) -> Iterator[BlockHash]:
        """Iterate over the hashes of full blocks `[start, stop)`, which are computed as they are asked for, and kept.

        At most as many are computed ahead as were asked for.
        """
        known, ahead = self._hashes, 1
        num_full = len(self.token_ids) // self.block_size
        stop = num_full if stop is None else min(stop, num_full)
        for index in range(start, stop):
            if len(known) <= index:
                self._hash_until(min(stop, index + ahead))
                ahead *= 2
            yield known[index]

    def hashes_of(self, start: int = 0, stop: int | None = None) -> list[BlockHash]:
        """Return the hashes of full blocks `[start, stop)`, all computed at once."""
        stop = len(self.token_ids) // self.block_size if stop is None else stop
        if len(self._hashes) < stop:
            self._hash_until(stop)
        return self._hashes[start:stop]

    def _hash_until(self, stop: int) -> None:
        """Hash all blocks before `stop` that have no hash yet."""
        # Hot: most of the time should be SHA-256's. Hence local names and tuple.__new__; tokens are copied in portions
        # that malloc keeps at hand, since a copy of all of them costs a page fault every 4 KiB.
        known, extra_keys, new_tuple = self._hashes, self.extra_keys, tuple.__new__
        remember = known.append
        width = self.block_size * TOKEN_BYTES
        portion = max(1, _PORTION_BYTES // width)
        parent = known[-1].digest if known else self.root
        for first in range(len(known), stop, portion):
            tokens = self.token_ids[first * self.block_size : min(stop, first + portion) * self.block_size]
            if _HOST_IS_BIG_ENDIAN:
                tokens.byteswap()
            data = tokens.tobytes()
            for index, offset in enumerate(range(0, len(data), width), start=first):
                token_bytes = data[offset : offset + width]
                covered = parent + token_bytes
                if extra_keys is not None and (extra := extra_keys(index)):
                    covered += len(extra).to_bytes(8, "little") + extra
                digest = sha256(covered).digest()
                remember(new_tuple(BlockHash, (digest, token_bytes, parent)))
                parent = digest
