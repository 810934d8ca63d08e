"""Runs what comes ahead of the forward over all rows of a call.

This is a prefix that rows share, which runs once; rows that know less than others; and, where layers carry states, the
part of a prompt after which the states are kept. Each is a small call of rows of its own. What it computes is kept, and
copied from its rows to those of the call.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..call.fill import fill
from ..call.find import Finding, Known
from ..call.plan import FORWARD_COST_ON_ACCELERATOR, FORWARD_COST_ON_HOST, Bounds, Plan, PlannedRow, cut, plan
from ..rows.request import CallLimits, CallState, RowInput
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .forward_arguments import ArgumentReader
from .side_rows import run_columns

_LEAST_GAIN = 64  # states are kept only if they save the next prompt so many tokens after a known place


class Ahead(NamedTuple):
    """`Ahead` says what ran ahead."""

    start: int  # column at which all rows start
    num_computed: Mapping[int, int] = {}  # row -> number of tokens that were computed for it
    made: Sequence[Rows] = ()  # rows that ran ahead, in their order


def run_ahead(
    store: BlockStore,
    reader: ArgumentReader,
    rows: Rows,
    finding: Finding,
    stop: int,
    latest: int,
    arguments: Mapping[str, Any],
    *,
    may_share: bool,
) -> Ahead:
    """Bring rows that will have `stop` columns to one column, `latest` at most.

    What is computed ahead for a row is added to what is known of it.
    """
    inputs, known, is_exact = finding.inputs, finding.known, finding.is_exact
    are_cut = is_exact and may_share
    are_cut = are_cut and (store.has_states or any(row.num_matched > row.num_tokens for row in known))
    if len(inputs) == 1 and not are_cut:
        return Ahead(_least(inputs, known, latest))
    if not may_share:
        return Ahead(finding.look_together(latest) if is_exact else _least(inputs, known, latest))
    with store.lock:
        cost = FORWARD_COST_ON_HOST if store.pool.is_on_host else FORWARD_COST_ON_ACCELERATOR
    width, least = store.rules.width, 2 if store.rules.clamps_one_token else 1
    align = store.align if is_exact else 1
    bounds = Bounds(stop, latest, cost, is_exact=is_exact, width=width, least=least, align=align)
    planned = [
        PlannedRow(row.pad, _start(row, of_row, latest), row.token_ids, row.root)
        for row, of_row in zip(inputs, known, strict=True)
    ]
    found = plan(planned, bounds)
    if is_exact and (found.prefixes or found.steps or not found.column) and any(row.known for row in planned):
        start = finding.look_together(latest)  # they may start side by side further left, without a forward ahead
        if start and (not found.column or len(inputs) * (stop - start) <= found.cost):
            return Ahead(start)
        finding.look(latest)
    known = finding.known
    for number in found.cold:
        known[number].forget()
    if are_cut:
        found = _cut(store, found, planned, known, bounds)
    num_computed, made = _run(store, reader, rows, found, finding, arguments)
    start = found.column if is_exact else _least(inputs, known, latest)
    if made:
        start = min(start, found.column)
    return Ahead(start if any(row.pad < start for row in inputs) else 0, num_computed, made)


def _cut(store: BlockStore, found: Plan, rows: list[PlannedRow], known: Sequence[Known], bounds: Bounds) -> Plan:
    """Return a plan whose forwards also end where windows or states of rows are to be kept.

    One place is where a row parts from what is known. States are also kept at the last place before the prompt's end
    and, in a long prompt, at places in between, as long as there is room.
    """
    align, grid = store.align, store.grid
    with store.lock:
        for number, (row, of_row) in enumerate(zip(rows, known, strict=True)):
            ahead = max((prefix.num_tokens for prefix in found.prefixes if number in prefix.heirs), default=0)
            first, last = max(of_row.num_tokens, ahead), max(of_row.num_in_blocks, ahead)
            most = bounds.latest - row.pad
            parts_at = min(of_row.num_matched, most) // align * align
            wanted, least = {parts_at}, first + 1
            if store.has_states and last:
                least = max(least, last + _LEAST_GAIN)
            if store.has_states and not store.rules.is_recorded:
                wanted.add(most // align * align)
                places = range(first // grid * grid + grid, most, grid)
                if len(places) + len(wanted) <= store.snapshots.num_free:
                    wanted.update(places)
            rows[number] = row._replace(wanted=tuple(place for place in wanted if place >= least))
    return cut(found, rows, bounds)


def _run(
    store: BlockStore, reader: ArgumentReader, rows: Rows, found: Plan, finding: Finding, arguments: Mapping[str, Any]
) -> tuple[Mapping[int, int], Sequence[Rows]]:
    """Run the forwards of a plan, with the plain arguments that the forward of the call's rows has.

    Return how many tokens were computed for each row, and the rows that ran.
    """
    inputs, known = finding.inputs, finding.known
    options = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
    num_computed, made = Counter[int](), list[Rows]()

    def forward(some: list[RowInput], numbers: Sequence[int], start: int, stop: int, going_on: Rows | None) -> None:
        some = [row._replace(token_ids=row.token_ids[: max(0, stop - row.pad)]) for row in some]
        if going_on is None:
            start = 0 if all(row.pad >= start for row in some) else start
            going_on = type(rows)(rows.calls, rows.kinds, rows.looks, CallState("ahead", CallLimits(max_columns=stop)))
            going_on.must_confirm = False
            going_on.may_be_lazy = rows.may_be_lazy
            fill(store, going_on, some, [known[number] for number in numbers], start, stop)
            going_on.in_generate = True
            made.append(going_on)
        run_columns(reader, going_on, some, start, stop, options=options)

    for prefix in found.prefixes:
        row = inputs[prefix.row]
        pad = min(row.pad, store.rules.width) if reader.takes_positions else row.pad
        start = pad + prefix.known if prefix.known else 0
        forward([row._replace(pad=pad)], [prefix.row], start, pad + prefix.num_tokens, None)
        num_computed[prefix.row] += prefix.num_tokens - prefix.known
        for number in prefix.heirs:
            known[number].learn(made[-1], 0, prefix.num_tokens)
    last = None
    for step in found.steps:
        # rows with windows would give up what is seen at their end before it is kept
        goes_on = last is not None and (last.rows, last.stop) == (step.rows, step.start) and not made[-1].windows
        some = [inputs[number] for number in step.rows]
        forward(some, step.rows, step.start, step.stop, made[-1] if goes_on else None)
        last = step
        for at, number in enumerate(step.rows):
            pad = inputs[number].pad
            num_computed[number] += max(0, step.stop - pad) - max(0, step.start - pad)
            known[number].learn(made[-1], at, max(0, step.stop - pad))
    return num_computed, made


def _start(row: RowInput, known: Known, latest: int) -> int | None:
    """Return the last column at which a row can start as it is; None: nothing of it is known."""
    return min(row.pad + known.num_tokens, latest) if known.num_tokens else None


def _least(inputs: Sequence[RowInput], known: Sequence[Known], latest: int) -> int:
    """Return the column at which all rows can start as they are: rows of padding alone up to it start anywhere."""
    column = min(_start(row, of_row, latest) or row.pad for row, of_row in zip(inputs, known, strict=True))
    return column if any(row.pad < column for row in inputs) else 0
