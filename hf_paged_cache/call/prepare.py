"""What a scheduled forward does to rows and blocks: rows begin or go on, take their blocks, and get their slots.

Functions over `Rows`, in the order in which `Call` uses them. No state.
"""

from collections.abc import Callable, Sequence

from ..errors import CacheArgumentError, ForwardMismatchError
from ..kv.slot_mapping import SlotMapping
from ..kv.transfers import Transfer
from ..store.block_store import BlockStore
from ..store.holder import Demand, Holder
from .admission import (
    CallLimits,
    CallToAdmit,
    demand_of_call,
    grow_anew_for,
    is_copied,
    require,
    rows_in_words,
    would_fit,
)
from .prefix_match import Found, PreviousRows, hold_longer, match_row
from .rows import Row, Rows
from .schedule import each_alone, group_equal
from .scheduled_forward import ForwardRequest

_WINDOWS_ARE_FULL = "layers with a window have no room beside the window in which it would go on"


def begin_rows(store: BlockStore, request: ForwardRequest, previous: Sequence[Row] | None) -> tuple[Rows, list[Found]]:
    """Rows for a first forward, holding what is known of them; takes no fresh block.

    Args:
        previous: rows of the call before; None: nothing is looked for.

    Returns:
        the rows, equal ones as aliases; and what was found of each row of the batch.
    """
    inputs = request.rows
    keys = [(row.root, row.pad, row.token_ids.tobytes()) for row in inputs]
    groups = group_equal(keys) if request.may_alias else each_alone(len(inputs))
    distinct: list[Row] = []
    found: list[Found] = []
    kept = PreviousRows(previous or ())
    why_none = request.bypass or (_WINDOWS_ARE_FULL if previous is None else None)
    for member in groups.members:
        new = inputs[member]
        if why_none is None:
            table, match = match_row(store, new, kept)
        else:
            table, match = store.new_table(new.root, new.salt), Found(0, why_none)
        row = Row(table, new.pad, new.root, new.first_position)
        row.origin = match.origin
        if request.bypass is not None:
            row.stop_commits(0)
        distinct.append(row)
        found.append(match)
    return Rows(distinct, groups.group_of, 0), [found[group] for group in groups.group_of]


def begin_rows_that_fit(call: CallToAdmit, request: ForwardRequest) -> list[Found]:
    """Begin a call's rows with what is known; but where too few blocks would be left, without what only previous rows know.

    Where windows lack blocks to see what is known and to keep what is new, all is computed.
    To go on from a previous row's last token keeps a block from the call, to copy a part of it. What the store has of
    full blocks is found all the same.

    Returns:
        what was found of each row of the batch.
    """
    store, previous, num_columns = call.store, call.previous.distinct, request.num_new_columns
    call.rows, found = begin_rows(store, request, previous)
    if not call.limits.are_known:
        return found
    call.demand = demand_of_call(call, num_columns, previous)
    if previous and not would_fit(call, num_columns, 0):
        call.rows.free()
        call.rows, found = begin_rows(store, request, ())
        call.demand = demand_of_call(call, num_columns, previous)
    if store.windows.lacking(call, call.demand.windows):
        call.rows.free()
        call.rows, found = begin_rows(store, request, None)
        call.demand = demand_of_call(call, num_columns, previous)
    return found


def continue_rows(store: BlockStore, request: ForwardRequest, rows: Rows) -> list[int] | None:
    """Part rows that are no longer equal, and let each hold what more is known with its new tokens.

    Returns:
        new running row -> old running row, for the view; None when they are the same.

    Raises:
        CacheArgumentError: another number of rows.
    """
    inputs = request.rows
    if len(inputs) != len(rows):
        raise CacheArgumentError(f"the cache runs {len(rows)} rows, got {len(inputs)}; reset() it for another batch")
    sources = None
    if rows.is_aliased:
        if request.num_new_columns == 1 or not request.may_alias:
            groups = each_alone(len(rows))
        else:
            groups = group_equal([(rows.alias[i], row.token_ids.tobytes()) for i, row in enumerate(inputs)])
        if len(groups.members) != len(rows.distinct):
            sources = rows.regroup(groups.members, groups.group_of)
    for row, member in zip(rows.distinct, rows.members(), strict=True):
        new = inputs[member]
        if not row.table.num_tokens:  # nothing but padding so far; there may be more now
            row.table = store.new_table(new.root, new.salt)
            row.pad, row.root, row.first_position = new.pad, new.root, new.first_position
        if request.bypass is not None or new.root != row.root or new.pad != row.pad:
            row.stop_commits(row.num_confirmed)
        elif row.commit_end is None and request.num_new_columns > request.num_logits_needed:
            hold_longer(store, row, new.token_ids)
    return sources


def reserve_forward(store: BlockStore, holder: Holder, rows: Rows, request: ForwardRequest) -> None:
    """Reserve the blocks that `take_blocks` will take, where the call has reserved none.

    Raises:
        OutOfBlocksError: nothing has changed.
    """
    members = zip(rows.distinct, rows.members(), strict=True)
    needed = sum(
        row.table.num_new_blocks_for_append(len(row.unseen(request.rows[member].token_ids))) for row, member in members
    )
    demand = Demand(needed, 0, _windows_of(store, rows, request))
    grow_anew_for(store, holder, demand)
    require(store, holder, demand, f"this forward ({rows_in_words(len(rows.distinct))})")
    store.reserve(holder, needed)


def _windows_of(store: BlockStore, rows: Rows, request: ForwardRequest, *, keeps_past: bool = False) -> tuple[int, ...]:
    """The window blocks of a forward, of each group."""
    if not store.windows:
        return ()
    spans = [
        (
            row.table.num_tokens,
            row.num_confirmed + len(request.rows[member].token_ids),
            is_copied(row.table, store.block_size),
        )
        for row, member in zip(rows.distinct, rows.members(), strict=True)
    ]
    return store.windows.of_forward(spans, keeps_past=keeps_past)


def hold_windows(rows: Rows, before: int, start: int) -> int:
    """Say from which column each row's layers read on: from `start`, or from the last one before it that all windows allow.

    Args:
        before: columns at which the rows stand.

    Raises:
        ForwardMismatchError: the rows cannot go on from there: a forward that skipped more of a prompt has died.
    """
    column = start + 1
    while column > start:
        column = start
        for row in rows.distinct:
            num_tokens = max(0, start - row.pad)
            if (num_resumable := row.table.num_resumable_tokens(num_tokens)) < num_tokens:
                start = max(before, row.pad + num_resumable)
    for row in rows.distinct:
        num_tokens = max(0, start - row.pad)
        if row.table.num_resumable_tokens(num_tokens) < num_tokens:
            raise ForwardMismatchError(
                f"layers with a window no longer hold what is before column {start}, because a forward died that went on "
                "further right; reset() the cache, or pass the whole prompt to generate again"
            )
        row.table.hold_window(num_tokens)
    return start


def take_blocks(
    store: BlockStore,
    holder: Holder,
    rows: Rows,
    request: ForwardRequest,
    limits: CallLimits,
    *,
    keeps_past: bool = False,
) -> int:
    """Append each running row's new tokens to its table, with blocks to write them into; copies on write become due.

    Args:
        keeps_past: what follows the prompt may be taken back.

    Returns:
        the number of blocks taken.

    Raises:
        OutOfBlocksError: tables may have grown; the caller rolls back.
    """
    members = zip(rows.distinct, rows.members(), strict=True)
    unseen = [(row, row.unseen(request.rows[member].token_ids)) for row, member in members]
    num_taken = sum(row.table.num_new_blocks_for_append(len(tokens)) for row, tokens in unseen)
    windows: tuple[int, ...] = ()
    if store.windows:
        windows = store.windows.reserved_for(holder)
        if not limits.are_known:
            windows = _windows_of(store, rows, request, keeps_past=keeps_past)
            store.windows.reserve(holder, windows)
    _make_room(store, holder, num_taken, rows, limits, windows)
    store.windows.count_to_come()
    for row, tokens in unseen:
        cut = None
        if keeps_past:  # back to the prompt's end, or else to where the forward began
            cut = max(row.num_confirmed, int(limits.num_prompt_columns) - row.pad if limits.are_known else 0)
        row.table.append_tokens(tokens, cut=cut)
        if limits.end_of_sequence:
            _stop_at_end_of_sequence(row, limits)
    return num_taken


def take_step(
    store: BlockStore,
    holder: Holder,
    rows: Rows,
    token_ids: Sequence[int],
    limits: CallLimits,
    flush: Callable[[], None],
    transfer: Transfer | None = None,
) -> tuple[int, SlotMapping]:
    """What `take_blocks` and `map_slots` do, where each row goes on by one generated token: most have room for it.

    Where one has not, its last block is full, and is committed with all that are.

    Args:
        flush: writes to the pool what it has not got yet, before blocks are committed.

    Returns:
        the number of blocks taken, and the slots of the tokens.

    Raises:
        OutOfBlocksError: tables may have grown; the caller rolls back.
    """
    running, ends = rows.distinct, limits.end_of_sequence
    found = [row.table.append_in_place(token_id) for row, token_id in zip(running, token_ids, strict=True)]
    if not ends.isdisjoint(token_ids):
        for row, token_id in zip(running, token_ids, strict=True):
            if token_id in ends:
                row.stop_commits(row.num_confirmed + 1)
    num_taken = found.count(None)
    if num_taken:
        flush()
        rows.commit()
        _make_room(store, holder, num_taken, rows, limits)
    slots = [
        running[number].table.append_token(token_ids[number]) if slot is None else slot
        for number, slot in enumerate(found)
    ]
    return num_taken, store.pool.map_slots(slots, transfer=transfer)


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


def _make_room(
    store: BlockStore,
    holder: Holder,
    needed: int,
    rows: Rows,
    limits: CallLimits,
    windows: tuple[int, ...] = (),
) -> None:
    """Have the blocks that a forward takes.

    Where memory has run out, a first forward needs all that was reserved for its call, a later one only what it takes now.
    """
    demand, what = (
        Demand(needed, 0, () if limits.are_known else windows),
        f"this forward ({rows_in_words(len(rows.distinct))})",
    )
    grow_anew_for(store, holder, demand)
    if needed and not limits.are_known:  # nothing was reserved
        require(store, holder, demand, what)
    store.make_room(needed)
    if store.ran_out_of_memory:  # fewer blocks may be there than were reserved
        if not rows.num_columns:  # a first forward: its call must have all that it reserved
            demand = Demand(max(needed, store.num_blocks_reserved_for(holder)), 0, windows)
            what = f"this call ({rows_in_words(len(rows))})"
        require(store, holder, demand, what)


def _stop_at_end_of_sequence(row: Row, limits: CallLimits) -> None:
    """Tokens that follow the first end of sequence that was generated are not committed: nobody will ask for them."""
    tokens = row.table.token_ids
    for position in range(
        int(max(0, min(limits.num_prompt_columns - row.pad, len(tokens)), row.num_confirmed)), len(tokens)
    ):
        if tokens[position] in limits.end_of_sequence:
            row.stop_commits(position + 1)
            return
