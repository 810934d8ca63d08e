"""Rows of a forward that is about to run: they begin or resume, and hold what is known of them. `schedule` comes next.

Takes no fresh block.
"""

from collections.abc import Sequence

from ..blocks import resumable
from ..blocks.image_tokens import end_of_image
from ..errors import CacheArgumentError
from ..store.block_store import BlockStore
from .admission import CallToAdmit, demand_of
from .prefix_match import Found, PreviousRows, hold_longer, match_row
from .rows import Origin, Row, Rows, group_equal
from .scheduled_forward import Chunks, ForwardRequest

_WINDOWS_ARE_FULL = "layers with a window have no room beside the window in which it would resume"


def begin_rows(store: BlockStore, request: ForwardRequest, previous: Sequence[Row] | None) -> tuple[Rows, list[Found]]:
    """Rows for a first forward, holding what is known of them; takes no fresh block.

    Args:
        previous: rows of the call before; None: nothing is looked for.

    Returns:
        the rows, equal ones as aliases; and what was found of each row of the batch.
    """
    inputs = request.rows
    keys = [(row.root, row.pad, row.token_ids.tobytes()) for row in inputs]
    groups = group_equal(keys if request.may_alias else range(len(inputs)))
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
        row = Row(table, new.pad, new.root, new.first_position, new.shift)
        row.origin = match.origin
        if request.has_images and not store.states:
            row.image_end = end_of_image(new.token_ids, 0, len(new.token_ids))
        if request.bypass is not None:
            row.stop_commits(0)
        _stop_after_chunks(row, request, 0)
        distinct.append(row)
        found.append(match)
    return Rows(distinct, groups.group_of, 0), [found[group] for group in groups.group_of]


def begin_rows_that_fit(call: CallToAdmit, request: ForwardRequest) -> list[Found]:
    """Begin a call's rows with what is known; but where too few blocks would be left, without what only previous rows know.

    Where windows lack blocks to see what is known and to keep what is new, all is computed.
    To resume from a previous row's last token keeps a block from the call, to copy a part of it. What the store has of
    full blocks is found all the same.

    Returns:
        what was found of each row of the batch.
    """
    store, found = call.store, list[Found]()
    for previous in (call.previous.distinct, (), None):
        call.rows.free()
        call.rows, found = begin_rows(store, request, previous)
        if not call.limits.are_known:
            break
        call.demand = demand_of(call, request.num_new_columns)
        if previous and store.can_have(call, call.demand):
            break
        if not previous and not store.windows.lacking(call, call.demand.windows):
            break
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
        all_part = request.num_new_columns == 1 or not request.may_alias
        keys = [(rows.alias[i], i if all_part else row.token_ids.tobytes()) for i, row in enumerate(inputs)]
        groups = group_equal(keys)
        if len(groups.members) != len(rows.distinct):
            sources, _ = rows.select(groups.members, groups.group_of)
    for row, member in zip(rows.distinct, rows.members(), strict=True):
        new = inputs[member]
        if not row.table.num_tokens:  # nothing but padding so far; there may be more now
            row.table = store.new_table(new.root, new.salt)
            row.pad, row.root, row.first_position, row.shift = new.pad, new.root, new.first_position, new.shift
        _stop_after_chunks(row, request, rows.num_columns)
        if request.bypass is not None or new.root != row.root or new.pad != row.pad:
            row.stop_commits(row.num_confirmed)
        elif row.commit_end is None and request.num_new_columns > request.num_logits_needed:
            hold_longer(store, row, new.token_ids)
    return sources


def begin_chunks_that_fit(call: CallToAdmit, request: ForwardRequest, chunks: Chunks) -> tuple[int, list[Found]]:
    """Begin a call's rows with what is known of all of them in whole chunks; where none are, or the call would not fit, with nothing.

    Args:
        request: of the whole prompt; the chunks that it needs logits of are not looked for.

    Returns:
        the columns that they begin with; and what was found of each row of the batch.
    """
    for previous in (call.previous.distinct, ()):
        call.rows, found = begin_rows(call.store, request, previous)
        latest = request.latest_start(0, request.num_logits_needed)
        column = _end_of_known_chunks(call.store, call.rows, chunks.size, latest)
        if column:
            cut_to_column(call.rows, column)
            has_tokens = any(row.num_known for row in call.rows.distinct)
            if has_tokens and call.store.can_have(call, demand_of(call, column + chunks.size)):
                return column, found
        call.rows.free()
        call.rows = Rows([], [], 0)
    return 0, []


def cut_to_column(rows: Rows, column: int) -> None:
    """Let rows that have just begun hold what they know before a column, and no more."""
    for row in rows.distinct:
        row.pad = min(row.pad, column)
        row.table.truncate(column - row.pad)
        row.num_known = row.table.num_tokens
        row.commit_end = None  # the next forward says what it may commit


def _end_of_known_chunks(store: BlockStore, rows: Rows, size: int, column: int) -> int:
    """The last column, up to `column`, at which a chunk ends and after which all rows can resume."""
    while column:
        column = column // size * size
        most = min(_resumable_column(store, row, column) for row in rows.distinct)
        if most == column:
            break
        column = most
    return column


def _resumable_column(store: BlockStore, row: Row, column: int) -> int:
    """The last column, up to `column`, after which a row can resume; what layers carry after padding nobody has kept."""
    if column <= row.pad:
        return 0 if store.states else column
    num_tokens = row.table.num_resumable_tokens(min(column - row.pad, row.table.num_tokens))
    if store.states:
        num_tokens = resumable((store.states.kept,), row.table.block_ids, num_tokens)
        row.origin = Origin(num_tokens, store.states.use(row.table.block_ids, num_tokens)) if num_tokens else None
    return row.pad + num_tokens


def _stop_after_chunks(row: Row, request: ForwardRequest, before: int) -> None:
    """What is computed in another shape than a whole chunk of the prompt is never found under the root of chunks."""
    if request.chunks is not None:
        row.stop_commits(max(0, request.chunks.commit_end(before, request.num_new_columns) - row.pad))
