"""Rows of a forward that is about to run: they begin or resume, and hold what is known of them. `schedule` comes next.

Takes no fresh block.
"""

from collections.abc import Sequence

from ..blocks.image_tokens import end_of_image
from ..errors import CacheArgumentError
from ..store.block_store import BlockStore
from .admission import CallToAdmit, demand_of
from .prefix_match import Found, PreviousRows, hold_longer, match_row
from .rows import Row, Rows, group_equal
from .scheduled_forward import ForwardRequest

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
        if request.bypass is not None or new.root != row.root or new.pad != row.pad:
            row.stop_commits(row.num_confirmed)
        elif row.commit_end is None and request.num_new_columns > request.num_logits_needed:
            hold_longer(store, row, new.token_ids)
    return sources
