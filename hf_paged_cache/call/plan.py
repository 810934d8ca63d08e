"""Plans which forwards run ahead of one over all rows, so that all rows start at one column.

A row starts after any of its known tokens. Where layers carry states or have windows, it starts after exactly so many
tokens, or begins anew, in its padding. Rows that know less than others run ahead up to the column at which all start,
those that start close to each other together. A prefix that rows share is computed in one row first. Forwards are cut
where a snapshot is wanted.

A forward of one column counts as the step of a token: layers with a state do not look at its mask, so no row may be in
its padding there.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..blocks import TokenIds, common_prefix_length

# What a forward costs beside its tokens, in tokens: reading all weights, launching all kernels. For SmolLM2-135M on two
# cores that is some 45 (`python benchmarks/bench_generate.py --scenes forward_cost`). The number here is larger,
# so that plans are a gain. An accelerator computes tokens faster and launches no faster; its number is a guess.
FORWARD_COST_ON_HOST = 64
FORWARD_COST_ON_ACCELERATOR = 512

_MAX_WEIGHED = 64  # most prefixes, and most columns to start at, that are weighed; more rows rarely differ in more


class PlannedRow(NamedTuple):
    """`PlannedRow` is a row that runs."""

    pad: int  # columns of left padding
    start: int | None = None  # column before which the row is known; None: it begins anew
    token_ids: TokenIds = array("q")  # all tokens, those of the forward included; empty: the row shares nothing
    root: bytes = b""  # rows of one root can share
    wanted: tuple[int, ...] = ()  # tokens after which a snapshot is wanted

    @property
    def known(self) -> int:
        """Number of tokens after which the row starts."""
        return 0 if self.start is None else max(0, self.start - self.pad)


class Bounds(NamedTuple):
    """`Bounds` says where the forward over all rows may lie, and what forwards ahead of it cost."""

    stop: int  # column at which the forward ends
    latest: int  # last column at which the forward may start
    forward_cost: int  # cost of one more forward, in tokens
    is_exact: bool = False  # rows start where they are known, or anew; if not, also further left
    width: int = 0  # columns of padding that a row must see, if it has so many, to be as if it saw all
    least: int = 1  # fewest columns of a forward that does not begin with the rows, 1 or 2
    align: int = 1  # rows share prefixes of a multiple of so many tokens


class Prefix(NamedTuple):
    """`Prefix` is a forward of one row alone, which computes what others begin with."""

    row: int
    num_tokens: int
    known: int  # number of these tokens that are not computed
    heirs: tuple[int, ...]  # rows that resume after these tokens; the row that runs is among them


class Step(NamedTuple):
    """`Step` is a forward of the columns `[start, stop)` of some rows."""

    rows: tuple[int, ...]
    start: int
    stop: int


class Plan(NamedTuple):
    """`Plan` says how rows come to `column`, where all of them resume together."""

    prefixes: tuple[Prefix, ...]  # each prefix comes after those that it resumes from
    steps: tuple[Step, ...]
    column: int
    cold: frozenset[int]  # rows that begin anew, whatever is known of them
    cost: int  # cost in tokens, with that of the forward over all rows


def plan(rows: Sequence[PlannedRow], bounds: Bounds) -> Plan:
    """Find the forwards after which all rows together cost least, in tokens.

    Examples:
        >>> from array import array
        >>> rows = [PlannedRow(0, 0, array("q", [*range(100), last, 7])) for last in (1, 2, 3)]
        >>> found = plan(rows, Bounds(stop=102, latest=101, forward_cost=8, align=4))
        >>> found.prefixes, found.column, found.cost
        ((Prefix(row=0, num_tokens=100, known=0, heirs=(0, 1, 2)),), 100, 114)
        >>> rows = [PlannedRow(pad=0, start=100), PlannedRow(pad=20, start=120)]
        >>> plan(rows, Bounds(stop=140, latest=139, forward_cost=10)).steps
        (Step(rows=(0,), start=100, stop=120),)
    """
    best, prefixes, ahead = _catch_up(rows, bounds), list[Prefix](), 0  # the latter: cost of the prefixes, in tokens
    for members, length in _shared(rows, bounds):
        limits = {number: bounds.latest - rows[number].pad for number in members}
        if not bounds.is_exact:
            length = min(length, max(limits.values()) // bounds.align * bounds.align)
        heirs = [n for n in members if rows[n].known < length and (length <= limits[n] or not bounds.is_exact)]
        if len(heirs) < 2:
            continue
        row = max(heirs, key=lambda number: (rows[number].known, -rows[number].pad))
        known = rows[row].known
        if known and length - known < bounds.least:
            continue
        cost = ahead + length - known + bounds.forward_cost
        after = [row._replace(start=row.pad + length) if at in heirs else row for at, row in enumerate(rows)]
        found = _catch_up(after, bounds)
        if found.cost + cost < best.cost:
            prefixes.append(Prefix(row, length, known, tuple(heirs)))
            ahead, rows = cost, after
            best = found._replace(prefixes=tuple(prefixes), cost=found.cost + cost)
    return best


def _shared(rows: Sequence[PlannedRow], bounds: Bounds) -> list[tuple[tuple[int, ...], int]]:
    """List groups of rows with the number of tokens that they have in common, shorter ones first."""
    order = sorted(
        (number for number, row in enumerate(rows) if row.token_ids),
        key=lambda number: (rows[number].root, rows[number].token_ids.tobytes()),
    )
    common = []
    for left, right in pairwise(order):
        one, other = rows[left], rows[right]
        length = common_prefix_length(one.token_ids, other.token_ids) if one.root == other.root else 0
        common.append(length // bounds.align * bounds.align)
    found: dict[tuple[int, ...], int] = {}
    lengths = sorted({length for length in common if length})
    for length in lengths[:: -(-len(lengths) // _MAX_WEIGHED) or 1]:
        ends = [0, *(at + 1 for at, shared in enumerate(common) if shared < length), len(order)]
        for start, end in pairwise(ends):
            if end - start > 1:
                found[tuple(sorted(order[start:end]))] = length
    return sorted(found.items(), key=lambda item: (item[1], item[0]))


def _catch_up(rows: Sequence[PlannedRow], bounds: Bounds) -> Plan:
    """Plan without prefixes: find the column up to which the rows that know less run ahead at the least cost."""
    latest = bounds.latest
    starts = [None if row.start is None or (row.start > latest and bounds.is_exact) else row.start for row in rows]
    ends = [  # for each row, the last column at which it may join
        max(0, min(row.pad - bounds.width if start is None else start, latest))
        for row, start in zip(rows, starts, strict=True)
    ]
    best = Plan((), (), 0, frozenset(range(len(rows))) if bounds.is_exact else frozenset(), len(rows) * bounds.stop)
    columns = sorted(set(ends))
    if bounds.is_exact:  # rows can join where they are known, and nowhere before
        columns = [max((start for start in starts if start is not None), default=0)]
    for column in columns[:: -(-len(columns) // _MAX_WEIGHED)]:
        steps, cost, may_run = list[Step](), len(rows) * (bounds.stop - column), True
        for number in sorted(range(len(rows)), key=ends.__getitem__):
            start, is_fixed = ends[number], bounds.is_exact and starts[number] is not None
            if start >= column:
                break
            last = steps[-1] if steps else None
            if last and (start == last.start or (not is_fixed and start - last.start <= bounds.forward_cost)):
                steps[-1] = last._replace(rows=tuple(sorted((*last.rows, number))))
            else:
                steps.append(Step((number,), start, column))
        for step in steps:
            cost += len(step.rows) * (column - step.start) + bounds.forward_cost
            if column - step.start == 1:  # it must compute what a forward of more columns does
                no_padding = all(rows[number].pad <= step.start for number in step.rows)
                may_run = may_run and no_padding and (bounds.least < 2 or not step.start)
        if may_run and cost <= best.cost:
            cold = frozenset(at for at, start in enumerate(starts) if start is None and bounds.is_exact)
            best = Plan((), tuple(steps), column, cold, cost)
    return best


def cut(plan: Plan, rows: Sequence[PlannedRow], bounds: Bounds) -> Plan:
    """Cut the forwards of a plan where all rows want snapshots, and where some do as far as that costs an eighth."""
    made, column = list[Step](), plan.column
    for step in (*plan.steps, Step(tuple(range(len(rows))), column, bounds.latest)):
        wanted: Counter[int] = Counter()
        for number in step.rows:
            wanted.update(rows[number].pad + num_tokens for num_tokens in rows[number].wanted)
        allowed = len(step.rows) * (step.stop - step.start) // 8 // max(1, bounds.forward_cost)
        is_last = step.start == plan.column
        ends = [step.start] if is_last else [step.start, step.stop]
        for at, number in sorted(wanted.items(), key=lambda pair: (-pair[1], -pair[0])):
            if not step.start < at <= step.stop or min(abs(at - end) for end in ends) < 2:
                continue
            if number < len(step.rows):
                allowed -= 1
            if number == len(step.rows) or allowed >= 0:
                ends.append(at)
        made += [Step(step.rows, start, stop) for start, stop in pairwise(sorted(ends))]
        if is_last:
            column = max(ends)
    return plan._replace(steps=tuple(made), column=column)
