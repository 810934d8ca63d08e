"""What rows that differ have in common, and which of it is worth a forward of its own before the one over all rows.

A forward over rows starts at one column, the least that all of them know, and computes every column behind it once a
row. A *prefill* is a forward of one row alone over leading tokens that the pool lacks: what several rows share, or
what one row lacks and its neighbours have. Pure: rows in, plan out; no table, no tensor, no state.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..blocks.tokens import TokenIds, common_prefix_length

# What a forward costs beside its tokens, in tokens: reading all weights, launching all kernels. For SmolLM2-135M on two
# cores that is some 45 (`python benchmarks/bench_generate.py --scenes forward_cost`); more, so that a prefill is a gain.
# An accelerator computes tokens faster and launches no faster; its number is a guess.
FORWARD_COST_ON_HOST = 64
FORWARD_COST_ON_ACCELERATOR = 512

_MAX_CANDIDATES = 64  # columns that are weighed; more rows than that rarely branch at more


class SharingRow(NamedTuple):
    """What the plan must know of a row. The same root is what lets two rows share."""

    root: bytes
    pad: int  # columns of left padding
    token_ids: TokenIds  # of all tokens, those of the forward included
    num_known: int  # leading tokens whose keys and values are in the pool


class Prefill(NamedTuple):
    """A forward of one row alone."""

    row: int
    num_tokens: int  # leading tokens that are known after it; a multiple of the block size


class PrefillPlan(NamedTuple):
    """Prefills in the order in which they are to run, each finding what those before it have computed."""

    prefills: tuple[Prefill, ...]
    num_shared_blocks: int  # that rows will hold of each other, so that nobody takes them twice


NOTHING_TO_PREFILL = PrefillPlan((), 0)


def plan_prefills(
    rows: Sequence[SharingRow], *, start: int, stop: int, num_needed: int, block_size: int, forward_cost: int
) -> PrefillPlan:
    """The prefills after which all rows together cost least; none where that is to compute them as they are.

    Cost, in tokens: those of the prefills, `forward_cost` for each, and the columns that the forward over all rows is
    left with, times the rows. Weighed are the columns at which rows part or are known up to, and their last full blocks;
    where paddings differ by no whole blocks, another column may cost less by up to a block a row.

    Args:
        start, stop: columns of the forward, padding included.
        num_needed: so many of its last columns are computed whatever is known.
    Example:
        >>> from array import array
        >>> rows = [SharingRow(b"", 0, array("q", [*range(100), last, 7]), 0) for last in (1, 2, 3)]
        >>> plan_prefills(rows, start=0, stop=102, num_needed=1, block_size=4, forward_cost=8)
        PrefillPlan(prefills=(Prefill(row=0, num_tokens=100),), num_shared_blocks=50)
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].root, rows[i].token_ids.tobytes()))
    common = [0] * len(rows)  # position in `order` -> tokens shared with the row before it, in full blocks
    for at in range(1, len(order)):
        left, right = rows[order[at - 1]], rows[order[at]]
        if left.root == right.root:
            common[at] = _floor(common_prefix_length(left.token_ids, right.token_ids), block_size)
    latest = stop - num_needed

    def weigh(column: int) -> tuple[int, int, list[Prefill]]:
        prefills: list[Prefill] = []
        num_computed, num_shared, reach, first = 0, 0, 0, latest
        shared_with_last = 0  # tokens of this row that the last prefill's row has, too
        for at, number in enumerate(order):
            row = rows[number]
            reach, shared_with_last = min(reach, common[at]), min(shared_with_last, common[at])
            target = min(-(-(column - row.pad) // block_size) * block_size, _floor(len(row.token_ids), block_size))
            target = max(target, row.num_known)
            known = max(_floor(row.num_known, block_size), reach)
            if target > known and target > row.num_known:
                if prefills and prefills[-1].num_tokens <= shared_with_last:
                    prefills.pop()  # this one computes all of that
                prefills.append(Prefill(number, target))
                shared_with_last = target
                num_computed += target - known
            num_shared += max(0, min(reach, target) - row.num_known) // block_size
            reach = max(reach, target)
            first = min(first, row.pad + target)
        left = len(rows) * (stop - max(start, first))
        return num_computed + forward_cost * len(prefills) + left, num_shared, prefills

    earliest = max(start, min(latest, min(row.pad + row.num_known for row in rows)))
    least, best = len(rows) * (stop - earliest), NOTHING_TO_PREFILL
    for column in _thinned(sorted(set(_candidates(rows, order, common, block_size, latest)))):
        if earliest < column <= latest + block_size:
            cost, num_shared, prefills = weigh(min(column, latest))
            if cost < least:
                least, best = cost, PrefillPlan(tuple(prefills), num_shared)
    return best


def _candidates(
    rows: Sequence[SharingRow], order: Sequence[int], common: Sequence[int], block_size: int, latest: int
) -> Iterator[int]:
    """Columns between which costs change by the same amount a column."""
    for at, number in enumerate(order):
        row = rows[number]
        lengths = (common[at], common[at + 1] if at + 1 < len(order) else 0, row.num_known)
        for length in lengths:
            yield row.pad + _floor(length, block_size)
        # what is behind the last full block is computed again, at least in part
        yield row.pad + _floor(max(0, latest - row.pad), block_size)


def _thinned(columns: Sequence[int]) -> Sequence[int]:
    return columns[:: max(1, -(-len(columns) // _MAX_CANDIDATES))]


def _floor(number: int, block_size: int) -> int:
    return number // block_size * block_size
