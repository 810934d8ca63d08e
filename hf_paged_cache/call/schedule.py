"""What of a forward is computed where. Pure: rows in, plan out; no table, no tensor, no state.

Equal rows run once (`group_equal`). What rows that differ have in common, or what one lacks and its neighbours have, is
a *shared prefix*: a forward of one row alone, ahead of the one over all rows, where that pays (`plan_shared_prefixes`).
All rows then start at one column, the least that any of them knows (`start_column`).
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from ..blocks.tokens import common_prefix_length
from .scheduled_forward import RowInput

# What a forward costs beside its tokens, in tokens: reading all weights, launching all kernels. For SmolLM2-135M on two
# cores that is some 45 (`python benchmarks/bench_generate.py --scenes forward_cost`); more here, so that it is a gain.
# An accelerator computes tokens faster and launches no faster; its number is a guess.
FORWARD_COST_ON_HOST = 64
FORWARD_COST_ON_ACCELERATOR = 512

_MAX_CANDIDATES = 64  # columns that are weighed; more rows than that rarely branch at more


class Groups(NamedTuple):
    """Rows put together by equality; group numbers follow the order of first members, so `members[g] >= g`."""

    members: list[int]  # group -> its first row
    group_of: list[int]  # row -> its group


def group_equal(keys: Sequence[Hashable]) -> Groups:
    """Group rows with equal keys.

    Examples:
        >>> group_equal(["a", "b", "a"])
        Groups(members=[0, 1], group_of=[0, 1, 0])
    """
    numbers: dict[Hashable, int] = {}
    members: list[int] = []
    group_of: list[int] = []
    for row, key in enumerate(keys):
        number = numbers.setdefault(key, len(members))
        if number == len(members):
            members.append(row)
        group_of.append(number)
    return Groups(members, group_of)


def each_alone(num_rows: int) -> Groups:
    """Every row a group of its own."""
    return Groups(list(range(num_rows)), list(range(num_rows)))


def start_column(known_columns: Sequence[int], *, start: int, stop: int, num_needed: int) -> int:
    """The column at which one forward over all rows starts: the least that any of them knows.

    Args:
        known_columns: of each row, leading columns that are padding or known.
        start: columns below it are known in every row; never fewer.
        stop: end of the last column.
        num_needed: so many of the last columns are computed whatever is known.

    Examples:
        >>> start_column([48, 42], start=0, stop=60, num_needed=1)
        42
    """
    return max(start, min(*known_columns, stop - num_needed))


class SharedPrefix(NamedTuple):
    """A forward of one row alone."""

    row: int
    num_tokens: int  # leading tokens that are known after it; a multiple of the block size


class SharedPrefixPlan(NamedTuple):
    """Shared prefixes in the order in which they are to run, each finding what those before it have computed."""

    prefixes: tuple[SharedPrefix, ...]
    num_shared_blocks: int  # that rows will hold of each other, so that nobody takes them twice


NOTHING_SHARED = SharedPrefixPlan((), 0)


def plan_shared_prefixes(
    rows: Sequence[RowInput],
    num_known: Sequence[int],
    *,
    start: int,
    stop: int,
    num_needed: int,
    block_size: int,
    forward_cost: int,
) -> SharedPrefixPlan:
    """The shared prefixes after which all rows together cost least; none where that is to compute them as they are.

    Cost, in tokens: those of the prefixes, `forward_cost` for each, and the columns that the forward over all rows is
    left with, times the rows. Weighed are the columns at which rows part or are known up to, and their last full blocks;
    where paddings differ by no whole blocks, another column may cost less by up to a block a row.

    Args:
        rows: with all of their tokens, those of the forward included; rows of one root can share.
        num_known: leading tokens of each row whose keys and values are in the pool.
        start, stop: columns of the forward, padding included.
        num_needed: so many of its last columns are computed whatever is known.

    Examples:
        >>> from array import array
        >>> rows = [RowInput(array("q", [*range(100), last, 7]), 0, 0) for last in (1, 2, 3)]
        >>> plan_shared_prefixes(rows, [0, 0, 0], start=0, stop=102, num_needed=1, block_size=4, forward_cost=8)
        SharedPrefixPlan(prefixes=(SharedPrefix(row=0, num_tokens=100),), num_shared_blocks=50)
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].root, rows[i].token_ids.tobytes()))
    common = [0] * len(rows)  # position in `order` -> tokens shared with the row before it, in full blocks
    for at in range(1, len(order)):
        left, right = rows[order[at - 1]], rows[order[at]]
        if left.root == right.root:
            common[at] = _floor(common_prefix_length(left.token_ids, right.token_ids), block_size)
    latest = stop - num_needed

    def weigh(column: int) -> tuple[int, SharedPrefixPlan]:
        prefixes: list[SharedPrefix] = []
        num_computed, num_shared, reach, first = 0, 0, 0, latest
        shared_with_last = 0  # tokens of this row that the last prefix's row has, too
        for at, number in enumerate(order):
            row, held = rows[number], num_known[number]
            reach, shared_with_last = min(reach, common[at]), min(shared_with_last, common[at])
            target = min(-(-(column - row.pad) // block_size) * block_size, _floor(len(row.token_ids), block_size))
            target = max(target, held)
            known = max(_floor(held, block_size), reach)
            if target > known and target > held:
                if prefixes and prefixes[-1].num_tokens <= shared_with_last:
                    prefixes.pop()  # this one computes all of that
                prefixes.append(SharedPrefix(number, target))
                shared_with_last = target
                num_computed += target - known
            num_shared += max(0, min(reach, target) - held) // block_size
            reach = max(reach, target)
            first = min(first, row.pad + target)
        left = len(rows) * (stop - max(start, first))
        return num_computed + forward_cost * len(prefixes) + left, SharedPrefixPlan(tuple(prefixes), num_shared)

    known_columns = [row.pad + held for row, held in zip(rows, num_known, strict=True)]
    earliest = start_column(known_columns, start=start, stop=stop, num_needed=num_needed)
    least, best = len(rows) * (stop - earliest), NOTHING_SHARED
    candidates = sorted(set(_candidates(rows, num_known, order, common, block_size, latest)))
    for column in candidates[:: max(1, -(-len(candidates) // _MAX_CANDIDATES))]:
        if earliest < column <= latest + block_size:
            cost, plan = weigh(min(column, latest))
            if cost < least:
                least, best = cost, plan
    return best


def _candidates(
    rows: Sequence[RowInput],
    num_known: Sequence[int],
    order: Sequence[int],
    common: Sequence[int],
    block_size: int,
    latest: int,
) -> Iterator[int]:
    """Columns between which costs change by the same amount a column."""
    for at, number in enumerate(order):
        pad = rows[number].pad
        for length in (common[at], common[at + 1] if at + 1 < len(order) else 0, num_known[number]):
            yield pad + _floor(length, block_size)
        # what follows the last full block is computed again, at least in part
        yield pad + _floor(max(0, latest - pad), block_size)


def _floor(number: int, block_size: int) -> int:
    return number // block_size * block_size
