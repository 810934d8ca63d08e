"""What a call would find that began now. Effects: none; the store's lock is held by whoever asks.

While a call runs, its own rows are nobody's previous ones: of what it computes only committed blocks are found.
"""

from collections.abc import Sequence

from ..blocks.image_tokens import whole_images
from ..blocks.tokens import TokenIds
from ..store.tier_load import Wanted
from . import prefix_match
from .call import Call
from .match import PreviousRow
from .prefix_match import Found, PreviousRows, why_stopped
from .rows import Row
from .scheduled_forward import RowInput


def look_up(call: Call, new: RowInput, last: Sequence[PreviousRow] = ()) -> tuple[Found, str | None]:
    """What a call of one row would find, if it had room; and the furthest lower tier that some of it would come up from, if any.

    Args:
        last: the rows of the cache's last call, where that ran on rows of its own.
    """
    store, num_tokens = call.store, len(new.token_ids)
    are_running = bool(call.rows.alias) and call.states is not None and call.states.stands(call.rows)

    def num_at_end(row: Row) -> int | None:
        if are_running:
            return row.num_confirmed
        return None if row.origin is None else row.origin.num_tokens

    most = max(0, num_tokens - call.num_needed_of(num_tokens))
    found = prefix_match.look_up_row(store, new, _previous(call), most, num_at_end)
    closest, num_common = PreviousRows(last).closest(new)
    begins_otherwise = closest is not None and not num_common and closest.num_true_tokens
    if closest is not None:
        num_common = whole_images(new.token_ids, num_common)
        if closest.is_exact and not closest.can_go_on_at(min(num_common, most)):
            num_common = 0
    if closest is not None and num_common > found.num_tokens:
        why = why_stopped(num_common, new.token_ids, store.block_size, closest.num_true_tokens)
        found = Found(num_common, why)
    elif begins_otherwise and not found.num_tokens:
        found = found._replace(stopped=found.stopped + ", and the last call's begin otherwise")
    below = store.tiers.look_up(Wanted(new.root, new.salt, new.token_ids, most))
    if below is None or below[0] <= found.num_tokens:
        return found, None
    return prefix_match.found_below(store, new, below[0]), below[1]


def continuation(call: Call, new: RowInput, num_tokens: int, last: Sequence[PreviousRow] = ()) -> TokenIds:
    """How the closest of what a call would find continues after a row's first `num_tokens` tokens.

    Args:
        last: see `look_up`.
    """
    previous = PreviousRows(last) if last else _previous(call)
    return prefix_match.continuation(call.store, new, previous, num_tokens)


def _previous(call: Call) -> PreviousRows[Row]:
    rows = call.rows if call.rows.alias else call.previous
    return PreviousRows(() if call.is_in_use else rows.distinct)
