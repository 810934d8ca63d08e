"""Owns what a block hash covers, the hashes of one sequence, and what the roots of sequences stand for.

digest(i) = SHA-256(digest(i - 1) + token ids of block i as int64 + extra keys of block i)
digest(-1) = root: everything besides tokens that shapes a sequence's keys and values
So a digest names the whole prefix up to the end of its block, and is the same in every process.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import NamedTuple, TypeAlias

from ..errors import CacheArgumentError

TokenIds: TypeAlias = "array[int]"  # typecode "q"

TOKEN_BYTES = 8  # bytes of one token id, in a hash and in `array('q')`
OF_WEIGHTS = 16  # first bytes of a digest of a model, which depend on weights alone
_FIRST_COMPARED = 1024  # tokens compared at first, then four times as many each time: most sequences differ soon
_MOST_ROOTS = 2**14  # roots remembered; where frequencies depend on length, every length has its own root


def common_prefix_length(left: TokenIds, right: TokenIds) -> int:
    """Return how many leading tokens are equal.

    Examples:
        >>> common_prefix_length(array("q", [7, 8, 9]), array("q", [7, 8, 1, 1]))
        2
    """
    longest = min(len(left), len(right))
    known, end = 0, min(_FIRST_COMPARED, longest)  # the first `known` tokens are equal
    while known < longest and left[known:end] == right[known:end]:
        known, end = end, min(4 * end, longest)
    # the first difference, if any, lies in [known, end)
    while end - known > 1:
        middle = (known + end) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            end = middle
    return known


class BlockHash(NamedTuple):
    """`BlockHash` identifies a full block.

    A hit needs an equal digest (256 bits) and equal tokens, so a collision is no hit.
    """

    digest: bytes  # 32 bytes; covers root, all tokens up to the block's end, and extra keys
    token_bytes: bytes  # the block's own token ids, int64
    parent: bytes = b""  # digest of the block before, or the root


def root_hash(*parts: bytes) -> bytes:
    """Return the digest of `parts`, 32 bytes: the parent of a sequence's first block.

    The parts `("ab", "c")` and `("a", "bc")` give different digests.
    """
    return sha256(b"".join([field for part in parts for field in (len(part).to_bytes(8, "little"), part)])).digest()


def digest_behind(parent: bytes, token_bytes: bytes) -> bytes:
    """Return the digest of the block with these tokens behind `parent`, a block's digest or a root; no extra keys."""
    return sha256(parent + token_bytes).digest()


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Return token ids as `array('q')`, or as they are; raise CacheArgumentError for what is no int of 64 bits."""
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
        >>> [len(block_hash.digest) for block_hash in chain.hashes_of()]
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

    def hashes_of(self, start: int = 0, stop: int | None = None) -> list[BlockHash]:
        """Return the hashes of full blocks `[start, stop)`; without `stop` up to the last full block."""
        # Hot: most of the time should be SHA-256's. Hence local names and tuple.__new__.
        known, extra_keys, size, new_tuple = self._hashes, self.extra_keys, self.block_size, tuple.__new__
        stop = len(self.token_ids) // size if stop is None else stop
        data, width = self.token_ids[len(known) * size : stop * size].tobytes(), size * TOKEN_BYTES
        parent = known[-1].digest if known else self.root
        for offset in range(0, len(data), width):
            token_bytes = data[offset : offset + width]
            covered = parent + token_bytes
            if extra_keys is not None and (extra := extra_keys(len(known))):
                covered += len(extra).to_bytes(8, "little") + extra
            digest = sha256(covered).digest()
            known.append(new_tuple(BlockHash, (digest, token_bytes, parent)))
            parent = digest
        return known[start:stop]


class RootFacts(NamedTuple):
    """`RootFacts` says what conditions the keys and values of a row besides its tokens."""

    digest: bytes  # of the model, as of the last look at it
    salt: bytes = b""
    regime: bytes = b""  # what the row's forwards keep to: rotary frequencies that depend on length, and shapes
    adapter: str = ""  # name of the adapter that the row was given
    counted_from: int = 0  # columns of padding, where padding shows in keys and values
    first_position: int = 0  # position of the row's first token

    def root(self) -> bytes:
        """Return the root of a row with these facts."""
        of_row = f"{self.counted_from} {self.first_position}".encode()
        return root_hash(self.digest, self.salt, self.regime, self.adapter.encode(), of_row)


class Roots:
    """`Roots` maps the latest roots to the facts that they stand for."""

    def __init__(self) -> None:
        self._facts: OrderedDict[bytes, RootFacts] = OrderedDict()
        self._roots: dict[RootFacts, bytes] = {}

    def of(self, facts: RootFacts) -> bytes:
        """Return the root of these facts, and remember it."""
        root = self._roots.get(facts)
        if root is None:
            root = facts.root()
            self._facts[root] = facts
            self._roots[facts] = root
            if len(self._facts) > _MOST_ROOTS:
                _, forgotten = self._facts.popitem(last=False)
                self._roots.pop(forgotten, None)
        return root

    def facts_of(self, root: bytes) -> RootFacts | None:
        """Return the facts that a root stands for; None if the root is too old to be remembered."""
        return self._facts.get(root)

    def all(self) -> list[RootFacts]:
        """Return the facts of all roots remembered."""
        return list(self._facts.values())
