"""Finds what is known of rows that begin: full blocks by their hashes, and rows of the call before token by token.

This changes nothing but who holds which block: a lease keeps the blocks that it names from being evicted or written.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..blocks import Allocation, HashChain
from ..blocks.image_tokens import end_of_image, filled_up, hold_images, said_image, whole_images
from ..blocks.tokens import TokenIds, common_prefix_length
from ..kv.states import States
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from ..store.tier_load import Wanted, load
from .request import RowInput


class PreviousRow(NamedTuple):
    """`PreviousRow` is a row of the call before."""

    root: bytes
    token_ids: TokenIds
    number: int
    rows: Rows

    def can_go_on_at(self, num_tokens: int) -> bool:
        """Return whether another row may go on after the first `num_tokens` tokens of this row.

        It may not where layers with a window have given up what is seen there. Where layers carry states, it may go on
        only after the last token.
        """
        return not self.rows.is_exact or self.rows.can_go_on_at(self.rows.prompts[self.number].pad + num_tokens)


def previous_rows(rows: Rows | None) -> list[PreviousRow]:
    """List the rows of the call before; there are none where these may hold something else than their tokens say."""
    if rows is None or not rows.is_source:
        return []
    found = zip(rows.prompts, rows.token_ids(), strict=True)
    return [PreviousRow(prompt.root, tokens, at, rows) for at, (prompt, tokens) in enumerate(found)]


def closest_row(previous: Sequence[PreviousRow], new: RowInput) -> tuple[PreviousRow | None, int]:
    """Return the row with the longest prefix in common with a new row, and the prefix's length.

    The row is None where no row has the new row's root.
    """
    closest, longest = None, -1
    for row in previous:
        if row.root == new.root and (num_common := common_prefix_length(row.token_ids, new.token_ids)) > longest:
            closest, longest = row, num_common
    return closest, max(0, longest)


@dataclass(slots=True)
class Known:
    """`Known` says what is known of one row."""

    chain: HashChain  # the row's tokens and their hashes
    lease: Allocation | None  # lease of the blocks that hold its first tokens; None: the blocks were not asked for
    num_in_blocks: int  # leading tokens that blocks hold
    previous: PreviousRow | None  # row of the call before that begins alike
    num_common: int  # tokens that the row has in common with that row
    num_tokens: int  # leading tokens that are known, wherever
    num_found: int  # leading tokens that could be reused, if the row might start anywhere
    num_matched: int  # leading tokens in known blocks, whether layers with a window can resume after them or not
    stopped: str  # why no more of the row was known, before anything ran ahead
    states: States = field(default_factory=dict)  # what layers with a state carry after the tokens in blocks
    brought: Mapping[str, int] = field(default_factory=dict)  # lower tier -> tokens that came from there for this call
    ahead: tuple[Rows, int, int] | None = None  # rows that ran first for this call, one's number, tokens of it to have

    def sources(self) -> list[tuple[Rows, int, int]]:
        """Return rows that have the row's first tokens, the number of one of them, and how many tokens it has."""
        found = [] if self.ahead is None else [self.ahead]
        if self.previous is not None:
            found.append((self.previous.rows, self.previous.number, self.num_common))
        return found

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


class Finding:
    """`Finding` finds what a store knows of rows that begin, and holds the leases of it until its `with` block ends.

    Args:
        store: blocks of the model; what lower tiers know is loaded into it.
        inputs: what each row brings.
        latest: last column at which the rows may start.
        previous: rows of the call before.
        is_exact: whether rows start exactly where they are known, or begin anew.

    Attributes:
        known: what is known of each row.
    """

    def __init__(
        self, store: BlockStore, inputs: Sequence[RowInput], latest: int, previous: Rows | None, *, is_exact: bool
    ) -> None:
        self.known: list[Known] = []
        self._store, self.inputs, self._previous, self._is_exact = store, inputs, previous, is_exact
        self._brought: Mapping[int, str] = {}  # block -> lower tier that it has come from for this call
        if store.tiers is not None:
            wanted = [Wanted(row.root, row.salt, row.token_ids, latest - row.pad) for row in inputs if row.pad < latest]
            self._brought = load(store, wanted)

    def __enter__(self) -> "Finding":
        if self._previous is not None:
            with self._store.lock:
                self._previous.is_lent = True  # nobody moves these rows meanwhile
        return self

    def __exit__(self, *raised: object) -> None:
        with self._store.lock:
            if self._previous is not None:
                self._previous.is_lent = False
            self._give_back()

    def _give_back(self) -> None:
        for row in self.known:
            if row.lease is not None and not row.lease.is_freed:
                self._store.leases.give_back(row.lease)

    def look(self, latest: int) -> None:
        """Find what is known of rows that start at column `latest` at the latest.

        A row that runs alone holds no blocks where a row of the call before knows more of it than blocks do.
        """
        store, previous = self._store, self._previous
        chains = {} if previous is None or previous.state is None else previous.state.chains
        with store.lock:
            self._give_back()
            self.known = found = []
            store.settle()
            before = previous_rows(previous)
            for row in self.inputs:
                closest, num_common = closest_row(before, row)
                chain = chain_of(row.root, store.block_size, row.token_ids, chains)
                if self._is_exact:
                    known = _exactly(store, row, chain, closest, num_common, latest)
                else:
                    known = _anywhere(store, row, chain, closest, num_common, is_alone=len(self.inputs) == 1)
                if not known.num_tokens and closest is not None and not num_common and closest.token_ids:
                    known.stopped += ", and the last call's begin otherwise"
                if self._brought and known.lease is not None:
                    tiers = Counter(self._brought[each] for each in known.lease.block_ids if each in self._brought)
                    known.brought = {name: number * store.block_size for name, number in tiers.items()}
                found.append(known)
            store.pool.join_streams()

    def ends(self) -> list[int]:
        """Return for each row the column up to which it is known."""
        return [row.pad + of_row.num_tokens for row, of_row in zip(self.inputs, self.known, strict=True)]

    def are_apart(self) -> bool:
        """Return whether some rows are known further than others that are not padding alone up to there."""
        least = min(self.ends())
        return not all(end == least or row.pad >= least for row, end in zip(self.inputs, self.ends(), strict=True))

    def look_together(self, latest: int, size: int = 1) -> int:
        """Find what is known of rows that all start at one column without a forward ahead; return this column.

        It is the last such column, and a multiple of `size`; 0: there is none.
        """
        while True:
            self.look(latest)
            ends = self.ends()
            column = min(*ends, latest) // size * size
            if all(row.pad >= column for row in self.inputs):
                return 0
            there = [row.pad >= column or end == column for row, end in zip(self.inputs, ends, strict=True)]
            if not column or not self._is_exact or all(there):
                return column
            latest = column


def _anywhere(
    store: BlockStore, row: RowInput, chain: HashChain, closest: PreviousRow | None, num_common: int, *, is_alone: bool
) -> Known:
    """Find what is known of a row that may start after any of its tokens, but for those inside an image."""
    lease, num_held, size, tokens = None, 0, store.block_size, row.token_ids
    are_images = hold_images(tokens)
    if are_images:
        num_common = whole_images(tokens, num_common)
    block, are_wanted = num_common // size, not is_alone or not num_common % size
    if not are_wanted and block < chain.num_full_blocks:  # do blocks know more than that row?
        are_wanted = bool(store.allocator.match_prefix(chain.hashes_of(block, block + 1), row.salt))
    if are_wanted:
        lease = store.leases.take(chain.hashes_of(), row.salt)
        num_held = len(lease.block_ids) * size
        if are_images:
            lease, num_held = _up_to_an_image(store, row, lease, whole_images(tokens, num_held), num_held, None)
    num_tokens, num_previous = num_held, None
    if closest is not None and num_common > num_held:
        num_tokens, num_previous = num_common, len(closest.token_ids)
    stopped = why_stopped(num_tokens, tokens, size, num_previous)
    return Known(chain, lease, num_held, closest, num_common, num_tokens, num_tokens, num_held, stopped)


def _exactly(
    store: BlockStore, row: RowInput, chain: HashChain, closest: PreviousRow | None, num_common: int, latest: int
) -> Known:
    """Find what is known of a row that starts exactly where it is known: where its layers can resume."""
    most, tokens = max(0, latest - row.pad), row.token_ids
    num_there = whole_images(tokens, min(num_common, most))
    if closest is None or not closest.can_go_on_at(num_there):
        closest, num_there, num_common = None, 0, 0
    hashes = chain.hashes_of()
    lease, num_held, num_whole, num_matched = store.leases.take_resumable(hashes, row.salt, tokens, most)
    if hold_images(tokens):
        lease, num_held = _up_to_an_image(store, row, lease, num_held, num_matched, latest)
    num_tokens = max(num_held, num_there)
    known = Known(chain, lease, num_held, closest, num_there, num_tokens, num_tokens, num_matched, "")
    if store.states:
        if num_held:
            known.states = store.states.use(lease.block_ids, num_held)
        if num_tokens < min(num_matched, most // store.block_size * store.block_size):
            known.stopped = why_no_state(num_matched, num_tokens)
            return known
        num_whole = num_matched
    known.num_found = max(num_whole, num_common, num_tokens)
    by_previous = closest is not None and (num_there > num_held or num_common > num_whole)
    num_previous = len(closest.token_ids) if closest is not None and by_previous else None
    known.stopped = why_stopped(known.num_found, tokens, store.block_size, num_previous)
    if known.num_found < (shown := whole_images(tokens, num_matched)):
        known.stopped = why_no_window(shown)
    return known


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
    chain = HashChain(row.root, store.block_size, filled_up(row.token_ids, end, store.block_size))
    longer, num_tokens, _, _ = store.leases.take_resumable(chain.hashes_of(), row.salt, row.token_ids, end)
    if num_tokens < end:
        store.leases.give_back(longer)
        return lease, num_held
    store.leases.give_back(lease)
    return longer, end


def chain_of(root: bytes, size: int, tokens: TokenIds, chains: Mapping[bytes, HashChain]) -> HashChain:
    """Return a row's tokens and their hashes, of which those are not computed again that a chain of its root has."""
    known = chains.get(root)
    return HashChain(root, size, tokens) if known is None else known.continued(tokens)


def why_stopped(num_known: int, token_ids: TokenIds, block_size: int, num_previous: int | None) -> str:
    """Say why no more of a row is known.

    Args:
        num_known: number of leading tokens that are known.
        num_previous: number of tokens of the previous row by which the row is known; None: it is known by blocks.
    """
    if num_known == len(token_ids):
        return "the whole prompt was known"
    if num_previous is not None:
        if num_known == num_previous:
            return f"the last call's row ends at token {num_known}, and the prompt continues"
        return f"the prompt differs from the last call's tokens at token {num_known}"
    end = (num_known // block_size + 1) * block_size
    if hold_images(token_ids) and (image := said_image(token_ids, num_known, end)):
        return f"no cached block has {image} after these tokens"
    if end > len(token_ids):
        num_left = len(token_ids) - num_known
        return f"from token {num_known} on there is no full block: {num_left} of {block_size} tokens"
    if num_known == 0:
        return f"no cached block has these first {block_size} tokens under the same conditions"
    return f"no cached block continues with tokens {num_known} to {end - 1}"


def why_no_state(num_cached: int, num_known: int) -> str:
    """Say why a row with a state resumes after `num_known` tokens, though blocks of more are cached."""
    return f"blocks are cached up to token {num_cached}, but no state after token {num_known}"


def why_no_window(num_cached: int) -> str:
    """Say why a row with a window does not resume after what is cached."""
    return f"a window no longer shows what is before token {num_cached}, up to which blocks are cached"
