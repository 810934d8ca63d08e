"""Whether a call fits in its worst case; that is reserved before anything is computed."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Protocol

from ..errors import OutOfBlocksError
from ..store.block_store import BlockStore
from ..store.holder import Demand, Holder
from ..store.window_groups import RowToCome
from .rows import Row, Rows


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What `generate` knows of the call that it begins.

    Attributes:
        num_prompt_columns: columns of the prompt, padding included; later ones are generated.
        max_columns: the most columns a row can get.
        num_rows: rows of the batch once beams and samples are expanded.
        end_of_sequence: token ids that end a row.
        are_known: there is a worst case to be admitted by.
    """

    num_prompt_columns: float = math.inf
    max_columns: float = math.inf
    num_rows: int = 0
    end_of_sequence: frozenset[int] = frozenset()

    are_known: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "are_known", self.max_columns < math.inf)


UNLIMITED = CallLimits()
"""Of forwards without `generate`, and of calls whose arguments do not tell."""


class CallToAdmit(Holder, Protocol):
    """A call that has prepared its rows."""

    store: BlockStore
    limits: CallLimits
    rows: Rows
    previous: Rows  # dropped before any block is taken
    keeps_past: bool
    demand: Demand | None  # of rows that begin, as long as nothing has changed


def demand_of(call: CallToAdmit, num_columns: int, *, num_prefixes: int = 0) -> Demand:
    """The worst case of a call that has prepared its rows; where its limits are not known, of its next forward.

    Where a row's prefix ends that is computed ahead nobody knows before: as after a chunk, it may need one window there and
    another at the end of the prompt.

    Args:
        num_columns: columns once its next forward has run.
        num_prefixes: that are computed ahead, each in a row of its own; windows count them.
    """
    store, limits = call.store, call.limits
    max_columns = max(num_columns, int(limits.max_columns)) if limits.are_known else num_columns
    windows: tuple[int, ...] = ()
    if store.windows.groups:
        in_chunks = num_prefixes > 0 or num_columns < limits.num_prompt_columns < math.inf
        to_come = _rows_to_come(call.rows, num_columns, max_columns, is_in_chunks=in_chunks)
        windows = store.windows.of_call(to_come, keeps_past=call.keeps_past, num_ahead=num_prefixes)
    released = num_blocks_held_only_by(call.previous.distinct, store)
    return Demand(num_blocks_to_take(call.rows, num_columns, max_columns, store.block_size), released, windows)


def _rows_to_come(rows: Rows, num_columns: int, max_columns: int, *, is_in_chunks: bool) -> Iterator[RowToCome]:
    uses, most_known = Counter(rows.alias), max((row.table.num_tokens for row in rows.distinct), default=0)
    # Several rows start where the one does that knows least, which may be anywhere in what another one knows.
    num_known = most_known if len(rows.distinct) == 1 or not most_known else None
    for number, row in enumerate(rows.distinct):
        num_prompt, most = max(0, num_columns - row.pad), max(0, max_columns - row.pad)
        yield RowToCome(num_prompt, most, uses[number], is_in_chunks, row.table.is_copied_next, num_known)


def num_blocks_to_take(rows: Rows, num_columns: int, max_columns: int, block_size: int) -> int:
    """Blocks that rows of a call may still take until each has `max_columns` columns.

    Aliases share the full blocks of their first `num_columns` columns and nothing else; a partial block that is held
    by others, too, is copied once more.
    """
    uses = Counter(rows.alias) if rows.is_aliased else None
    total = 0
    for index, row in enumerate(rows.distinct):
        table = row.table
        num_blocks = -(-max(0, max_columns - row.pad) // block_size)
        total += max(0, num_blocks - len(table.block_ids))
        if uses is not None:
            num_shared = max(0, min(num_columns, max_columns) - row.pad) // block_size
            total += (uses[index] - 1) * (num_blocks - num_shared)
        total += table.is_copied_next
    return total


def num_blocks_held_only_by(rows: Sequence[Row], store: BlockStore) -> int:
    """Blocks that would be given back if these rows were dropped."""
    holders: Counter[int] = Counter()
    for row in rows:
        holders.update(row.table.block_ids)
    return sum(map(eq, store.allocator.ref_counts(holders), holders.values()))


def would_fit(call: CallToAdmit, num_columns: int, num_shared_blocks: int, num_prefixes: int) -> bool:
    """Whether the worst case of the prepared rows fits, where they will hold so many blocks of each other.

    Args:
        num_columns, num_prefixes: as in `demand_of`.
    """
    store = call.store
    if num_prefixes and store.windows.groups:
        ahead = demand_of(call, num_columns, num_prefixes=num_prefixes)
        if store.windows.lacking(call, ahead.windows):
            return False
    if not call.limits.are_known:
        return True
    demand = call.demand or demand_of(call, num_columns)
    return store.can_have(call, demand._replace(num_blocks=demand.num_blocks - num_shared_blocks))


def admit_call(call: CallToAdmit, num_columns: int) -> None:
    """Reserve what a call may need whose limits are known, or refuse it. `num_columns` as in `demand_of`.

    Raises:
        OutOfBlocksError: nothing has changed.
    """
    what = f"this call ({rows_in_words(len(call.rows.alias))} of up to {call.limits.max_columns} tokens)"
    admit(call, call.demand or demand_of(call, num_columns), what)


def admit(call: CallToAdmit, demand: Demand, what: str) -> None:
    """Reserve a demand, or refuse it: see `require`."""
    grow_anew_for(call.store, call, demand)
    require(call.store, call, demand, what)
    call.store.reserve(call, demand.num_blocks, demand.windows)


def grow_anew_for(store: BlockStore, holder: Holder, demand: Demand) -> None:
    """Where memory ran out, and what would be refused for it comes now: let the pool try to grow once more."""
    if store.ran_out_of_memory and not store.can_have(holder, demand):
        store.grow_anew()


def renew_reservation(call: CallToAdmit, num_columns: int) -> None:
    """Rows have taken or given back blocks: reserve what their call may still need. `num_columns` as in `demand_of`."""
    if call.limits.are_known:
        most, size = max(num_columns, int(call.limits.max_columns)), call.store.block_size
        call.store.reserve(call, num_blocks_to_take(call.rows, num_columns, most, size))


def require(store: BlockStore, holder: Holder, demand: Demand, what: str) -> None:
    """Refuse what cannot have its blocks.

    Args:
        what: who asks, for the message.

    Raises:
        OutOfBlocksError: nothing has changed. With the arithmetic, but for a salted holder: whose the other blocks are,
            and how many, is not told.
    """
    if store.can_have(holder, demand):
        return
    num_blocks, num_released, windows = demand
    obtainable = store.num_obtainable_blocks(holder) + num_released
    if num_blocks <= obtainable:
        why = store.windows.lacking(holder, windows)
        raise OutOfBlocksError(
            f"{what} may need {'more blocks of layers with a window than can be had now' if holder.salt else why}. "
            "Ask for fewer new tokens or rows, or build the cache with a larger num_blocks or max_bytes"
        )
    if holder.salt:
        raise OutOfBlocksError(
            f"{what} may need {num_blocks} more blocks of {store.block_size} tokens, which cannot be had now. Ask for fewer "
            "new tokens or rows, "
            + ("unpin() what you can, " if store.pins.block_ids(holder.salt) else "")
            + "reset() caches whose calls are over, or ask the store's owner for more blocks"
        )
    previous = sum(other.num_previous_blocks() for other in store.holders() if other is not holder)
    used = [(previous, "by rows whose call is over, which their caches' reset() gives back"), (store.pins.num_blocks, "pinned")]  # fmt: skip
    details = ", ".join(f"{number} {how}" for number, how in used if number)
    in_use = f"{store.allocator.num_blocks_in_use - num_released} are in use" + (f" ({details})" if details else "")
    reserved = store.num_reserved_blocks(holder)
    if store.ran_out_of_memory:
        most = f"the {store.max_num_blocks} that there was memory for"
        or_else = "or free memory of the device"
    else:
        most, lacking = f"num_blocks={store.max_num_blocks}", num_blocks - int(obtainable)
        or_else = (
            f"or build the cache with num_blocks={(store.max_num_blocks or 0) + lacking} or more (or with max_bytes for so "
            "many)"
        )
    raise OutOfBlocksError(
        f"{what} may need {num_blocks} more blocks of {store.block_size} tokens, but {max(0, int(obtainable))} can be "
        f"had: of {most} one is the null block, {in_use}"
        + (f" and {reserved} are reserved for running calls" if reserved else "")
        + ". Ask for fewer new tokens or rows, "
        + ("unpin() what you can, " if store.pins.num_blocks else "")
        + or_else
    )


def rows_in_words(num_rows: int) -> str:
    """For messages."""
    return "1 row" if num_rows == 1 else f"{num_rows} rows"
