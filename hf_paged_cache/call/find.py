"""Finds what is known of rows that begin: full blocks by their hashes, and rows of the call before token by token.

This changes nothing but who holds which block: a lease keeps the blocks that it names from being evicted or written.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..blocks import Allocation, BlockHash, HashChain
from ..blocks.hashing import tokens_of
from ..blocks.image_tokens import end_of_image, filled_up, hold_images, said_image, whole_images
from ..blocks.tokens import TokenIds, common_prefix_length
from ..kv.states import States
from ..rows.request import RowInput
from ..rows.rows import Rows
from ..store import tier_load
from ..store.block_store import BlockStore
from ..store.leases import Resumable
from ..store.tier_load import Wanted


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

    What lower tiers know is loaded into the store. Rows that are exact start exactly where they are known, or anew.
    """

    def __init__(
        self, store: BlockStore, inputs: Sequence[RowInput], latest: int, previous: Rows | None, *, is_exact: bool
    ) -> None:
        self.known: list[Known] = []  # of each row
        self._store, self.inputs, self._previous, self.is_exact = store, inputs, previous, is_exact
        self._brought: Mapping[int, str] = {}  # block -> lower tier that it has come from for this call
        if store.tiers is not None:
            wanted = [Wanted(row.root, row.salt, row.token_ids, latest - row.pad) for row in inputs if row.pad < latest]
            self._brought = tier_load.load(store, wanted)

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
        exactly, is_alone = latest if self.is_exact else None, len(self.inputs) == 1
        with store.lock:
            self._give_back()
            self.known = found = []
            store.settle()
            before = previous_rows(previous)
            for row in self.inputs:
                chain = chain_of(row.root, store.block_size, row.token_ids, chains)
                known = known_of(store, row, chain, before, exactly, is_alone=is_alone)
                if self._brought and known.lease is not None:
                    tiers = Counter(self._brought[each] for each in known.lease.block_ids if each in self._brought)
                    known.brought = {name: number * store.block_size for name, number in tiers.items()}
                found.append(known)
            store.pool.join_streams()

    def look_together(self, latest: int, size: int = 1) -> int:
        """Find what is known of rows that all start at one column without a forward ahead; return this column.

        It is the last such column, and a multiple of `size`; 0: there is none.
        """
        while True:
            self.look(latest)
            ends = [row.pad + of_row.num_tokens for row, of_row in zip(self.inputs, self.known, strict=True)]
            column = min(*ends, latest) // size * size
            if all(row.pad >= column for row in self.inputs):
                return 0
            there = [row.pad >= column or end == column for row, end in zip(self.inputs, ends, strict=True)]
            if not column or not self.is_exact or all(there):
                return column
            latest = column


def known_of(
    store: BlockStore,
    row: RowInput,
    chain: HashChain,
    previous: Sequence[PreviousRow],
    latest: int | None,
    *,
    is_alone: bool = False,
    leases: bool = True,
) -> Known:
    """Find what is known of a row. The store's lock is held.

    Args:
        previous: rows of the call before.
        latest: last column at which the row may start, where it starts exactly where it is known, because layers have
            windows or carry states. None: it may start after any of its known tokens, but for those inside an image.
        is_alone: blocks are of no use where a row of the call before knows more than they do.
        leases: what is found in blocks is leased; else nothing has changed.
    """
    size, tokens, lease = store.block_size, row.token_ids, None
    most = len(tokens) if latest is None else max(0, latest - row.pad)
    closest, num_common = closest_row(previous, row)
    begins_otherwise = closest is not None and not num_common and bool(closest.token_ids)
    are_images = hold_images(tokens)
    num_there = min(num_common, most)
    if are_images:
        num_there = whole_images(tokens, num_there)
    if closest is None or (latest is not None and not closest.can_go_on_at(num_there)):
        closest, num_there, num_common = None, 0, 0
    if latest is None:
        num_common = num_there
    block, asks = num_common // size, not is_alone or latest is not None or not num_common % size
    num_held = num_whole = num_matched = 0
    if not asks and block < len(tokens) // size:  # do blocks know more than that row?
        asks = bool(store.allocator.match_prefix(chain.hashes_of(block, block + 1), row.salt))
    if asks:
        hashes, (num_held, num_whole, num_matched) = _in_blocks(store, row, chain, most, are_images=are_images)
        if num_held and leases:
            lease = store.leases.take(hashes, row.salt, num_held)
    num_tokens = max(num_held, num_there)
    known = Known(chain, lease, num_held, closest, num_there, num_tokens, num_tokens, num_matched, "")
    if lease is not None and store.states:
        known.states = store.states.use(lease.block_ids, num_held)
    if store.states and num_tokens < min(num_matched, most // size * size):
        known.stopped = f"blocks are cached up to token {num_matched}, but no state after token {num_tokens}"
        return known
    num_whole = max(num_held, num_matched if store.states else num_whole)
    known.num_found = max(num_whole, num_common, num_tokens)
    num_previous = None
    if closest is not None and (num_there > num_held or num_common > num_whole):
        num_previous = len(closest.token_ids)
    known.stopped = why_stopped(known.num_found, tokens, size, num_previous)
    if known.num_found < (shown := whole_images(tokens, num_matched)):
        known.stopped = f"a window no longer shows what is before token {shown}, up to which blocks are cached"
    if begins_otherwise and not known.num_tokens:
        known.stopped += ", and the last call's begin otherwise"
    return known


def _in_blocks(
    store: BlockStore, row: RowInput, chain: HashChain, most: int, *, are_images: bool
) -> tuple[Sequence[BlockHash], Resumable]:
    """Return what blocks hold of a row that starts after at most `most` tokens, and the hashes of these blocks."""
    hashes, size, tokens = chain.hashes_of(), store.block_size, row.token_ids
    found = store.leases.look(hashes, row.salt, tokens, most)
    end = end_of_image(tokens, found.num_matched, found.num_matched + size) if are_images else None
    if end is not None and end <= most:  # the block that the image ends in may have been kept up to there
        up_to_end = HashChain(row.root, size, filled_up(tokens, end, size)).hashes_of()
        if store.leases.look(up_to_end, row.salt, tokens, end).num_tokens == end:
            return up_to_end, found._replace(num_tokens=end)
    return hashes, found


def chain_of(root: bytes, size: int, tokens: TokenIds, chains: Mapping[bytes, HashChain]) -> HashChain:
    """Return a row's tokens and their hashes, of which those are not computed again that a chain of its root has."""
    known = chains.get(root)
    return HashChain(root, size, tokens) if known is None else known.continued(tokens)


def why_stopped(num_known: int, token_ids: TokenIds, block_size: int, num_previous: int | None) -> str:
    """Say why no more of a row is known.

    It is known by a previous row of `num_previous` tokens, or, if that is None, by blocks.
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


class Found(NamedTuple):
    """`Found` says how many leading tokens of a row a call would find, and why no more."""

    num_tokens: int
    stopped: str
    tier: str | None = None  # furthest lower tier that some of them would come up from


def look_up(store: BlockStore, row: RowInput, previous: Sequence[PreviousRow], num_needed: int) -> Found:
    """Return what a call of one row would find that began now, whose last `num_needed` tokens run in any case.

    This changes nothing. The store's lock is held.
    """
    most, size = max(0, len(row.token_ids) - num_needed), store.block_size
    latest = most if store.groups else None
    known = known_of(store, row, chain_of(row.root, size, row.token_ids, {}), previous, latest, leases=False)
    below = tier_load.look_up(store, Wanted(row.root, row.salt, row.token_ids, most))
    if below is None or below[0] <= known.num_found:
        return Found(known.num_found, known.stopped)
    return Found(below[0], why_stopped(below[0], row.token_ids, size, None), below[1])


def continuation(store: BlockStore, new: RowInput, num_tokens: int, last: Sequence[PreviousRow]) -> TokenIds:
    """Return how the closest of what a call would find continues after a row's first `num_tokens` tokens, if it does.

    Cost: a SHA-256 for each block of the prefix, and a look at each block of the store.
    """
    row, num_common = closest_row(last, new)
    found = [row.token_ids[num_tokens:]] if row is not None and num_common >= num_tokens else []
    if num_tokens % store.block_size == 0:
        chain = HashChain(new.root, store.block_size, new.token_ids[:num_tokens])
        parent = chain.hashes_of()[-1].digest if num_tokens else new.root
        known = store.allocator.hashes(new.salt).values()
        found += [tokens_of(block_hash.token_bytes) for block_hash in known if block_hash.parent == parent]
    rest = new.token_ids[num_tokens:]
    return max(found, key=lambda tokens: common_prefix_length(tokens, rest), default=rest[:0])
