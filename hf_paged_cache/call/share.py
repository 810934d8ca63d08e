"""Which columns rows of a call have in common, and where these lie: what they hold once.

Rows share blocks that are known when they begin, and the whole prompt where one row has run it for several.
"""

from array import array
from collections.abc import Sequence

from torch import Tensor

from ..attention import shared_reads
from ..attention.segments import Plan, Segment, find_segments
from ..blocks import Allocation
from ..kv.block_pool import Slab
from ..kv.slot_mapping import RowLayout
from ..rows import memory
from ..rows.memory import Streams
from ..rows.rows import Rows
from ..rows.shared import Looks, SharedColumns
from ..store.block_store import BlockStore
from .match import Known
from .scheduled_forward import RowInput


def share_known(
    store: BlockStore, inputs: Sequence[RowInput], known: Sequence[Known], start: int, looks: Looks
) -> SharedColumns | None:
    """What rows have in common of the blocks that hold their columns before `start`; None where to hold it once does not pay."""
    size = store.block_size
    if len(inputs) < 2 or not start:
        return None
    with store.lock:
        slabs = store.slabs()
    if not slabs:
        return None
    numbers: dict[bytes, int] = {}  # a block's digest -> a number for it
    layouts = []
    for row, of_row in zip(inputs, known, strict=True):
        num_blocks = max(0, min(start - row.pad, of_row.num_tokens)) // size
        digests = [each.digest for each in of_row.chain.hashes_of(0, num_blocks)]
        layouts.append(
            RowLayout(b"", row.pad, array("q"), [numbers.setdefault(each, len(numbers)) for each in digests])
        )
    launch = _launch_tokens([slab for slab, _ in slabs], layouts_padded(layouts)) if looks.weighs_launches else 0
    plan = find_segments(layouts, start, size, launch)
    if plan is None:
        return None
    segments, leases = [], []
    for segment in plan.segments:
        found = _where(store, slabs, segment, known, size)
        if found is None:
            return None
        held, lease = found
        segments.append(held)
        leases += [] if lease is None else [lease]
    return SharedColumns(plan, segments, leases, looks)


def layouts_padded(layouts: Sequence[RowLayout]) -> bool:
    """Whether any row has padding."""
    return any(row.pad for row in layouts)


def share_prompt(rows: Rows, copies: Sequence[int], looks: Looks) -> SharedColumns | None:
    """What rows have in common that go on from those which ran for them, row `i` from row `copies[i]`; None where that does not pay."""
    held = rows.all_memory()
    if not held or not rows.is_whole:
        return None
    members: list[list[int]] = [[] for _ in rows.prompts]
    for row, source in enumerate(copies):
        members[source].append(row)
    old, segments, lies = rows.shared, list[Segment](), list[Sequence[Streams]]()
    if old is not None:
        for number, segment in enumerate(old.plan.segments):
            of_all = tuple(sorted(row for source in segment.rows for row in members[source]))
            segments.append(segment._replace(rows=of_all))
            lies.append(old.segments[number])
    for source, of_source in enumerate(members):
        pad = rows.prompts[source].pad
        first = pad if old is None else old.plan.ends[source]
        if first < rows.n:
            segments.append(Segment(tuple(of_source), first - pad, (source,)))
            lies.append(
                [
                    Streams(tensor[:, source : source + 1, :, first - rows.base : rows.n - rows.base], names)
                    for tensor, names in held
                ]
            )
    pads = tuple(rows.prompts[source].pad for source in copies)
    lengths = [each[0].tensor.shape[3] for each in lies]
    launch = _launch_tokens([tensor[:, 0] for tensor, _ in held], any(pads))
    cost = sum(lengths) + launch * len(segments)
    if cost >= len(copies) * (rows.n - min(pads)):
        return None
    plan = Plan(tuple(segments), pads, (rows.n,) * len(copies), rows.n)
    return SharedColumns(plan, lies, () if old is None else old.leases, looks)


def _launch_tokens(tensors: Sequence[Tensor], are_padded: bool) -> float:
    """See `tokens_of_a_launch`; of tensors [S, H, .., D] of the streams of all layers."""
    num_bytes = sum(tensor.shape[0] * tensor.shape[1] * tensor.shape[-1] * tensor.dtype.itemsize for tensor in tensors)
    num_layers = max(1, sum(tensor.shape[0] for tensor in tensors) // 2)
    return shared_reads.tokens_of_a_launch(tensors[0], num_bytes / num_layers, are_padded=are_padded)


def _where(
    store: BlockStore, slabs: Sequence[Slab], segment: Segment, known: Sequence[Known], size: int
) -> tuple[list[Streams], Allocation | None] | None:
    """Memory of one row that holds the tokens of a segment, and the lease that keeps it."""
    first, num = segment.start // size, len(segment.block_ids)
    for row in segment.rows:
        of_row = known[row]
        if of_row.num_in_blocks >= segment.start + num * size:
            block_ids = of_row.lease.block_ids[first : first + num]
            if [*memory.runs(block_ids)] == [(block_ids[0], num)]:
                with store.lock:
                    lease = store.allocator.fork(of_row.lease, first + num)
                at = slice(block_ids[0], block_ids[0] + num)
                return [Streams(held[:, :, at].flatten(2, 3).unsqueeze(1), names) for held, names in slabs], lease
            made = memory.make(memory.shapes_of_slabs(slabs), 1, num * size)
            memory.load_blocks(made, slabs, [0], 0, block_ids, num * size)
            return made, None
    for row in segment.rows:
        ahead = known[row].ahead
        if ahead is not None and ahead[2] >= segment.start + num * size:
            source, number, _ = ahead
            column = source.prompts[number].pad + segment.start
            if column >= source.base:
                part = slice(column - source.base, column - source.base + num * size)
                return [
                    Streams(held[:, number : number + 1, :, part], names) for held, names in source.all_memory()
                ], None
    return None
