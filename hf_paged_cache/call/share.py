"""Finds the columns that rows of a call have in common, and where these lie, so that they are held once.

Rows share blocks that are known when they begin, and the whole prompt where one row has run it for several. A
*segment* is a run of full blocks that some rows have in common. Segments nest: a few-shot prompt of all rows, then the
question of its beams. What follows a row's last segment is its *tail*.

    row 0   pad pad [-------- A --------][---- B ----] tail
    row 1   pad pad [-------- A --------][---- B ----] tail
    row 2           [-------- A --------] tail ...........
                                         ^ first column of the tails
"""

from collections.abc import Sequence

from ..attention.backends import launch_tokens
from ..blocks import Allocation
from ..kv.block_pool import Slab
from ..rows import memory
from ..rows.memory import Streams
from ..rows.request import RowInput
from ..rows.rows import Rows
from ..rows.shared import Looks, Plan, Segment, SharedColumns
from ..store.block_store import BlockStore
from .find import Known


def share_known(
    store: BlockStore,
    inputs: Sequence[RowInput],
    known: Sequence[Known],
    start: int,
    looks: Looks,
    copies: Sequence[int],
) -> SharedColumns | None:
    """Find what rows have in common of the blocks that hold their columns before `start`.

    None where it does not pay to hold that once, for all rows that go on: row `i` from the row `copies[i]` that runs.
    """
    size, numbers = store.block_size, dict[bytes, int]()  # a block's digest -> a number for the block
    with store.lock:
        slabs, num_pool_blocks = store.pool.all.slabs, store.pool.all.capacity
    if not slabs:
        return None
    pads, tables = [row.pad for row in inputs], list[list[int]]()
    for row, of_row in zip(inputs, known, strict=True):
        num_blocks = max(0, min(start - row.pad, of_row.num_tokens)) // size
        hashes = [] if of_row.chain is None else of_row.chain.hashes_of(0, num_blocks)
        digests = [each.digest for each in hashes]
        tables.append([numbers.setdefault(each, len(numbers)) for each in digests])
    launch = launch_tokens([slab for slab, _ in slabs], are_padded=any(pads)) if looks.weighs_launches else 0.0
    plan = find_segments(pads, tables, start, size, launch, [copies.count(row) for row in range(len(inputs))])
    if plan is None:
        return None
    segments, leases = list[Sequence[Streams]](), list[Allocation]()
    for segment in plan.segments:
        found = _where(store, slabs, segment, known, size)
        if found is None:
            return None
        segments.append(found[0])
        leases += found[1:]
    return SharedColumns(plan, segments, leases, looks, num_pool_blocks)


def share_prompt(rows: Rows, copies: Sequence[int], looks: Looks) -> SharedColumns | None:
    """Find what rows have in common that go on from the rows which ran for them, row `i` from row `copies[i]`.

    None where it does not pay to hold that once. Columns behind those that rows share already are held once for the
    rows of one source, or lie in the tail of each row, whichever costs less.
    """
    held, n, base, old = rows.all.memory, rows.n, rows.all.base, rows.shared
    if not held or not rows.is_whole:
        return None
    members: list[list[int]] = [[] for _ in rows.prompts]
    for row, source in enumerate(copies):
        members[source].append(row)
    segments, lies = list[Segment](), list[Sequence[Streams]]()
    for segment, memory_of in () if old is None else zip(old.plan.segments, old.segments, strict=True):
        of_all = tuple(sorted(row for source in segment.rows for row in members[source]))
        if of_all:
            segments.append(segment._replace(rows=of_all))
            lies.append(memory_of)
    pads, launch = tuple(rows.prompts[source].pad for source in copies), 0.0
    if looks.weighs_launches:
        launch = launch_tokens([tensor[:, 0] for tensor, _ in held], are_padded=any(pads))
    behind = [prompt.pad if old is None else old.plan.ends[at] for at, prompt in enumerate(rows.prompts)]
    apart = len(copies) * (n - base)  # columns read where each row has its own
    is_once = old is None or sum(n - first + launch for first in behind if first < n) < apart
    for source, first in enumerate(behind) if is_once else ():
        if members[source] and first < n:
            segments.append(Segment(tuple(members[source]), first - rows.prompts[source].pad, (source,)))
            part = slice(first - base, n - base)
            lies.append([Streams(tensor[:, source : source + 1, :, part], names) for tensor, names in held])
    cost = sum(each[0].tensor.shape[3] for each in lies) + launch * len(segments) + (0 if is_once else apart)
    if cost >= len(copies) * (n - min(pads)) or not all(follow(segment.rows) for segment in segments):
        return None
    # without the rows whose tails begin there, all others' may begin behind what the memory begins with
    ends = (n,) * len(copies) if is_once else tuple(behind[source] for source in copies)
    plan = Plan(tuple(segments), pads, ends, n if is_once else base)
    leases, num_pool_blocks = ((), 0) if old is None else (old.leases, old.num_pool_blocks)
    return SharedColumns(plan, lies, leases, looks, num_pool_blocks)


def _where(
    store: BlockStore, slabs: Sequence[Slab], segment: Segment, known: Sequence[Known], size: int
) -> tuple[list[Streams]] | tuple[list[Streams], Allocation] | None:
    """Find memory of one row that holds the tokens of a segment, and the lease that keeps the memory, if it needs one.

    None where no row has the segment's tokens in one place.
    """
    first, num = segment.start // size, len(segment.block_ids)
    stop = segment.start + num * size
    for row in segment.rows:
        lease = known[row].lease
        if lease is not None and known[row].num_in_blocks >= stop:
            block_ids = lease.block_ids[first : first + num]
            if [*memory.runs(block_ids)] == [(block_ids[0], num)]:
                with store.lock:
                    forked = store.allocator.fork(lease, first + num)
                at = slice(block_ids[0], block_ids[0] + num)
                return [Streams(held[:, :, at].flatten(2, 3).unsqueeze(1), names) for held, names in slabs], forked
            made = memory.make(memory.shapes_of_slabs(slabs), 1, num * size)
            memory.load_blocks(made, slabs, 0, 0, block_ids, num * size)
            return (made,)
    for row in segment.rows:
        ahead = known[row].ahead
        if ahead is not None and ahead.num_tokens >= stop:
            source, number, _ = ahead
            column, base = source.prompts[number].pad + segment.start, source.all.base
            if column >= (base if source.shared is None else source.shared.plan.ends[number]):
                part, held_by = slice(column - base, column - base + num * size), slice(number, number + 1)
                return ([Streams(held[:, held_by, :, part], names) for held, names in source.all.memory],)
    return None


def find_segments(
    pads: Sequence[int],
    tables: Sequence[Sequence[int]],
    start: int,
    block_size: int,
    launch_tokens: float,
    num_copies: Sequence[int],
) -> Plan | None:
    """Return the plan that reads least before column `start`; None if none reads less than each row by itself.

    A plan costs the tokens that it reads, and `launch_tokens` for each segment. `tables` are the ids of the full blocks
    of each row, from its first token on; equal ids hold equal tokens. So many rows go on from each row.

    Examples:
        >>> tables = [7, 3, 4], [7, 3, 5]
        >>> find_segments([0, 0], tables, 11, block_size=4, launch_tokens=2, num_copies=[1, 1]).segments
        (Segment(rows=(0, 1), start=0, block_ids=(7, 3)),)
        >>> find_segments([0, 0], tables, 11, block_size=4, launch_tokens=20, num_copies=[1, 1]) is None
        True
    """
    limits = [min(len(table), max(0, start - pad) // block_size) for pad, table in zip(pads, tables, strict=True)]
    ends, segments, num_rows = [*pads], list[Segment](), sum(num_copies)
    waiting = [([*range(len(pads))], 0, 0)]  # rows, number of common blocks, number of these in segments
    while waiting:
        members, depth, begin = waiting.pop()
        at: dict[int, list[int]] = {}
        for row in members:
            if limits[row] > depth:
                at.setdefault(tables[row][depth], []).append(row)
        for sharing in at.values():
            if len(sharing) < 2 or not follow(sharing):
                continue
            common, done = depth, begin
            for blocks in zip(*(tables[row][depth : limits[row]] for row in sharing), strict=False):
                if len({*blocks}) > 1:
                    break
                common += 1
            if (sum(num_copies[row] for row in sharing) - 1) * (common - begin) * block_size > launch_tokens:
                segments.append(Segment(tuple(sharing), begin * block_size, tuple(tables[sharing[0]][begin:common])))
                done = common
                for row in sharing:
                    ends[row] = pads[row] + common * block_size
            waiting.append((sharing, common, done))
    cost = sum(len(segment.block_ids) * block_size + launch_tokens for segment in segments)
    if not segments or cost + num_rows * (start - min(ends)) >= num_rows * (start - min(pads)):
        return None
    return Plan(tuple(segments), tuple(pads), tuple(ends), min(ends))


def follow(rows: Sequence[int]) -> bool:
    """Return whether rows, in ascending order, follow one another."""
    return rows[-1] - rows[0] == len(rows) - 1
