"""Finds what is known of rows that begin: in the pool, in lower tiers and in the rows of the call before."""

from collections.abc import Sequence

from ..call.found import PreviousRows
from ..call.match import Known, match
from ..call.request import RowInput
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from ..store.tier_load import Wanted, load


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
        below = [Wanted(row.root, row.salt, row.token_ids, latest - row.pad) for row in inputs if row.pad < latest]
        self._brought = load(store, below) if store.tiers and below else {}

    def __enter__(self) -> "Finding":
        self._lend(True)
        return self

    def __exit__(self, *raised: object) -> None:
        self._lend(False)
        self._give_back()

    def _lend(self, is_lent: bool) -> None:
        """Note whether the rows of the call before are read, so that nobody moves them meanwhile."""
        if self._previous is not None:
            with self._store.lock:
                self._previous.is_lent = is_lent

    def _give_back(self) -> None:
        for row in self.known:
            if row.lease is not None:
                with self._store.lock:
                    if not row.lease.is_freed:
                        self._store.leases.give_back(row.lease)

    def look(self, latest: int) -> None:
        """Find what is known of rows that start at column `latest` at the latest."""
        self._give_back()
        chains = {} if self._previous is None or self._previous.state is None else self._previous.state.chains
        exactly = latest if self._is_exact else None
        with self._store.lock:
            self._store.settle()
            before = PreviousRows(self._previous)
            self.known = match(self._store, self.inputs, before, chains, exactly, self._brought)
            self._store.pool.join_streams()

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
