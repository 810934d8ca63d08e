"""What a scheduled forward takes: the column that it starts at, the blocks of its rows, and the slots of its tokens. Functions over `Rows`."""

from collections.abc import Callable, Sequence
from typing import cast

from ..blocks.block_table import append_to_each
from ..blocks.tokens import TokenIds
from ..errors import ForwardMismatchError
from ..kv.slot_mapping import SlotMapping
from ..kv.transfers import Transfer
from ..store.block_store import BlockStore
from ..store.holder import Demand
from .admission import CallLimits, CallToAdmit, admit, grow_anew_for, require, rows_in_words
from .rows import Row, Rows
from .scheduled_forward import ForwardRequest


def reserve_forward(call: CallToAdmit, request: ForwardRequest) -> None:
    """Reserve the blocks that `take_blocks` will take, where the call has reserved none.

    Raises:
        OutOfBlocksError: nothing has changed.
    """
    needed = _num_new_blocks(_unseen(call.rows, request))
    demand = Demand(needed, 0, _windows_of(call, request, keeps_past=False))
    admit(call, demand, f"this forward ({rows_in_words(len(call.rows.distinct))})")


def _unseen(rows: Rows, request: ForwardRequest) -> list[tuple[Row, TokenIds]]:
    """The running rows, and of the new tokens those that their tables lack."""
    members = zip(rows.distinct, rows.members(), strict=True)
    return [(row, row.unseen(request.rows[member].token_ids)) for row, member in members]


def _num_new_blocks(unseen: Sequence[tuple[Row, TokenIds]]) -> int:
    return sum([row.table.num_new_blocks_for_append(len(tokens)) for row, tokens in unseen])


def _windows_of(call: CallToAdmit, request: ForwardRequest, *, keeps_past: bool) -> tuple[int, ...]:
    """The window blocks of a forward, of each group."""
    store, rows, spans = call.store, call.rows, []
    if not store.windows.groups:
        return ()
    for row, member in zip(rows.distinct, rows.members(), strict=True):
        stop = row.num_confirmed + len(request.rows[member].token_ids)
        spans.append((row.table.num_tokens, stop, row.table.is_copied_next))
    return store.windows.of_forward(spans, keeps_past=keeps_past)


def resumable_column(rows: Rows, before: int, start: int) -> int | None:
    """The last column of `[before, start]` that the windows of all rows allow to resume from; None where there is none.  Effects: none.

    Args:
        before: columns at which the rows stand.
    """
    column = start + 1
    while column > start:
        column = start
        for row in rows.distinct:
            num_tokens = max(0, start - row.pad)
            if (num_resumable := row.table.num_resumable_tokens(num_tokens)) < num_tokens:
                start = row.pad + num_resumable
                if start < before:
                    return None
    return start


def hold_windows(rows: Rows, before: int, start: int) -> int:
    """Say from which column each row's layers read on: from `start`, or from the last one before it that all windows allow, and no image goes
    over.

    Args:
        before: columns at which the rows stand.

    Raises:
        ForwardMismatchError: the rows cannot resume from there: a forward that skipped more of a prompt has died.
    """
    column = resumable_column(rows, before, start)
    if column is None:
        raise ForwardMismatchError(
            f"layers with a window no longer hold what is before column {before}, because a forward died that resumed "
            "further right; reset() the cache, or pass the whole prompt to generate again"
        )
    for row in rows.distinct:
        row.table.hold_window(max(0, column - row.pad))
    return column


def take_blocks(call: CallToAdmit, request: ForwardRequest) -> int:
    """Append each running row's new tokens to its table, with blocks to write them into; copies on write become due.

    Returns:
        the number of blocks taken.

    Raises:
        OutOfBlocksError: tables may have grown; the caller rolls back.
    """
    store, limits = call.store, call.limits
    unseen = _unseen(call.rows, request)
    num_taken = _num_new_blocks(unseen)
    windows: tuple[int, ...] = ()
    if store.windows.groups:
        windows = store.windows.reserved_for(call)
        if not limits.are_known:
            windows = _windows_of(call, request, keeps_past=call.keeps_past)
            store.windows.reserve(call, windows)
    _make_room(call, num_taken, windows)
    store.windows.count_to_come()
    for row, tokens in unseen:
        cut = None
        if call.keeps_past:  # back to the prompt's end, or else to where the forward began
            cut = max(row.num_confirmed, int(limits.num_prompt_columns) - row.pad if limits.are_known else 0)
        row.table.append_tokens(tokens, cut=cut)
        if limits.end_of_sequence:
            _stop_at_end_of_sequence(row, limits)
    return num_taken


def take_step(
    call: CallToAdmit, token_ids: Sequence[int], flush: Callable[[], None], transfer: Transfer | None = None
) -> tuple[int, SlotMapping]:
    """What `take_blocks` and `map_slots` do, where each row resumes by one generated token: most have room for it.

    Where the last block of one is full, it is committed with all that are. One that shares its last block with another
    row gets a copy.

    Args:
        token_ids: one a running row.
        flush: makes the pool catch up; called before a full block is committed.
        transfer: that the slots go with; None: one of their own.

    Returns:
        the number of blocks taken, and the slots of the tokens.

    Raises:
        OutOfBlocksError: tables may have grown; the caller rolls back.
    """
    running, ends = call.rows.distinct, call.limits.end_of_sequence
    slots: list[int | None] = []
    for row, token_id in zip(running, token_ids, strict=True):  # loops: it runs for every token
        slots.append(row.table.append_in_place(token_id))
    if not ends.isdisjoint(token_ids):
        for row, token_id in zip(running, token_ids, strict=True):
            if token_id in ends:
                row.stop_commits(row.num_confirmed + 1)
    num_taken = slots.count(None)
    if num_taken:
        waiting = [number for number, slot in enumerate(slots) if slot is None]
        if any(running[number].table.is_full for number in waiting):
            flush()
            call.rows.commit()
        _make_room(call, num_taken)
        taken = append_to_each([running[number].table for number in waiting], [token_ids[n] for n in waiting])
        for number, taken_slot in zip(waiting, taken, strict=True):
            slots[number] = taken_slot
    return num_taken, call.store.pool.map_slots(cast(list[int], slots), transfer=transfer)


def map_slots(
    store: BlockStore, rows: Rows, known_columns: Sequence[int], start: int, stop: int, transfer: Transfer | None = None
) -> SlotMapping:
    """Slots of all tokens that are not in the pool yet, and which of the forward's tokens they take."""
    slots: list[int] = []
    sources: list[int] = []
    num_columns = stop - start
    for number, (row, known) in enumerate(zip(rows.distinct, known_columns, strict=True)):
        slots.extend(row.table.writable_slots(known - row.pad, row.table.num_tokens))
        sources.extend(range(number * num_columns + known - start, (number + 1) * num_columns))
    are_all = len(sources) == num_columns * len(rows.distinct)
    return store.pool.map_slots(slots, None if are_all else sources, transfer)


def _make_room(call: CallToAdmit, needed: int, windows: tuple[int, ...] = ()) -> None:
    """Have the blocks that a forward takes.

    Where memory has run out, a first forward needs all that was reserved for its call, a later one only what it takes now.
    """
    store, rows, is_reserved = call.store, call.rows, call.limits.are_known
    demand = Demand(needed, 0, () if is_reserved else windows)
    grow_anew_for(store, call, demand)
    if needed and not is_reserved:
        require(store, call, demand, f"this forward ({rows_in_words(len(rows.distinct))})")
    store.make_room(needed)
    if store.ran_out_of_memory:  # fewer blocks may be there than were reserved
        what = f"this forward ({rows_in_words(len(rows.distinct))})"
        if not rows.num_columns:  # a first forward: its call must have all that it reserved
            demand = Demand(max(needed, store.num_blocks_reserved_for(call)), 0, windows)
            what = f"this call ({rows_in_words(len(rows))})"
        require(store, call, demand, what)


def _stop_at_end_of_sequence(row: Row, limits: CallLimits) -> None:
    """Tokens that follow the first end of sequence that was generated are not committed: nobody will ask for them."""
    tokens = row.table.token_ids
    first = max(0, min(limits.num_prompt_columns - row.pad, len(tokens)), row.num_confirmed)
    for position in range(int(first), len(tokens)):
        if tokens[position] in limits.end_of_sequence:
            row.stop_commits(position + 1)
            return
