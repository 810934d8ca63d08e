"""Finds what is known of a row that begins: full blocks by their hashes, and rows of the call before token by token.

This changes nothing but who holds which block: a lease keeps the blocks that it names from being evicted or written.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ..blocks import Allocation, HashChain
from ..blocks.image_tokens import end_of_image, filled_up, hold_images, whole_images
from ..blocks.tokens import TokenIds, common_prefix_length
from ..kv.states import States
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .found import PreviousRow, PreviousRows, why_no_state, why_no_window, why_stopped
from .request import RowInput


@dataclass(slots=True)
class Known:
    """`Known` says what is known of one row."""

    chain: HashChain  # the row's tokens and their hashes
    lease: Allocation | None  # lease of the blocks that hold its first tokens; None: the blocks were not asked for
    num_in_blocks: int  # leading tokens that blocks hold
    previous: PreviousRow | None  # row of the call before that begins alike
    num_common: int  # tokens that the row has in common with that row
    ahead: tuple[Rows, int, int] | None = None  # rows that ran first for this call, one's number, tokens of it to have
    states: States = field(default_factory=dict)  # what layers with a state carry after the tokens in blocks
    brought: Mapping[str, int] = field(default_factory=dict)  # lower tier -> tokens that came from there for this call
    num_tokens: int = 0  # leading tokens that are known, wherever
    num_found: int = 0  # leading tokens that could be reused, if the row might start anywhere
    num_matched: int = 0  # leading tokens in known blocks, whether layers with a state can resume after them or not
    stopped: str = ""  # why no more of the row was known, before anything ran ahead

    def __post_init__(self) -> None:
        self.num_tokens, num_previous = self.num_in_blocks, None
        self.num_matched = self.num_in_blocks
        if self.previous is not None and self.num_common > self.num_in_blocks:
            self.num_tokens, num_previous = self.num_common, len(self.previous.token_ids)
        self.num_found = self.num_tokens
        self.stopped = why_stopped(self.num_tokens, self.chain.token_ids, self.chain.block_size, num_previous)

    def sources(self) -> list[tuple[Rows, int, int]]:
        """Return rows that have the row's first tokens, the number of one of them, and how many tokens it has."""
        previous = [] if self.previous is None else [(self.previous.rows, self.previous.number, self.num_common)]
        return [*([] if self.ahead is None else [self.ahead]), *previous]

    def forget(self) -> None:
        """Let the row begin anew, whatever is known of it."""
        self.num_tokens = self.num_in_blocks = self.num_common = 0
        self.previous = self.ahead = None
        self.states = {}

    def limit(self, num_tokens: int) -> None:
        """Limit what the row knows to so many tokens: another rank knows no more."""
        if num_tokens < self.num_tokens:
            self.num_tokens, self.stopped = num_tokens, f"{self.stopped}; another rank's hit is shorter"
            self.num_in_blocks, self.num_common = min(self.num_in_blocks, num_tokens), min(self.num_common, num_tokens)

    def learn(self, ahead: Rows, number: int, num_tokens: int) -> None:
        """Note that so many tokens were computed first, in a row of these rows."""
        if num_tokens > self.num_tokens:
            self.ahead, self.num_tokens = (ahead, number, num_tokens), num_tokens


def match(
    store: BlockStore,
    new: Sequence[RowInput],
    previous: PreviousRows,
    chains: Mapping[bytes, HashChain],
    latest: int | None = None,
    brought: Mapping[int, str] = MappingProxyType({}),
) -> list[Known]:
    """Find what is known of rows that begin. The store's lock is held.

    A row that runs alone holds no blocks where a row of the call before knows more of it than blocks do.

    Args:
        chains: root and tokens of rows of the call before -> their hashes, as far as they were computed.
        latest: last column at which rows may start, where layers have windows or states: then rows start exactly where
            they are known. None: rows may start after any of their known tokens.
        brought: block -> lower tier that the block has come from for this call.

    Returns:
        what is known of each row; each lease is the caller's to give back.
    """
    found = []
    for row in new:
        closest, num_common = previous.closest(row)
        chain = chain_of(row.root, store.block_size, row.token_ids, chains)
        if latest is None:
            known = _anywhere(store, row, chain, closest, num_common, is_alone=len(new) == 1)
        else:
            known = _exactly(store, row, chain, closest, num_common, latest)
        if not known.num_tokens and closest is not None and not num_common and closest.token_ids:
            known.stopped += ", and the last call's begin otherwise"
        if brought and known.lease is not None:
            size = store.block_size
            tokens = Counter(brought[block_id] for block_id in known.lease.block_ids if block_id in brought)
            known.brought = {name: number * size for name, number in tokens.items()}
        found.append(known)
    return found


def _up_to_an_image(
    store: BlockStore, row: RowInput, lease: Allocation, num_held: int, num_matched: int, latest: int | None
) -> tuple[Allocation, int]:
    """Return a lease that also holds the end of the image in the block after what is known, and its tokens.

    The given lease is returned where the end of the image was not kept.

    Args:
        lease: lease of the known blocks.
        num_held: number of tokens that this lease holds.
        num_matched: number of tokens that are known, whether a row can resume after them or not.
    """
    end = end_of_image(row.token_ids, num_matched, num_matched + store.block_size)
    if end is None or (latest is not None and end > latest - row.pad):
        return lease, num_held
    chain = HashChain(row.root, store.block_size)
    chain.extend(filled_up(row.token_ids, end, store.block_size))
    hashes = chain.hashes_of(0, chain.num_full_blocks)
    longer, num_tokens, _, _ = store.leases.take_resumable(hashes, row.salt, row.token_ids, end)
    if num_tokens < end:
        store.leases.give_back(longer)
        return lease, num_held
    store.leases.give_back(lease)
    return longer, end


def _anywhere(
    store: BlockStore, row: RowInput, chain: HashChain, closest: PreviousRow | None, num_common: int, *, is_alone: bool
) -> Known:
    """Find what is known of a row that may start after any of its tokens, but for those inside an image."""
    num_common, lease, num_held, size = whole_images(row.token_ids, num_common), None, 0, store.block_size
    if not is_alone or num_common % size == 0 or _is_known(store, chain, num_common, row.salt):
        lease = store.leases.take(chain.hashes_of(0, chain.num_full_blocks), row.salt)
        num_matched = len(lease.block_ids) * size
        num_held = whole_images(row.token_ids, num_matched)
        if hold_images(row.token_ids):
            lease, num_held = _up_to_an_image(store, row, lease, num_held, num_matched, None)
    return Known(chain, lease, num_held, closest, num_common)


def _exactly(
    store: BlockStore, row: RowInput, chain: HashChain, closest: PreviousRow | None, num_common: int, latest: int
) -> Known:
    """Find what is known of a row that starts exactly where it is known: where its layers can resume."""
    most = max(0, latest - row.pad)
    num_there = whole_images(row.token_ids, min(num_common, most))
    if closest is None or not closest.can_go_on_at(num_there):
        closest, num_there, num_common = None, 0, 0
    hashes = chain.hashes_of(0, chain.num_full_blocks)
    lease, num_held, num_whole, num_matched = store.leases.take_resumable(hashes, row.salt, row.token_ids, most)
    if hold_images(row.token_ids):
        lease, num_held = _up_to_an_image(store, row, lease, num_held, num_matched, latest)
    known = Known(chain, lease, num_held, closest, num_there)
    known.num_matched = num_matched
    if store.states:
        if known.lease is not None and num_held:
            known.states = store.states.use(lease.block_ids, num_held)
        if known.num_tokens < min(num_matched, most // store.block_size * store.block_size):
            known.stopped = why_no_state(num_matched, known.num_tokens)
            return known
        num_whole = num_matched
    known.num_found = max(num_whole, num_common, known.num_tokens)
    by_previous = closest is not None and (num_there > num_held or num_common > num_whole)
    num_previous = len(closest.token_ids) if closest is not None and by_previous else None
    known.stopped = why_stopped(known.num_found, row.token_ids, store.block_size, num_previous)
    if known.num_found < (shown := whole_images(row.token_ids, num_matched)):
        known.stopped = why_no_window(shown)
    return known


def _is_known(store: BlockStore, chain: HashChain, token: int, salt: bytes) -> bool:
    """Return whether the pool has the full block of this token of a row."""
    block = token // store.block_size
    return block < chain.num_full_blocks and bool(store.allocator.match_prefix(chain.hashes_of(block, block + 1), salt))


def chain_of(root: bytes, size: int, tokens: TokenIds, chains: Mapping[bytes, HashChain]) -> HashChain:
    """Return a row's tokens and their hashes, of which those are not computed again that a chain of its root has."""
    if root not in chains:
        chain = HashChain(root, size)
    else:
        chain = chains[root].copy()  # whoever has that row may go on with it
        chain.truncate(common_prefix_length(chain.token_ids, tokens))
    chain.extend(tokens[len(chain) :])
    return chain
