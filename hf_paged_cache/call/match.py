"""What is known of a row that begins: full blocks by their hashes, and the rows of the call before token by token.

Changes nothing but who holds which block: a lease keeps the blocks that it names from being evicted or written.
"""

from collections.abc import Mapping, Sequence

from ..blocks import Allocation, HashChain
from ..blocks.tokens import TokenIds, common_prefix_length
from ..rows.rows import Rows
from ..rows.windows import WindowColumns
from ..store.block_store import BlockStore
from .prefix_match import PreviousRows, why_stopped
from .scheduled_forward import RowInput


class PreviousRow:
    """A row of the call before, by its prefix key and its tokens.

    Attributes:
        number: among the rows of that call.
    """

    def __init__(
        self, number: int, root: bytes, tokens: TokenIds, pad: int = 0, windows: WindowColumns | None = None
    ) -> None:
        self.number, self.root, self.true_token_ids = number, root, tokens
        self._pad, self._windows = pad, windows

    def can_go_on_at(self, num_tokens: int) -> bool:
        """Whether another row may go on after so many of its tokens: not where layers with a window have given up what is seen there."""
        return self._windows is None or self._windows.can_go_on_at(self._pad + num_tokens)

    @property
    def num_true_tokens(self) -> int:
        """All of them."""
        return len(self.true_token_ids)


def previous_rows(rows: Rows | None) -> Sequence[PreviousRow]:
    """The rows of a call that is over, where what they hold is what their tokens say."""
    if rows is None or not rows.is_source:
        return ()
    tokens = rows.token_ids()
    windows = rows.windows
    return [
        PreviousRow(number, prompt.root, tokens[number], prompt.pad, windows)
        for number, prompt in enumerate(rows.prompts)
    ]


class Known:
    """What is known of one row.

    Attributes:
        chain: its tokens and their hashes.
        lease: of the blocks that hold its first tokens; None: they were not asked for.
        previous: number of the row of the call before that begins alike; None: there is none.
        num_common: tokens that it has in common with that row.
        ahead: rows that were computed first for this call, the number of one of them, and how many tokens of it this row has.
        num_in_blocks: tokens that blocks hold.
        num_tokens: leading tokens that are known, wherever.
        stopped: why it was known no further, before anything ran ahead.
    """

    __slots__ = ("ahead", "chain", "lease", "num_common", "num_in_blocks", "num_tokens", "previous", "stopped")

    def __init__(
        self, chain: HashChain, lease: Allocation | None, previous: PreviousRow | None, num_common: int
    ) -> None:
        self.chain, self.lease = chain, lease
        self.num_in_blocks = num_in_blocks = 0 if lease is None else len(lease.block_ids) * chain.block_size
        self.previous, self.num_common = None if previous is None else previous.number, num_common
        self.ahead: tuple[Rows, int, int] | None = None
        self.num_tokens, num_previous = num_in_blocks, None
        if previous is not None and num_common > num_in_blocks:
            self.num_tokens, num_previous = num_common, len(previous.true_token_ids)
        self.stopped = why_stopped(self.num_tokens, chain.token_ids, chain.block_size, num_previous)
        if previous is not None and not self.num_tokens and previous.true_token_ids:
            self.stopped += ", and the last call's begin otherwise"

    def forget(self) -> None:
        """The row begins anew, whatever is known of it."""
        self.num_tokens = self.num_in_blocks = self.num_common = 0
        self.previous = self.ahead = None

    def learn(self, ahead: Rows, number: int, num_tokens: int) -> None:
        """So many tokens were computed first, in a row of these rows."""
        if num_tokens > self.num_tokens:
            self.ahead, self.num_tokens = (ahead, number, num_tokens), num_tokens


def match(
    store: BlockStore,
    new: Sequence[RowInput],
    previous: Sequence[PreviousRow],
    chains: Mapping[bytes, HashChain],
    latest: int | None = None,
) -> list[Known]:
    """What is known of rows that begin. The store's lock is held.

    A row alone of which one of the call before knows more than blocks do holds none.

    Args:
        chains: root and tokens of rows of the call before -> their hashes, as far as they were computed.
        latest: the last column at which rows may start, where layers have windows: then they start exactly where they are known.

    Returns:
        of each row; its lease is the caller's to give back.
    """
    before, found = PreviousRows(previous), []
    for row in new:
        chain = _chain_of(row, store.block_size, chains)
        closest, num_common = before.closest(row)
        num_common, lease = max(0, num_common), None
        if latest is not None:
            most = max(0, latest - row.pad)
            num_common = min(num_common, most)
            if closest is not None and not closest.can_go_on_at(num_common):
                closest, num_common = None, 0
            lease = store.leases.take_resumable(
                chain.hashes_of(0, min(chain.num_full_blocks, most // store.block_size)), row.salt
            )
        elif len(new) > 1 or num_common % store.block_size == 0 or _is_known(store, chain, num_common, row.salt):
            lease = store.leases.take(chain.hashes_of(0, chain.num_full_blocks), row.salt)
        found.append(Known(chain, lease, closest, num_common))
    return found


def _is_known(store: BlockStore, chain: HashChain, token: int, salt: bytes) -> bool:
    """Whether the pool has the full block of this token of a row."""
    block = token // store.block_size
    return block < chain.num_full_blocks and bool(store.allocator.match_prefix(chain.hashes_of(block, block + 1), salt))


def _chain_of(row: RowInput, size: int, chains: Mapping[bytes, HashChain]) -> HashChain:
    """A row's tokens and their hashes; those of the tokens that it has in common with a row of before are not computed again."""
    before = chains.get(row.root)
    if before is None:
        chain = HashChain(row.root, size)
        chain.extend(row.token_ids)
        return chain
    chain = before.copy()  # who has that row may go on with it
    chain.truncate(common_prefix_length(chain.token_ids, row.token_ids))
    chain.extend(row.token_ids[len(chain) :])
    return chain
