"""Decides when rows are kept, and whether the model is still the one that computed them."""

import math
from functools import partial

from ..call.keep import keep
from ..model.fingerprint import Fingerprint
from ..rows.rows import Rows
from ..rows.shared import SharedColumns
from ..store.block_store import BlockStore


class Keeping:
    """`Keeping` keeps what the rows of one cache have computed, if the model was the same all the time."""

    def __init__(self, store: BlockStore, fingerprint: Fingerprint, salt: bytes) -> None:
        self._store, self._fingerprint, self._salt = store, fingerprint, salt

    def keep(self, rows: Rows) -> None:
        """Keep the rows' complete columns, as far as they may be kept."""
        state = rows.state
        if not rows.is_open or state is None:
            return
        was_seen = not rows.is_source or rows.seen_same == rows.n
        rows.note_look(is_same=was_seen or self.is_same(rows))
        with self._store.lock:
            if not self._is_as_before(state.resets):
                rows.is_whole = False  # what was computed before the reset is to be forgotten
        limits = state.limits
        prompt = 0 if math.isinf(limits.num_prompt_columns) else int(limits.num_prompt_columns)

        def make_room(num_blocks: int) -> None:
            roots = partial(self._fingerprint.roots_of_other_weights, state.digest)
            self._store.forget_other_weights(state.digest, num_blocks, roots)

        is_wanted, stop = partial(self._is_as_before, state.resets), rows.num_true_columns
        keep(self._store, rows, stop, self._salt, state.chains, limits.end_of_sequence, prompt, make_room, is_wanted)

    def keep_prompt(self, rows: Rows) -> None:
        """Keep a prompt once it is complete: other calls may need it while this call goes on."""
        rows.prompt_end = 0
        self.keep(rows)

    def keep_full(self, rows: Rows) -> None:
        """Keep rows before they change places and some are given up, if each has filled a block since last time."""
        size = self._store.block_size
        if rows.is_source and all(rows.n - row.pad >= row.kept + size for row in rows.prompts):
            self.keep_prompt(rows)

    def keep_ahead(self, rows: Rows, resets: tuple[int, int]) -> None:
        """Keep what rows that run ahead have computed, unless all was to be forgotten since `resets` were read."""
        keep(self._store, rows, rows.n, self._salt, {}, is_wanted=partial(self._is_as_before, resets))

    def keep_at_the_end(self, rows: Rows) -> None:
        """Keep what is complete at the end of a call. If the pool is crowded, the rows then hold no blocks."""
        self.keep(rows)
        if rows.shared is not None and self._is_crowded(rows.shared):
            rows.make_dense()

    def is_same(self, rows: Rows) -> bool:
        """Return whether the model is as it was when the rows began."""
        state = rows.state
        # of a call of one forward, or where nobody could act between two
        is_one_forward = rows.num_forwards <= 1 or not (state.calls_back or rows.reads_all)
        if is_one_forward and state.was_alone and not self._fingerprint.may_change_in_a_forward():
            return True
        return bool(self._fingerprint.digest() == state.digest)

    def _is_as_before(self, resets: tuple[int, int]) -> bool:
        """Return whether nothing was to be forgotten since `resets` were read. The store's lock is held."""
        return self._store.resets_of(self._salt) == resets

    def _is_crowded(self, shared: SharedColumns) -> bool:
        """Return whether rows hold blocks of a pool of which more than half is in use, or whose memory is another."""
        with self._store.lock:
            most, in_use = self._store.max_num_blocks, self._store.allocator.num_blocks_in_use
            has_grown = self._store.pool.all.capacity != shared.num_pool_blocks
        return bool(shared.leases) and (has_grown or (most is not None and 2 * in_use > most))
