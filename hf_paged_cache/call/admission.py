"""Whether a call fits in its worst case, before it computes anything. Arithmetic only; promises are kept by the store."""

from collections import Counter
from collections.abc import Sequence

from ..errors import OutOfBlocksError
from ..store.block_store import BlockStore, Holder
from .call_state import CallLimits
from .rows import Row, Rows


def num_blocks_to_take(rows: Rows, *, num_columns: int, max_columns: int, block_size: int) -> int:
    """Blocks that rows of a call may still take until each has `max_columns` columns.

    Aliases share the full blocks of their first `num_columns` columns and nothing else; a partial block that is held
    by others, too, is copied once more.
    """
    uses = Counter(rows.alias)
    total = 0
    for index, row in enumerate(rows.distinct):
        num_blocks = -(-max(0, max_columns - row.pad) // block_size)
        num_shared = max(0, min(num_columns, max_columns) - row.pad) // block_size
        total += max(0, num_blocks - len(row.table.block_ids)) + (uses[index] - 1) * (num_blocks - num_shared)
        if row.table.num_tokens % block_size and row.table.num_new_blocks_for_append(1):
            total += 1
    return total


def renew_reservation(
    store: BlockStore, holder: Holder, rows: Rows, limits: CallLimits | None, num_columns: int | None = None
) -> None:
    """Whatever blocks the rows took or gave back, keep those that their call may still need in its worst case.

    Args:
        num_columns: columns of the rows with those that are announced; None: those confirmed.
    """
    if limits is None or limits.max_columns is None:
        return
    num_columns = rows.num_columns if num_columns is None else num_columns
    max_columns = max(num_columns, limits.max_columns)
    store.reserve(
        holder,
        num_blocks_to_take(rows, num_columns=num_columns, max_columns=max_columns, block_size=store.block_size),
    )


def num_blocks_held_only_by(rows: Sequence[Row], store: BlockStore) -> int:
    """Blocks that would be given back if these rows were dropped."""
    holders = Counter(block_id for row in rows for block_id in row.table.block_ids)
    return sum(1 for block_id, count in holders.items() if store.allocator.ref_count(block_id) == count)


def require(store: BlockStore, holder: Holder, num_blocks: int, num_released: int, what: str) -> None:
    """Refuse what cannot have its blocks.

    Args:
        num_released: blocks in use that the caller gives back before it takes any.
        what: who asks, for the message.
    Raises:
        OutOfBlocksError: with the arithmetic; nothing has changed.
    """
    obtainable = store.num_obtainable_blocks(holder) + num_released
    if num_blocks <= obtainable:
        return
    ended = sum(other.num_previous_blocks() for other in store.holders() if other is not holder)
    used = [(ended, "by ended rows of other caches, which reset() gives back"), (store.pins.num_blocks, "pinned")]
    details = ", ".join(f"{number} {how}" for number, how in used if number)
    in_use = f"{store.allocator.num_blocks_in_use - num_released} are in use" + (f" ({details})" if details else "")
    promised = store.num_reserved_blocks(holder)
    raise OutOfBlocksError(
        f"{what} may need {num_blocks} more blocks of {store.block_size} tokens, but {max(0, int(obtainable))} can be "
        f"had: of num_blocks={store.num_blocks} one is reserved, {in_use}"
        + (f" and {promised} are promised to running calls" if promised else "")
        + ". Ask for fewer new tokens or rows, "
        + ("unpin() what you can, " if store.pins.num_blocks else "")
        + f"or build the cache with num_blocks={store.num_blocks + num_blocks - int(obtainable)} or more (or with max_bytes "
        "for so many)"
    )
