"""What an announced forward does to rows and blocks: rows begin or go on, take their blocks, and get their slots.

Functions over `Rows`, in the order in which `Call` uses them; each changes what its first line says. No state.
"""

from collections.abc import Sequence

from ..blocks import BlockTable
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError
from ..kv.slot_mapping import SlotMapping
from ..store.block_store import BlockStore, Holder
from .admission import num_blocks_held_only_by, num_blocks_to_take, require
from .call_state import CallLimits
from .plan import Groups, KnownRow, group_equal
from .prefix_match import Match, PreviousRows, match_longer, match_row
from .rows import Row, Rows
from .scheduled_forward import ForwardRequest


def begin_rows(store: BlockStore, request: ForwardRequest, ended: Sequence[Row]) -> tuple[Rows, list[tuple[int, str]]]:
    """Rows for a first forward, holding what is known of them; takes no fresh block.

    Returns:
        the rows, equal ones as aliases; and for each row of the batch, tokens found and why no more.
    """
    inputs = request.rows
    keys = [(row.root, row.pad, row.token_ids.tobytes()) for row in inputs]
    groups = group_equal(keys) if request.may_alias else each_alone(len(inputs))
    distinct: list[Row] = []
    stopped: list[str] = []
    kept = PreviousRows(ended)
    for member in groups.members:
        new = inputs[member]
        if request.bypass is None:
            match = match_row(store, new, kept)
        else:
            match = Match(BlockTable(store.allocator, new.root), request.bypass)
        row = Row(match.table, new.pad, new.root, new.first_position)
        if request.bypass is not None:
            row.stop_commits(0)
        distinct.append(row)
        stopped.append(match.stopped)
    matches = [(distinct[group].num_known, stopped[group]) for group in groups.group_of]
    return Rows(distinct, groups.group_of, 0), matches


def begin_rows_that_fit(
    store: BlockStore,
    holder: Holder,
    request: ForwardRequest,
    limits: CallLimits | None,
    *,
    num_columns: int,
    ended: Sequence[Row],
) -> tuple[Rows, list[tuple[int, str]]]:
    """`begin_rows`; but where too few blocks would be left, without what only ended rows know: it keeps a block from the
    call, to copy a part of it. What the store has of full blocks is found all the same.

    Args:
        num_columns: columns once the forward has run.
        ended: rows that are dropped before any block is taken.
    """
    rows, matches = begin_rows(store, request, ended)
    if ended and limits is not None:
        needed, released = blocks_needed(store, rows, limits, num_columns=num_columns, ended=ended)
        if needed > store.num_obtainable_blocks(holder) + released:
            rows.free()
            return begin_rows(store, request, ())
    return rows, matches


def admit(
    store: BlockStore, holder: Holder, rows: Rows, limits: CallLimits, *, num_columns: int, ended: Sequence[Row]
) -> None:
    """Promise the holder the blocks that its call may need in its worst case, or refuse the call.

    Args:
        num_columns: columns once the first forward has run.
        ended: rows that are dropped before any block is taken.
    Raises:
        OutOfBlocksError: nothing has changed.
    """
    if limits.max_columns is None:
        return
    needed, released = blocks_needed(store, rows, limits, num_columns=num_columns, ended=ended)
    max_columns = max(limits.max_columns, num_columns)
    require(store, holder, needed, released, f"this call ({rows_in_words(len(rows))} of up to {max_columns} tokens)")
    store.reserve(holder, needed)


def blocks_needed(
    store: BlockStore, rows: Rows, limits: CallLimits, *, num_columns: int, ended: Sequence[Row]
) -> tuple[int, int]:
    """Blocks that a call may need in its worst case, and blocks in use that it gives back before it takes any."""
    max_columns = max(num_columns, limits.max_columns or 0)
    needed = num_blocks_to_take(rows, num_columns=num_columns, max_columns=max_columns, block_size=store.block_size)
    return needed, num_blocks_held_only_by(ended, store)


def continue_rows(store: BlockStore, request: ForwardRequest, rows: Rows) -> list[int] | None:
    """Part rows that are no longer equal, and let each hold what more is known with its new tokens.

    Returns:
        new running row -> old running row, for the reader; None when they are the same.
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
            row.table = BlockTable(store.allocator, new.root)
            row.pad, row.root, row.first_position = new.pad, new.root, new.first_position
        if request.bypass is not None or new.root != row.root or new.pad != row.pad:
            row.stop_commits(row.num_confirmed)
        elif row.commit_end is None and request.num_new_columns > request.num_logits_needed:
            longer = match_longer(store, row, new.token_ids)
            if longer is not None:
                replaced, row.table = row.table, longer
                replaced.free()
    return sources


def take_blocks(
    store: BlockStore, holder: Holder, rows: Rows, new: Sequence[TokenIds], limits: CallLimits | None
) -> int:
    """Append each running row's new tokens to its table, with blocks to write them into, and make the copies due.

    Returns:
        the number of blocks taken.
    Raises:
        OutOfBlocksError: tables may have grown; the caller rolls back.
    """
    pairs = [(row, tail_behind(row, tokens)) for row, tokens in zip(rows.distinct, new, strict=True)]
    needed = sum(row.table.num_new_blocks_for_append(len(tail)) for row, tail in pairs)
    if needed and (limits is None or limits.max_columns is None):
        require(store, holder, needed, 0, f"this forward ({rows_in_words(len(pairs))})")
    store.make_room(needed)
    for row, tail in pairs:
        row.table.append_tokens(tail)
        if limits is not None and limits.end_of_sequence:
            stop_at_end_of_sequence(row, limits)
    store.make_copies()
    return needed


def is_step(request: ForwardRequest, rows: Rows) -> bool:
    """Whether each row only goes on, by one token, under the conditions it has run under: a decode step."""
    if request.num_new_columns != 1 or request.bypass is not None or rows.is_aliased:
        return False
    if len(request.rows) != len(rows):
        return False
    for row, new in zip(rows.distinct, request.rows, strict=True):
        if new.root != row.root or new.pad != row.pad or row.num_confirmed != len(row.table.token_ids):
            return False
        if len(new.token_ids) != 1:  # the column is padding
            return False
    return rows.num_columns > 0


def take_step(
    store: BlockStore, holder: Holder, rows: Rows, request: ForwardRequest, limits: CallLimits | None
) -> tuple[int, SlotMapping]:
    """What `take_blocks` and `slot_mapping` do, for a step: most rows have room for one token more.

    Returns:
        the number of blocks taken, and the slots of the tokens.
    Raises:
        OutOfBlocksError: tables may have grown; the caller rolls back.
    """
    slots: list[int] = []
    without_room: list[int] = []
    is_generated = limits is not None and rows.num_columns >= limits.num_prompt_columns
    ends = limits.end_of_sequence if limits is not None and is_generated else ()
    for number, (row, new) in enumerate(zip(rows.distinct, request.rows, strict=True)):
        token_id = new.token_ids[0]
        slot = row.table.append_in_place(token_id)
        if slot is None:
            slot = -1
            without_room.append(number)
        slots.append(slot)
        if token_id in ends:
            row.stop_commits(row.num_confirmed + 1)
    needed = 0
    if without_room:
        tables = [rows.distinct[number].table for number in without_room]
        needed = sum(table.num_new_blocks_for_append(1) for table in tables)
        if limits is None or limits.max_columns is None:
            require(store, holder, needed, 0, f"this forward ({rows_in_words(len(rows))})")
        store.make_room(needed)
        for number, table in zip(without_room, tables, strict=True):
            table.append_tokens(request.rows[number].token_ids)
            (slots[number],) = table.writable_slots(table.num_tokens - 1, table.num_tokens)
        store.make_copies()
    return needed, SlotMapping(slots)


def tail_behind(row: Row, tokens: TokenIds) -> TokenIds:
    """Of a forward's new tokens, those that the row's table does not have yet."""
    num_held = row.table.num_tokens - row.num_confirmed
    return tokens[num_held:] if num_held else tokens


def stop_at_end_of_sequence(row: Row, limits: CallLimits) -> None:
    """Tokens behind the first end of sequence that was generated are not committed: nobody will ask for them."""
    tokens = row.table.token_ids
    for position in range(max(0, limits.num_prompt_columns - row.pad, row.num_confirmed), len(tokens)):
        if tokens[position] in limits.end_of_sequence:
            row.stop_commits(position + 1)
            return


def slot_mapping(rows: Rows, known: Sequence[KnownRow], start: int, stop: int) -> SlotMapping:
    """Slots of all tokens that are not in the pool yet, and which of the forward's tokens they take."""
    slots: list[int] = []
    sources: list[int] = []
    num_columns = stop - start
    for number, (row, before) in enumerate(zip(rows.distinct, known, strict=True)):
        slots.extend(row.table.writable_slots(before.num_known, row.table.num_tokens))
        first = number * num_columns + before.pad + before.num_known - start
        sources.extend(range(first, (number + 1) * num_columns))
    return SlotMapping(slots, None if len(sources) == num_columns * len(known) else sources)


def rows_in_words(num_rows: int) -> str:
    """For messages."""
    return "1 row" if num_rows == 1 else f"{num_rows} rows"


def each_alone(num_rows: int) -> Groups:
    """Every row a group of its own."""
    return Groups(list(range(num_rows)), list(range(num_rows)))
