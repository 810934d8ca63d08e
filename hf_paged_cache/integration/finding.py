"""Finds what is known of rows that begin: in the pool, in lower tiers and in the rows of the call before.

What is found is leased, and whoever asks gives the leases back.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..call.found import PreviousRows
from ..call.match import Known, match
from ..call.request import RowInput
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from ..store.tier_load import Wanted, load


class Finding:
    """`Finding` finds what one store knows of rows that begin."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def load(self, rows: Sequence[RowInput], latest: int) -> Mapping[int, str]:
        """Load what lower tiers know of rows into the pool; return block -> the tier that it came from."""
        if not self._store.tiers or latest <= 0:
            return {}
        below = [Wanted(row.root, row.salt, row.token_ids, latest - row.pad) for row in rows if row.pad < latest]
        return load(self._store, below)

    def known(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        previous: Rows | None,
        latest: int,
        brought: Mapping[int, str] = MappingProxyType({}),
    ) -> list[Known]:
        """Return what is known of rows that begin; the caller gives the leases back.

        Args:
            previous: rows of the call before.
            latest: last column at which the rows may start.
            brought: see `match`.
        """
        chains = {} if previous is None or previous.state is None else previous.state.chains
        with self._store.lock:
            self._store.settle()
            exactly = latest if rows.is_exact else None
            known = match(self._store, inputs, PreviousRows(previous), chains, exactly, brought)
            self._store.pool.join_streams()
        return known

    def together(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        previous: Rows | None,
        latest: int,
        brought: Mapping[int, str] = MappingProxyType({}),
        size: int = 1,
    ) -> tuple[int, list[Known]]:
        """Return the last column at which all rows can start without a forward ahead, and what is known of the rows.

        The column is a multiple of `size`; 0: there is none.
        """
        while True:
            known = self.known(rows, inputs, previous, latest, brought)
            ends = [row.pad + of_row.num_tokens for row, of_row in zip(inputs, known, strict=True)]
            column = min(*ends, latest) // size * size
            if all(row.pad >= column for row in inputs):
                column = 0
            there = [row.pad >= column or end == column for row, end in zip(inputs, ends, strict=True)]
            if not column or not rows.is_exact or all(there):
                return column, known
            self.give_back(known)
            latest = column

    def give_back(self, known: Sequence[Known]) -> None:
        """Give back the leases of what was found."""
        for row in known:
            if row.lease is not None:
                with self._store.lock:
                    if not row.lease.is_freed:
                        self._store.leases.give_back(row.lease)
