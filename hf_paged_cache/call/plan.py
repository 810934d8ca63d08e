"""Plans which forwards run ahead of one over all rows, so that all rows start at one column.

Pure: rows in, plan out; no table, no tensor.

A row starts after any of its known tokens. Where layers carry states or have windows, it starts after exactly so many
tokens, at its *origin*, or begins anew, in its padding. So rows join where they start, as on a staircase, and all run
together from the last stair on. A prefix that rows share is computed in one row first. Forwards are cut where a
snapshot is wanted.

A forward of one column counts as the step of a token: layers with a state do not look at its mask, so no row may be in
its padding there.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..blocks.tokens import TokenIds, common_prefix_length

# What a forward costs beside its tokens, in tokens: reading all weights, launching all kernels. For SmolLM2-135M on two
# cores that is some 45 (`python benchmarks/bench_generate.py --scenes forward_cost`). The number here is larger,
# so that plans are a gain. An accelerator computes tokens faster and launches no faster; its number is a guess.
FORWARD_COST_ON_HOST = 64
FORWARD_COST_ON_ACCELERATOR = 512

_MAX_WEIGHED = 64  # most prefixes, and most columns to join at, that are weighed; more rows rarely differ in more


class PlannedRow(NamedTuple):
    """`PlannedRow` is a row that runs."""

    pad: int  # columns of left padding
    start: int | None = None  # column before which the row is known; None: it begins anew
    token_ids: TokenIds = array("q")  # all tokens, those of the forward included; empty: the row shares nothing
    kind: int = 0  # rows of one kind can share
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
    heirs: Mapping[int, int]  # row -> tokens after which it resumes from there; the row that runs is included


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

    @property
    def runs(self) -> bool:
        """True if anything runs first."""
        return bool(self.prefixes or self.steps)

    def starts(self, num_rows: int) -> dict[int, int]:
        """Return row -> column at which the row joins."""
        starts = {number: step.start for step in reversed(self.steps) for number in step.rows}
        return {number: starts.get(number, self.column) for number in range(num_rows)}


def plan(rows: Sequence[PlannedRow], bounds: Bounds, *, may_run_ahead: bool = True) -> Plan | None:
    """Find the forwards after which all rows together cost least, in tokens.

    None where rows cannot come to one column, which may need forwards ahead.

    Args:
        may_run_ahead: forwards may run ahead; if not, none does.

    Examples:
        >>> from array import array
        >>> rows = [PlannedRow(0, 0, array("q", [*range(100), last, 7])) for last in (1, 2, 3)]
        >>> found = plan(rows, Bounds(stop=102, latest=101, forward_cost=8, align=4))
        >>> found.prefixes, found.column, found.cost
        ((Prefix(row=0, num_tokens=100, known=0, heirs={0: 100, 1: 100, 2: 100}),), 100, 114)
        >>> rows = [PlannedRow(pad=0, start=100), PlannedRow(pad=20, start=120)]
        >>> plan(rows, Bounds(stop=140, latest=139, forward_cost=10)).steps
        (Step(rows=(0,), start=100, stop=120),)
    """
    best = _climb(rows, bounds, may_run_ahead=may_run_ahead)
    if best is None or not may_run_ahead:
        return best
    prefixes: list[Prefix] = []
    ahead = 0  # cost of the prefixes, in tokens
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
        found = _climb(after, bounds)
        if found is not None and found.cost + cost < best.cost:
            prefixes.append(Prefix(row, length, known, dict.fromkeys(heirs, length)))
            ahead, rows = cost, after
            best = found._replace(prefixes=tuple(prefixes), cost=found.cost + cost)
    return best


def _shared(rows: Sequence[PlannedRow], bounds: Bounds) -> list[tuple[tuple[int, ...], int]]:
    """List groups of rows with the number of tokens that they have in common.

    Shorter prefixes come first; for the same rows, only the longest prefix is listed.
    """
    order = sorted(
        (number for number, row in enumerate(rows) if row.token_ids),
        key=lambda number: (rows[number].kind, rows[number].token_ids.tobytes()),
    )
    common = []
    for left, right in pairwise(order):
        one, other = rows[left], rows[right]
        length = common_prefix_length(one.token_ids, other.token_ids) if one.kind == other.kind else 0
        common.append(length // bounds.align * bounds.align)
    found: dict[tuple[int, ...], int] = {}
    lengths = sorted({length for length in common if length})
    for length in lengths[:: -(-len(lengths) // _MAX_WEIGHED) or 1]:
        ends = [0, *(at + 1 for at, shared in enumerate(common) if shared < length), len(order)]
        for start, end in pairwise(ends):
            if end - start > 1:
                found[tuple(sorted(order[start:end]))] = length
    return sorted(found.items(), key=lambda item: (item[1], item[0]))


def _climb(rows: Sequence[PlannedRow], bounds: Bounds, *, may_run_ahead: bool = True) -> Plan | None:
    """Plan without prefixes.

    Of the rows that start where they are known, those of which least is known begin anew where that costs less.
    """
    exact = {
        number: row.start
        for number, row in enumerate(rows)
        if bounds.is_exact and row.start is not None and row.start <= bounds.latest
    }
    best: Plan | None = None
    while True:
        found = _staircase(rows, exact, bounds, may_run_ahead=may_run_ahead)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        if not exact:
            return best
        least = min(exact.values())
        exact = {number: start for number, start in exact.items() if start > least}


def _staircase(
    rows: Sequence[PlannedRow],
    exact: Mapping[int, int],
    bounds: Bounds,
    *,
    may_run_ahead: bool,
) -> Plan | None:
    """Find the cheapest stairs.

    Rows of `exact` join at these columns, all other rows at the last stair that they may.
    """
    ends = []  # for each row, the last column at which it may join
    for number, row in enumerate(rows):
        end = row.pad - bounds.width if bounds.is_exact or row.start is None else row.start
        ends.append(exact.get(number, max(0, min(end, bounds.latest))))
    columns = sorted({0, *ends})
    if not exact and len(columns) > _MAX_WEIGHED:
        columns = sorted({0, min(ends), *columns[:: -(-len(columns) // _MAX_WEIGHED)]})
    must, joined = set(exact.values()), sorted(ends)
    ways: dict[int, tuple[int, int | None]] = {}  # column -> cost of rows that run up to it, and the stair before it
    for at, stop in enumerate(columns):
        if stop <= joined[0]:
            ways[stop] = (0, None)
        num_running = bisect_left(joined, stop)
        if not num_running or not may_run_ahead:
            continue
        pad = max(row.pad for row, end in zip(rows, ends, strict=True) if end < stop)
        for start in reversed(columns[:at]):
            if start in ways and _may_run(start, stop, pad, bounds):
                cost = ways[start][0] + num_running * (stop - start) + bounds.forward_cost
                if stop not in ways or cost < ways[stop][0]:
                    ways[stop] = cost, start
            if start in must:
                break
    last = max(must, default=0)
    tops = [(cost + len(rows) * (bounds.stop - column), column) for column, (cost, _) in ways.items() if column >= last]
    if not tops:
        return None
    cost, column = min(tops)
    stairs, below = [column], ways[column][1]
    while below is not None:
        stairs.append(below)
        below = ways[below][1]
    steps = [
        Step(tuple(number for number, end in enumerate(ends) if end < stop), start, stop)
        for start, stop in pairwise(reversed(stairs))
    ]
    cold = frozenset(range(len(rows))) - exact.keys() if bounds.is_exact else frozenset()
    return Plan((), tuple(steps), column, cold, cost)


def _may_run(start: int, stop: int, pad: int, bounds: Bounds) -> bool:
    """Return whether a forward of these columns, of rows of so much padding, computes what one of more columns does."""
    return stop - start > 1 or (pad <= start and (bounds.least < 2 or not start))


def cut(plan: Plan, rows: Sequence[PlannedRow], bounds: Bounds) -> Plan:
    """Cut the forwards of a plan where snapshots are wanted.

    All cuts of a single row, or cuts that all rows want, are made; others as far as they cost an eighth of the plan.
    """
    columns: Counter[int] = Counter()
    starts = plan.starts(len(rows))
    for number, start in starts.items():
        row = rows[number]
        columns.update({row.pad + wanted for wanted in row.wanted if start < row.pad + wanted <= bounds.latest})

    def may_part(start: int, stop: int) -> bool:
        pad = max((rows[number].pad for number in starts if starts[number] <= start), default=0)
        return _may_run(start, stop, pad, bounds)

    allowed = plan.cost // 8 // max(1, bounds.forward_cost)
    taken = {plan.column, *(at for step in plan.steps for at in (step.start, step.stop))}
    cuts: list[int] = []
    for column, number in sorted(columns.items(), key=lambda pair: (-pair[1], -pair[0])):
        if column in taken or not all(may_part(*sorted((column, other))) for other in taken):
            continue
        if number < len(rows):
            allowed -= 1  # a cut that all rows want costs no row a forward more
        if number == len(rows) or allowed >= 0:
            cuts.append(column)
            taken.add(column)
    column = max([plan.column, *cuts])
    steps = [*plan.steps, Step(tuple(range(len(rows))), plan.column, column)]
    made = []
    for step in steps:
        ends = [step.start, *sorted(at for at in cuts if step.start < at < step.stop), step.stop]
        made += [Step(step.rows, start, end) for start, end in pairwise(ends) if start < end]
    return plan._replace(steps=tuple(made), column=column)
