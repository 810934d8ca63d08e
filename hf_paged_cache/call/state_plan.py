"""Which forwards bring rows to one column where layers carry states. Pure: rows in, plan out; no table, no tensor.

A state is exact at one place of a row, its *origin*, or before its first token, in the padding. So rows join a forward at the
column of their origin, as on a staircase, and all of them run together from the last step on. A prefix that rows share is computed
in a forward of one row before, and is their origin then. Forwards are cut where a snapshot is wanted.

A forward of one column counts as the step of a token: models do not look at its mask, so no row may be in its padding there.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..blocks.tokens import TokenIds, common_prefix_length

_MAX_PREFIXES = 64  # that are weighed


class StatefulRow(NamedTuple):
    """A row that runs."""

    pad: int  # columns of left padding
    start: int | None = None  # column before which its state is known; None: it begins anew
    wanted: tuple[int, ...] = ()  # tokens behind which a snapshot is wanted


class Step(NamedTuple):
    """A forward ahead of the one over all rows: columns `[start, stop)` of some rows."""

    rows: tuple[int, ...]
    start: int
    stop: int


class Staircase(NamedTuple):
    """How rows come to `column`, where all of them go on together."""

    steps: tuple[Step, ...]
    column: int
    cold: frozenset[int]  # rows that begin anew, whatever is known of their states
    cost: int  # tokens, with those of the forward over all rows


class Bounds(NamedTuple):
    """Where the forward over all rows may lie, and what forwards ahead of it cost."""

    before: int  # it starts at this column or further right
    stop: int  # its end
    latest: int  # it starts no further right
    width: int  # columns of padding that a row must see, where it has so many, to be as if it had seen all
    forward_cost: int  # of a forward more, in tokens
    least: int = 1  # columns of a forward that does not begin with the rows, 1 or 2


def climb(rows: Sequence[StatefulRow], bounds: Bounds, *, may_run_ahead: bool = True) -> Staircase | None:
    """The staircase that costs least, in tokens; None where rows cannot come to one column without forwards of our own.

    Args:
        may_run_ahead: else without steps.

    Examples:
        >>> rows = [StatefulRow(pad=0, start=100), StatefulRow(pad=20, start=120)]
        >>> climb(rows, Bounds(before=0, stop=140, latest=139, width=4, forward_cost=10))
        Staircase(steps=(Step(rows=(0,), start=100, stop=120),), column=120, cold=frozenset(), cost=70)
    """
    cold = {number for number, row in enumerate(rows) if row.start is None or row.start > bounds.latest}
    best: Staircase | None = None
    # Padding that is computed, rather than a stair more; negative: each row that begins anew does so at the first column.
    extras = (bounds.forward_cost, bounds.stop, -1) if may_run_ahead else (bounds.stop,)
    while True:
        for extra in extras:
            found = _climb(rows, cold, bounds, extra)
            is_allowed = may_run_ahead or not found.steps
            if is_allowed and all(_may_run(step, rows, bounds.least) for step in found.steps):
                if best is None or found.cost < best.cost:
                    best = found
                break
        starts = [row.start for number, row in enumerate(rows) if row.start is not None and number not in cold]
        if not starts:
            return best
        cold |= {number for number, row in enumerate(rows) if row.start == min(starts)}


def _may_run(step: Step, rows: Sequence[StatefulRow], least: int) -> bool:
    """Whether a forward of these columns computes what one of more columns does."""
    if step.stop - step.start > 1:
        return True
    return (least < 2 or not step.start) and all(rows[number].pad <= step.start for number in step.rows)


def _climb(rows: Sequence[StatefulRow], cold: Collection[int], bounds: Bounds, extra: int) -> Staircase:
    """The staircase on which these rows begin anew, and all others at their origins."""
    starts = {n: row.start for n, row in enumerate(rows) if row.start is not None and n not in cold}
    stairs = set(starts.values())
    for number in sorted(cold, key=lambda number: rows[number].pad):
        last = max(0, min(rows[number].pad - bounds.width, bounds.latest))
        start = max((stair for stair in stairs if stair <= last), default=0) if extra >= 0 else 0
        if stairs and last - start > extra >= 0:
            start = last
        starts[number] = start
        stairs.add(start)
    column = max(max(stairs), bounds.before)
    ends = [*sorted(stairs | {column})]
    steps = tuple(
        Step(tuple(number for number in range(len(rows)) if starts[number] <= start), start, end)
        for start, end in pairwise(ends)
    )
    cost = sum(bounds.stop - start for start in starts.values()) + bounds.forward_cost * len(steps)
    return Staircase(steps, column, frozenset(cold), cost)


def cut(staircase: Staircase, rows: Sequence[StatefulRow], bounds: Bounds, *, share: int = 8) -> Staircase:
    """The same with forwards cut where snapshots are wanted: all of a single row, or of all rows, others where they are cheap.

    Args:
        share: what such forwards may cost, as a part of the tokens computed.
    """
    columns: Counter[int] = Counter()
    starts = starts_of(staircase, len(rows))
    for number, start in starts.items():
        row = rows[number]
        columns.update({row.pad + wanted for wanted in row.wanted if start < row.pad + wanted <= bounds.latest})

    def may_part(start: int, stop: int) -> bool:
        running = tuple(number for number in starts if starts[number] <= start)
        return _may_run(Step(running, start, stop), rows, bounds.least)

    allowed = staircase.cost // share // max(1, bounds.forward_cost)
    taken = {staircase.column, *(at for step in staircase.steps for at in (step.start, step.stop))}
    cuts: list[int] = []
    for column, number in sorted(columns.items(), key=lambda pair: (-pair[1], -pair[0])):
        if column in taken or not all(may_part(*sorted((column, other))) for other in taken):
            continue
        if number < len(rows):
            allowed -= 1  # those that all rows want cost no row a forward more
        if number == len(rows) or allowed >= 0:
            cuts.append(column)
            taken.add(column)
    everybody = tuple(range(len(rows)))
    column = max([staircase.column, *cuts])
    steps = [*staircase.steps, *([Step(everybody, staircase.column, column)] if column > staircase.column else [])]
    made = []
    for step in steps:
        ends = [step.start, *sorted(at for at in cuts if step.start < at < step.stop), step.stop]
        made += [Step(step.rows, start, end) for start, end in pairwise(ends)]
    return staircase._replace(steps=tuple(made), column=column)


class Prefix(NamedTuple):
    """A forward of one row that others share the beginning of."""

    row: int
    num_tokens: int
    members: tuple[int, ...]  # rows that go on from there


def shared(
    token_ids: Sequence[TokenIds],
    roots: Sequence[object],
    rows: Sequence[StatefulRow],
    limits: Sequence[int],
    bounds: Bounds,
    *,
    align: int,
) -> tuple[list[Prefix], list[StatefulRow]]:
    """The shared prefixes that pay, the shorter ones first, and the rows with what is known of them then.

    Args:
        token_ids: of each row, those of the forward included.
        roots: rows of one root can share.
        limits: of each row, the most tokens behind which it may go on.
        align: a snapshot is kept at multiples of this.
    """
    order = sorted(range(len(rows)), key=lambda i: (repr(roots[i]), token_ids[i].tobytes()))
    found: dict[tuple[int, ...], int] = {}  # members -> tokens in common
    common = [
        common_prefix_length(token_ids[left], token_ids[right]) // align * align if roots[left] == roots[right] else 0
        for left, right in pairwise(order)
    ]
    for length in sorted({number for number in common if number})[:_MAX_PREFIXES]:
        group: list[int] = []
        for at, number in enumerate(order):
            if at and common[at - 1] < length:
                _note(found, group, length)
                group = []
            group.append(number)
        _note(found, group, length)

    def cost_of(changed: Sequence[StatefulRow]) -> int:
        climbed = climb(changed, bounds)
        return len(rows) * bounds.stop if climbed is None else climbed.cost

    prefixes: list[Prefix] = []
    now, cost = [*rows], cost_of(rows)
    for members, length in sorted(found.items(), key=lambda item: (item[1], item[0])):
        known = {number: (row.start or row.pad) - row.pad for number, row in enumerate(now)}
        members = tuple(number for number in members if known[number] < length <= limits[number])
        if len(members) < 2:
            continue
        row = max(members, key=known.__getitem__)
        if known[row] and length - known[row] < bounds.least:
            continue
        changed = [r._replace(start=r.pad + length) if number in members else r for number, r in enumerate(now)]
        ahead = length - known[row] + bounds.forward_cost
        if (changed_cost := cost_of(changed) + ahead) < cost:
            prefixes.append(Prefix(row, length, members))
            now, cost = changed, changed_cost - ahead
    return prefixes, now


def _note(found: dict[tuple[int, ...], int], group: Sequence[int], length: int) -> None:
    """Rows that share so many tokens; of the same rows, the longest counts."""
    if len(group) > 1:
        members = tuple(sorted(group))
        found[members] = max(length, found.get(members, 0))


def starts_of(staircase: Staircase, num_rows: int) -> Mapping[int, int]:
    """Row -> the column at which it joins."""
    starts = {number: step.start for step in reversed(staircase.steps) for number in step.rows}
    return {number: starts.get(number, staircase.column) for number in range(num_rows)}
