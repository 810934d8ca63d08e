"""Decides when rows are kept, and whether the model is still the one that computed them."""

from ..call.keep import keep
from ..rows.rows import Rows
from .parts import CallParts


def keep_rows(calls: CallParts, rows: Rows) -> None:
    """Keep the rows' complete columns, as far as they may be kept.

    A prompt is kept once it is complete: other calls may need it while this call goes on.
    """
    state, store = rows.state, calls.store
    rows.prompt_end = 0
    if not rows.is_open or state is None:
        return
    was_seen = not rows.is_source or rows.seen_same == rows.n
    rows.note_look(is_same=was_seen or is_same(calls, rows))
    with store.lock:
        if store.resets_of(calls.salt) != state.resets:
            rows.is_whole = False  # what was computed before the reset is to be forgotten
        if rows.is_source and rows.seen_same == rows.n:
            store.forget_other_weights(state.digest)
    keep(store, rows, state, calls.salt)


def keep_full_rows(calls: CallParts, rows: Rows) -> None:
    """Keep rows before they change places and some are given up, if each has filled a block since last time."""
    size = calls.store.block_size
    if rows.is_source and all(rows.n - row.pad >= row.kept + size for row in rows.prompts):
        keep_rows(calls, rows)


def leave_blocks(calls: CallParts, rows: Rows) -> None:
    """Let rows of a call that is over hold no blocks of a pool of which more than half is in use, or that has moved."""
    store, shared = calls.store, rows.shared
    if shared is None or not shared.leases:
        return
    with store.lock:
        most, in_use = store.budget.num_blocks, store.allocator.num_blocks_in_use
        has_grown = store.pool.all.capacity != shared.num_pool_blocks
    if has_grown or (most is not None and 2 * in_use > most):
        rows.make_dense()


def is_same(calls: CallParts, rows: Rows) -> bool:
    """Return whether the model is as it was when the rows began."""
    state, fingerprint = rows.state, calls.fingerprint
    # of a call of one forward, or where nobody could act between two
    is_one_forward = rows.num_forwards <= 1 or not (state.calls_back or rows.reads_all)
    if is_one_forward and state.was_alone and not fingerprint.may_change_in_a_forward():
        return True
    return bool(fingerprint.digest() == state.digest)
