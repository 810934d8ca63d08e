"""Fills rows that begin with what is known of them.

What is known comes from leased blocks, from rows that ran ahead, or from the rows of the call before. The memory of the
call before becomes the rows' own where they go on in it: then nothing is copied at all.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from ..blocks import Window
from ..kv.block_pool import Slab
from ..kv.states import States, row_of, stacked
from ..rows import memory
from ..rows.groups import Group
from ..rows.request import RowInput
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .find import Known
from .share import share_known

_NAMES = itemgetter(1)  # of the streams that lie in one tensor, in rows and in the pool


def fill(
    store: BlockStore,
    rows: Rows,
    inputs: Sequence[RowInput],
    known: Sequence[Known],
    start: int,
    wanted: int,
    *,
    takes_over: bool = False,
) -> None:
    """Let rows begin with their columns before `start`, all of which are known; they will have `wanted` columns.

    With `takes_over`, the memory of the call before may become these rows'.
    """
    rows.begin(inputs, wanted)
    captured = rows.captured  # captured rows are dense, and begin where they stay
    make = memory.make if captured is None else captured.make
    with store.lock:
        slabs = store.pool.all.slabs
    if not start:
        rows.all.take(make(memory.shapes_of_slabs(slabs), len(inputs), wanted) if slabs else [], 0)
        rows.start_at(0, inputs)
        return
    shared = None
    if len(inputs) > 1 and rows.may_be_lazy and captured is None:
        shared = share_known(store, inputs, known, start, rows.looks, rows.copies or range(len(inputs)))
    may_take = takes_over and shared is None and captured is None
    done = _take_over(rows, inputs, known, start, slabs) if may_take else 0
    if shared is not None:
        first = shared.plan.first_own
        rows.share(shared, memory.make(memory.shapes_of_slabs(slabs), len(inputs), max(start, wanted) - first), start)
    elif done:
        if max(start, wanted) > rows.all.room_end:
            rows.all.make_room(max(start, wanted), done, wanted)
    else:
        elsewhere = (memory.shapes_of_rows(source.all.memory) for row in known for source, _, _ in row.sources())
        shapes = memory.shapes_of_slabs(slabs) or next(elsewhere, [])
        rows.all.take(make(shapes, len(inputs), max(start, wanted)), start)
    for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
        first = row.pad if shared is None else shared.plan.ends[number]
        if (first := max(done, first)) < start:
            _load(store, rows, number, of_row, first, start)
    if done and known[0].previous is not None:
        for window, group in known[0].previous.rows.windows.items():
            rows.windows[window].take(group.memory, start, group.base)
    elif rows.windows:
        _fill_windows(store, rows.windows, inputs, known, start, wanted)
    if rows.states is not None:
        rows.states.put(
            stacked([_states_of(of_row, start - row.pad) for row, of_row in zip(inputs, known, strict=True)])
        )
    rows.start_at(start, inputs)


def _states_of(known: Known, num_tokens: int) -> States:
    """Return what layers carry of one row after so many tokens, where it resumes; nothing for padding."""
    if num_tokens <= 0:
        return {}
    for source, number, num_there in known.sources():
        if num_there == num_tokens and source.states is not None:
            return row_of(source.states.read(), number)
    return known.states


def _fill_windows(
    store: BlockStore,
    windows: Mapping[Window, Group],
    inputs: Sequence[RowInput],
    known: Sequence[Known],
    start: int,
    wanted: int,
) -> None:
    """Let layers with a window have what is seen after column `start`, from where each row resumes."""
    size, blocks_of = store.block_size, {blocks.window: blocks for blocks in store.windows.groups}
    with store.lock:
        slabs_of = {window: store.pool.groups[window.name].slabs for window in blocks_of}
    there = [source.windows for row in known for source, _, _ in row.sources() if source.windows]
    for window, group in windows.items():
        elsewhere = (memory.shapes_of_rows(each[window].memory) for each in there)
        shapes = memory.shapes_of_slabs(slabs_of.get(window, ())) or next(filter(None, elsewhere), [])
        group.make_window(shapes, len(inputs), start, max(start, wanted))
        for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
            num_tokens = start - row.pad
            if num_tokens <= 0:
                continue
            source = next((each for each in of_row.sources() if each[2] >= num_tokens), None)
            if source is not None:
                held, at, _ = source
                if window in held.windows:
                    held.windows[window].copy_row(at, held.prompts[at].pad - row.pad, group, number, start)
            elif of_row.lease is not None:
                span, base = blocks_of[window].seen(num_tokens), group.base
                with store.lock:
                    places = [blocks_of[window].places[of_row.lease.block_ids[index]] for index in span]
                first = span.start * size
                skipped = max(0, base - row.pad - first)
                column = row.pad + first + skipped - base
                memory.load_blocks(group.memory, slabs_of[window], number, column, places, num_tokens - first, skipped)


def _take_over(
    rows: Rows,
    inputs: Sequence[RowInput],
    known: Sequence[Known],
    start: int,
    slabs: Sequence[Slab],
) -> int:
    """Take the memory of the call before, where each row goes on in its own row there.

    Return the column up to which all rows do; 0: the memory was not taken. That is so, too, where its streams do not
    lie together as in the slabs: they would lie apart from then on.
    """
    previous = None if known[0].previous is None else known[0].previous.rows
    if previous is None or previous.escaped or not previous.all.memory or len(inputs) != len(previous.prompts):
        return 0
    if previous.shared is not None or (rows.is_exact and not previous.can_go_on_at(start)):
        return 0
    if [*map(_NAMES, previous.all.memory)] != [*map(_NAMES, slabs)]:
        return 0
    done = start
    for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
        if of_row.previous is None or of_row.previous.number != number or previous.prompts[number].pad != row.pad:
            return 0
        done = min(done, row.pad + of_row.num_common)
    if 2 * done < start or (rows.is_exact and done < start):
        return 0
    rows.all.take(previous.all.memory, done)
    return done


def _load(store: BlockStore, rows: Rows, number: int, known: Known, done: int, start: int) -> None:
    """Copy the known columns `[done, start)` of one row into it."""
    size, pad = store.block_size, rows.prompts[number].pad
    first, end = max(0, done - pad) // size, min(known.num_in_blocks, max(0, start - pad))
    if known.lease is not None and end > first * size:
        with store.lock:
            slabs = store.pool.all.slabs
        block_ids = known.lease.block_ids[first : -(-end // size)]
        column = pad + first * size - rows.all.base
        memory.load_blocks(rows.all.memory, slabs, number, column, block_ids, end - first * size)
        done = max(done, pad + end)
    for source, source_row, num_tokens in known.sources():
        done = _copy(source, source_row, rows, number, done, min(start, pad + num_tokens))


def _copy(source: Rows, source_row: int, rows: Rows, row: int, start: int, stop: int) -> int:
    """Copy columns, as the written row counts them, to it; return the column up to which it has them."""
    if stop <= start:
        return start
    shift = source.prompts[source_row].pad - rows.prompts[row].pad
    source.copy_columns(source_row, start + shift, stop + shift, rows.all.memory, row, start - rows.all.base)
    return stop
