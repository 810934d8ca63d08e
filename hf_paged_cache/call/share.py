"""Finds the columns that rows of a call have in common, and where these lie, so that they are held once.

Rows share blocks that are known when they begin, and the whole prompt where one row has run it for several.
"""

from collections.abc import Sequence

from ..attention.backends import launch_tokens
from ..attention.segments import BlockRow, Plan, Segment, find_segments, follow
from ..blocks import Allocation
from ..kv.block_pool import Slab
from ..rows import memory
from ..rows.memory import Streams
from ..rows.rows import Rows
from ..rows.shared import Looks, SharedColumns
from ..store.block_store import BlockStore
from .find import Known
from .request import RowInput


def share_known(
    store: BlockStore, inputs: Sequence[RowInput], known: Sequence[Known], start: int, looks: Looks
) -> SharedColumns | None:
    """Find what rows have in common of the blocks that hold their columns before `start`.

    None where it does not pay to hold that once.
    """
    size, numbers = store.block_size, dict[bytes, int]()  # a block's digest -> a number for the block
    with store.lock:
        slabs, num_pool_blocks = store.pool.all.slabs, store.pool.all.capacity
    if not slabs:
        return None
    layouts = []
    for row, of_row in zip(inputs, known, strict=True):
        num_blocks = max(0, min(start - row.pad, of_row.num_tokens)) // size
        digests = [each.digest for each in of_row.chain.hashes_of(0, num_blocks)]
        layouts.append(BlockRow(row.pad, [numbers.setdefault(each, len(numbers)) for each in digests]))
    launch = 0.0
    if looks.weighs_launches:
        launch = launch_tokens([slab for slab, _ in slabs], are_padded=any(row.pad for row in layouts))
    plan = find_segments(layouts, start, size, launch)
    if plan is None:
        return None
    found = [_where(store, slabs, segment, known, size) for segment in plan.segments]
    if None in found:
        return None
    leases = [each[1] for each in found if each is not None and each[1] is not None]
    return SharedColumns(plan, [each[0] for each in found if each is not None], leases, looks, num_pool_blocks)


def share_prompt(rows: Rows, copies: Sequence[int], looks: Looks) -> SharedColumns | None:
    """Find what rows have in common that go on from the rows which ran for them, row `i` from row `copies[i]`.

    That is the whole of each such row: what rows that ran share already, and what each of them has behind that. None
    where it does not pay to hold that once.
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
    for source, prompt in enumerate(rows.prompts):
        first = prompt.pad if old is None else old.plan.ends[source]
        if members[source] and first < n:
            segments.append(Segment(tuple(members[source]), first - prompt.pad, (source,)))
            part = slice(first - base, n - base)
            lies.append([Streams(tensor[:, source : source + 1, :, part], names) for tensor, names in held])
    pads, launch = tuple(rows.prompts[source].pad for source in copies), 0.0
    if looks.weighs_launches:
        launch = launch_tokens([tensor[:, 0] for tensor, _ in held], are_padded=any(pads))
    cost = sum(each[0].tensor.shape[3] for each in lies) + launch * len(segments)
    if cost >= len(copies) * (n - min(pads)) or not all(follow(segment.rows) for segment in segments):
        return None
    plan = Plan(tuple(segments), pads, (n,) * len(copies), n)
    leases, num_pool_blocks = ((), 0) if old is None else (old.leases, old.num_pool_blocks)
    return SharedColumns(plan, lies, leases, looks, num_pool_blocks)


def _where(
    store: BlockStore, slabs: Sequence[Slab], segment: Segment, known: Sequence[Known], size: int
) -> tuple[list[Streams], Allocation | None] | None:
    """Find memory of one row that holds the tokens of a segment, and the lease that keeps the memory, if it needs one.

    None where no row has the segment's tokens in one place.
    """
    first, num = segment.start // size, len(segment.block_ids)
    for row in segment.rows:
        of_row = known[row]
        if of_row.lease is not None and of_row.num_in_blocks >= segment.start + num * size:
            block_ids = of_row.lease.block_ids[first : first + num]
            if [*memory.runs(block_ids)] == [(block_ids[0], num)]:
                with store.lock:
                    lease = store.leases.fork(of_row.lease, first + num)
                at = slice(block_ids[0], block_ids[0] + num)
                return [Streams(held[:, :, at].flatten(2, 3).unsqueeze(1), names) for held, names in slabs], lease
            made = memory.make(memory.shapes_of_slabs(slabs), 1, num * size)
            memory.load_blocks(made, slabs, 0, 0, block_ids, num * size)
            return made, None
    for row in segment.rows:
        ahead = known[row].ahead
        if ahead is not None and ahead[2] >= segment.start + num * size:
            source, number, _ = ahead
            column = source.prompts[number].pad + segment.start
            base = source.all.base
            if column >= (base if source.shared is None else source.shared.plan.ends[number]):
                part = slice(column - base, column - base + num * size)
                return [
                    Streams(held[:, number : number + 1, :, part], names) for held, names in source.all.memory
                ], None
    return None
