"""Fills rows that begin with what is known of them: from leased blocks, rows that ran ahead, or the call before.

The memory of the call before becomes the rows' own where they go on in it: then nothing is copied at all.
"""

import math
from collections.abc import Sequence

from ..blocks import Window, WindowBlocks
from ..kv.block_pool import Slab
from ..kv.states import States, row_of, stacked
from ..rows import memory
from ..rows.layers import SPARE, Group
from ..rows.memory import Shape
from ..rows.request import RowInput
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .find import Known
from .share import share_known

_MOST_MAPPED_AHEAD = 4096  # columns made ahead for shorter prompts, on a host


def fill(
    store: BlockStore,
    rows: Rows,
    inputs: Sequence[RowInput],
    known: Sequence[Known],
    start: int,
    stop: int,
    *,
    takes_over: bool = False,
) -> None:
    """Let rows begin with their columns before `start`, all of which are known, and a forward up to `stop` follow.

    With `takes_over`, the memory of the call before may become these rows'.
    """
    slabs, most = store.pool.all.slabs, rows.state.limits.max_columns
    # an accelerator takes every byte when it is asked for; a host may refuse to map what nobody would have written
    ahead = max(256, stop // 4) if store.pool.accelerators else max(_MOST_MAPPED_AHEAD, stop)
    wanted = stop + SPARE if math.isinf(most) else min(max(stop, int(most)), stop + ahead)
    room = max(start, wanted)
    if not start:
        rows.all.take(memory.make(memory.shapes_of_slabs(slabs), len(inputs), wanted) if slabs else [], 0)
        rows.begin(inputs, 0, wanted)
        return
    shared = None
    if len(inputs) > 1 and rows.may_be_lazy and rows.captured is None:
        shared = share_known(store, inputs, known, start, rows.looks, rows.copies or range(len(inputs)))
    done = 0  # column up to which all rows have the memory of the call before
    if takes_over and shared is None:
        done = _take_over(rows, inputs, known, start, slabs)
    if done:
        if room > rows.all.room_end:
            rows.all.make_room(room, done, wanted)
    elif shared is not None:
        first = shared.plan.first_own
        rows.share(shared, memory.make(memory.shapes_of_slabs(slabs), len(inputs), room - first), start)
    else:
        rows.all.take(memory.make(_shapes(slabs, known, None), len(inputs), room), start)
    for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
        first = max(done, row.pad if shared is None else shared.plan.ends[number])
        if first < start:
            _fill_row(store, rows.all, number, row.pad, of_row, first, start)
    for blocks in store.windows:
        group = rows.windows.get(blocks.window)
        if group is None:
            continue
        if done and known[0].previous is not None:
            of_call_before = known[0].previous.rows.windows[blocks.window]
            group.take(of_call_before.memory, start, of_call_before.base)
            continue
        slabs = store.pool.groups[blocks.name].slabs
        group.make_window(_shapes(slabs, known, blocks.window), len(inputs), start, room)
        for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
            _fill_window(store, group, slabs, blocks, number, row.pad, of_row, start)
    if rows.states is not None:
        of_rows = [_states_of(of_row, start - row.pad) for row, of_row in zip(inputs, known, strict=True)]
        rows.states.put(stacked(of_rows))
    rows.begin(inputs, start, wanted)


def _shapes(slabs: Sequence[Slab], known: Sequence[Known], window: Window | None) -> list[Shape]:
    """Return the shapes of a group's streams: as in the pool, or before it has any as in rows that know something."""
    if slabs:
        return memory.shapes_of_slabs(slabs)
    for source, _, _ in (source for row in known for source in row.sources()):
        group = source.all if window is None else source.windows.get(window)
        if group is not None and group.memory:
            return memory.shapes_of_rows(group.memory)
    return []


def _states_of(known: Known, num_tokens: int) -> States:
    """Return what layers carry of one row after so many tokens, where it resumes; nothing for padding."""
    if num_tokens <= 0:
        return {}
    for source, number, num_there in known.sources():
        if num_there == num_tokens and source.states is not None:
            return row_of(source.states.read(), number)
    return known.states


def _fill_window(
    store: BlockStore,
    group: Group,
    slabs: Sequence[Slab],
    blocks: WindowBlocks,
    number: int,
    pad: int,
    known: Known,
    start: int,
) -> None:
    """Let one row have what layers with a window see after column `start`, where it resumes."""
    num_tokens, size = start - pad, store.block_size
    if num_tokens <= 0:
        return
    for source, row, num_there in known.sources():
        if num_there >= num_tokens:
            if blocks.window in source.windows:
                shift = source.prompts[row].pad - pad
                source.windows[blocks.window].copy_row(row, shift, group, number, start)
            return
    if known.lease is not None:
        span, base = blocks.seen(num_tokens), group.base
        with store.lock:
            places = [blocks.places[known.lease.block_ids[index]] for index in span]
        first = span.start * size
        skipped = max(0, base - pad - first)
        column = pad + first + skipped - base
        memory.load_blocks(group.memory, slabs, number, column, places, num_tokens - first, skipped)


def _take_over(
    rows: Rows,
    inputs: Sequence[RowInput],
    known: Sequence[Known],
    start: int,
    slabs: Sequence[Slab],
) -> int:
    """Take the memory of the call before, where each row goes on in its own row there; return up to which column.

    It is not taken, and 0 returned, where its streams do not lie together as in the slabs: they would never again.
    """
    previous = None if known[0].previous is None else known[0].previous.rows
    if previous is None or previous.escaped or previous.shared is not None or len(inputs) != len(previous.prompts):
        return 0
    if not slabs or len(slabs) != len(previous.all.memory):
        return 0
    for (_, names), (_, of_slab) in zip(previous.all.memory, slabs, strict=True):
        if names != of_slab:
            return 0
    done = start
    for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
        source = of_row.previous
        if source is None or source.number != number or previous.prompts[number].pad != row.pad:
            return 0
        done = min(done, row.pad + source.num_tokens)
    if 2 * done < start or (rows.is_exact and (done < start or not previous.can_go_on_at(start))):
        return 0
    rows.all.take(previous.all.memory, start)  # with the columns that are filled next
    return done


def _fill_row(store: BlockStore, to: Group, number: int, pad: int, known: Known, done: int, start: int) -> None:
    """Copy the known columns `[done, start)` of one row into it, in the layers that see all columns."""
    size = store.block_size
    first, end = max(0, done - pad) // size, min(known.num_in_blocks, max(0, start - pad))
    if known.lease is not None and end > first * size:
        block_ids = known.lease.block_ids[first : -(-end // size)]
        column = pad + first * size - to.base
        memory.load_blocks(to.memory, store.pool.all.slabs, number, column, block_ids, end - first * size)
        done = max(done, pad + end)
    for source, row, num_tokens in known.sources():
        stop = min(start, pad + num_tokens)
        if done < stop:
            shift = source.prompts[row].pad - pad
            source.copy_columns(row, done + shift, stop + shift, to.memory, number, done - to.base)
            done = stop
