"""Finds what is known of rows that begin: full blocks by their hashes, and rows of the call before token by token.

This changes nothing but who holds which block: a lease keeps the blocks that it names from being evicted or written.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..blocks import Allocation, BlockHash, HashChain, TokenIds, common_prefix_length
from ..blocks.image_tokens import end_of_image, filled_up, hold_images, said_image, whole_images
from ..kv.states import States
from ..rows.request import RowInput
from ..rows.rows import Rows
from ..store import tier_load
from ..store.block_store import BlockStore
from ..store.leases import Resumable
from ..store.tier_load import Wanted


class PreviousRow(NamedTuple):
    """`PreviousRow` is a row of the call before."""

    rows: Rows
    number: int
    root: bytes
    token_ids: TokenIds


def previous_rows(rows: Rows | None) -> list[PreviousRow]:
    """List the rows of the call before; there are none where these may hold something else than their tokens say."""
    found = list[PreviousRow]()
    if rows is not None and rows.is_source:
        for number, token_ids in enumerate(rows.ids.rows(rows.prompts, int(min(rows.n, rows.keep_end)))):
            found.append(PreviousRow(rows, number, rows.prompts[number].root, token_ids))
    return found


def closest_row(previous: Sequence[PreviousRow], new: RowInput) -> tuple[PreviousRow | None, int]:
    """Return the row with the longest prefix in common with a new row of the same root, if any, and its length."""
    closest, longest = None, -1
    for row in previous:
        if row.root == new.root and (num_common := common_prefix_length(row.token_ids, new.token_ids)) > longest:
            closest, longest = row, num_common
    return closest, max(0, longest)


class Source(NamedTuple):
    """`Source` is a row that has the first tokens of another."""

    rows: Rows
    number: int
    num_tokens: int


@dataclass(slots=True)
class Known:
    """`Known` says what is known of one row."""

    chain: HashChain | None  # the row's tokens and their hashes; where blocks were not asked, those of an earlier row
    lease: Allocation | None  # lease of the blocks that hold its first tokens; None: the blocks were not asked for
    num_in_blocks: int  # leading tokens that blocks hold
    previous: Source | None  # row of the call before that begins alike
    num_tokens: int  # leading tokens that are known, wherever
    num_found: int  # leading tokens that could be reused, if the row might start anywhere
    num_matched: int  # leading tokens in known blocks, whether layers with a window can resume after them or not
    stopped: str  # why no more of the row was known, before anything ran ahead
    states: States = field(default_factory=dict)  # what layers with a state carry after the tokens in blocks
    brought: Mapping[str, int] = field(default_factory=dict)  # lower tier -> tokens that came from there for this call
    ahead: Source | None = None  # row that ran first for this call

    def sources(self) -> list[Source]:
        """Return rows that have the row's first tokens."""
        return [source for source in (self.ahead, self.previous) if source is not None]

    def forget(self) -> None:
        """Let the row begin anew, whatever is known of it."""
        self.num_tokens = self.num_in_blocks = 0
        self.previous = self.ahead = None
        self.states = {}

    def limit(self, num_tokens: int) -> None:
        """Limit what the row knows to so many tokens: another rank knows no more."""
        if num_tokens < self.num_tokens:
            self.num_tokens, self.stopped = num_tokens, f"{self.stopped}; another rank's hit is shorter"

    def learn(self, ahead: Rows, number: int, num_tokens: int) -> None:
        """Note that so many tokens were computed first, in a row of these rows."""
        if num_tokens > self.num_tokens:
            self.ahead, self.num_tokens = Source(ahead, number, num_tokens), num_tokens


@dataclass(eq=False)
class Finding:
    """`Finding` finds what a store knows of rows that begin, and holds the leases of it until it is closed.

    What lower tiers know is loaded into the store. Rows that are exact start exactly where they are known, or anew.
    """

    store: BlockStore
    inputs: Sequence[RowInput]
    previous: Rows | None
    is_exact: bool
    known: list[Known] = field(default_factory=list)  # of each row; empty before the first look
    brought: Mapping[int, str] = field(default_factory=dict)  # block -> lower tier that it came from for this call

    def close(self) -> None:
        """Give back what is leased."""
        with self.store.lock:
            if self.previous is not None:
                self.previous.is_lent = False
            for row in self.known:
                if row.lease is not None and not row.lease.is_freed:
                    self.store.leases.give_back(row.lease)

    def look(self, latest: int) -> None:
        """Find what is known of rows that start at column `latest` at the latest."""
        store, previous = self.store, self.previous
        chains = {} if previous is None else previous.state.chains
        exactly, is_alone = latest if self.is_exact else None, len(self.inputs) == 1
        if self.known:
            self.close()
        elif store.tiers is not None:
            rows = [row for row in self.inputs if row.pad < latest]
            wanted = [Wanted(row.root, row.salt, row.token_ids, latest - row.pad) for row in rows]
            self.brought = tier_load.load(store, store.tiers, wanted)
        with store.lock:
            self.known = found = []
            for group in store.windows:
                group.settle()
            if previous is not None:
                previous.is_lent = True  # nobody moves these rows meanwhile
            before = previous_rows(previous)
            for row in self.inputs:
                known = known_of(store, row, chains, before, exactly, is_alone=is_alone)
                if self.brought and known.lease is not None:
                    tiers = Counter(self.brought[each] for each in known.lease.block_ids if each in self.brought)
                    known.brought = {name: number * store.block_size for name, number in tiers.items()}
                found.append(known)
            if store.pool.accelerators:
                store.pool.join_streams()

    def look_together(self, latest: int, size: int = 1) -> int:
        """Find what is known of rows that all start at one column without a forward ahead; return this column.

        It is the last such column, and a multiple of `size`; 0: there is none.
        """
        pads = [row.pad - self.store.rules.width for row in self.inputs]  # where rows may begin anew
        while True:
            self.look(latest)
            ends = []
            for row, pad, of_row in zip(self.inputs, pads, self.known, strict=True):
                ends.append(row.pad + of_row.num_tokens if of_row.num_tokens else max(0, pad))
            column = min(*ends, latest) // size * size
            if all(row.pad >= column for row in self.inputs):
                return 0
            there = [pad >= column or end == column for pad, end in zip(pads, ends, strict=True)]
            if not column or not self.is_exact or all(there):
                return column
            latest = column


def known_of(
    store: BlockStore,
    row: RowInput,
    chains: Mapping[bytes, HashChain],
    previous: Sequence[PreviousRow],
    latest: int | None,
    *,
    is_alone: bool = False,
    leases: bool = True,
) -> Known:
    """Find what is known of a row, and lease what blocks hold of it. The store's lock is held.

    Where layers have windows or carry states, the row starts exactly where it is known, at column `latest` at the
    latest; else that is None, and it starts after any of its known tokens. A row that runs alone asks no blocks where a
    row of the call before knows all of it.
    """
    size, tokens, chain, lease = store.block_size, row.token_ids, chains.get(row.root), None
    most = len(tokens) if latest is None else max(0, latest - row.pad)
    closest, num_common = closest_row(previous, row)
    begins_otherwise = closest is not None and not num_common and bool(closest.token_ids)
    num_there = min(num_common, most)
    if num_there < len(tokens):
        num_there = whole_images(tokens, num_there)
    if closest is not None and closest.rows.is_exact:
        # windows may have given up what is seen there; where layers carry states, only after the last token it goes on
        if not closest.rows.can_go_on_at(closest.rows.prompts[closest.number].pad + num_there):
            closest = None
    if closest is None:
        num_there = num_common = 0
    if latest is None:
        num_common = num_there
    num_held = num_whole = num_matched = 0
    if not is_alone or latest is not None or num_there < len(tokens):
        chain = chain_of(row.root, size, tokens, chains)
        hashes, (num_held, num_whole, num_matched) = _in_blocks(store, row, chain, most)
        if num_held and leases:
            lease = store.leases.take(hashes, row.salt, num_held)
    num_tokens = max(num_held, num_there)
    source = None if closest is None else Source(closest.rows, closest.number, num_there)
    known = Known(chain, lease, num_held, source, num_tokens, num_tokens, num_matched, "")
    if latest is not None and store.has_states:
        if lease is not None:
            known.states = store.snapshots.use(lease.block_ids[num_held // size - 1])
        if num_tokens < min(num_matched, most // size * size):
            known.stopped = f"blocks are cached up to token {num_matched}, but no state after token {num_tokens}"
            return known
        num_whole = num_matched
    known.num_found = max(num_held, num_whole, num_common, num_tokens)
    num_previous = None
    if closest is not None and (num_there > num_held or num_common > max(num_held, num_whole)):
        num_previous = len(closest.token_ids)
    known.stopped = "the whole prompt was known"
    if known.num_found < len(tokens):
        known.stopped = why_stopped(known.num_found, tokens, size, num_previous)
    if known.num_found < num_matched and known.num_found < (shown := whole_images(tokens, num_matched)):
        known.stopped = f"a window no longer shows what is before token {shown}, up to which blocks are cached"
    if begins_otherwise and not known.num_tokens:
        known.stopped += ", and the last call's begin otherwise"
    return known


def _in_blocks(store: BlockStore, row: RowInput, chain: HashChain, most: int) -> tuple[Sequence[BlockHash], Resumable]:
    """Return what blocks hold of a row that starts after at most `most` tokens, and the hashes of these blocks."""
    hashes, size, tokens = chain.hashes_of(), store.block_size, row.token_ids
    found = store.leases.look(hashes, row.salt, tokens, most)
    end = end_of_image(tokens, found.num_matched, found.num_matched + size) if row.holds_images else None
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
    """Say why no more of a row is known, by a previous row of `num_previous` tokens, or if that is None by blocks."""
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


def continuation(store: BlockStore, new: RowInput, num_tokens: int, last: Sequence[PreviousRow]) -> TokenIds:
    """Return how the closest of what a call would find continues after a row's first tokens, if it does."""
    row, num_common = closest_row(last, new)
    found = [row.token_ids[num_tokens:]] if row is not None and num_common >= num_tokens else []
    if num_tokens % store.block_size == 0:
        chain = HashChain(new.root, store.block_size, new.token_ids[:num_tokens])
        parent = chain.hashes_of()[-1].digest if num_tokens else new.root
        known = store.allocator.hashes(new.salt).values()
        found += [array("q", block_hash.token_bytes) for block_hash in known if block_hash.parent == parent]
    rest = new.token_ids[num_tokens:]
    return max(found, key=lambda tokens: common_prefix_length(tokens, rest), default=rest[:0])
