"""Runs what comes ahead of the forward over all rows of a call.

This is a prefix that rows share, which runs once; rows that know less than others; and, where layers carry states, the
part of a prompt after which the states are kept. Each is a small call of rows of its own. What it computes is kept, and
copied from its rows to those of the call.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..call.match import Known
from ..call.plan import FORWARD_COST_ON_ACCELERATOR, FORWARD_COST_ON_HOST, Bounds, Plan, PlannedRow, cut, plan
from ..call.request import ForwardRequest, RowInput
from ..model.cache_adapters import cache_argument
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .side_forward import SideForwards

_LEAST_GAIN = 64  # states are kept only if they save the next prompt so many tokens after a known place


class OpensRows(Protocol):
    """`OpensRows` makes rows and fills them with what is known."""

    store: BlockStore

    def run_ahead(
        self,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        previous: Rows | None,
    ) -> Rows: ...


class Ahead(NamedTuple):
    """`Ahead` says what ran ahead.

    Attributes:
        start: column at which all rows start.
        num_computed: row -> number of tokens that were computed for it.
        made: rows that ran ahead, in their order.
    """

    start: int
    num_computed: Mapping[int, int] = {}
    made: Sequence[Rows] = ()


class SharedPrefill:
    """`SharedPrefill` plans what comes ahead, and runs it.

    Args:
        opening: makes and fills rows.
        side: makes the arguments of forwards.
    """

    def __init__(self, opening: OpensRows, side: SideForwards) -> None:
        self._opening, self._side = opening, side

    def run(
        self,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        request: ForwardRequest,
        latest: int,
        arguments: Mapping[str, Any],
        previous: Rows | None,
        *,
        may_share: bool,
        is_exact: bool,
    ) -> Ahead:
        """Bring rows to one column. What is computed ahead for a row is added to what is known of it.

        Args:
            latest: last column at which the rows may start.
            arguments: arguments of the forward, by name.
            previous: rows of the call before.
            may_share: whether a prefix that rows share may run once.
            is_exact: whether rows start exactly where they are known, or begin anew: layers have windows, or carry
                states.
        """
        if latest <= 0:
            return Ahead(0)
        store = self._opening.store
        are_cut = is_exact and (bool(store.states) or any(row.num_matched > row.num_tokens for row in known))
        if len(inputs) == 1 and not are_cut:
            column = min(inputs[0].pad + known[0].num_tokens, latest)
            return Ahead(column if column > inputs[0].pad else 0)
        starts = [min(row.pad + of_row.num_tokens, latest) for row, of_row in zip(inputs, known, strict=True)]
        may_share = may_share and request.num_new_columns > store.block_size
        if not may_share and not is_exact:
            return Ahead(_least(inputs, known, starts))
        bounds = self._bounds(request, latest, is_exact=is_exact)
        rows = _planned(inputs, known, starts)
        found = plan(rows, bounds, may_run_ahead=may_share)
        if is_exact:
            for number in range(len(rows)) if found is None else found.cold:
                known[number].forget()
        if found is not None and may_share and are_cut:
            found = self._cut(found, rows, known, bounds)
        if found is None or not found.runs:
            if not is_exact:
                return Ahead(_least(inputs, known, starts))
            return Ahead(0 if found is None or all(row.pad >= found.column for row in inputs) else found.column)
        options = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
        made = _Made(self._opening, self._side, inputs, known, options, previous)
        made.run(found)
        if is_exact:
            return Ahead(found.column, made.num_computed, made.rows)
        starts = [min(row.pad + of_row.num_tokens, latest) for row, of_row in zip(inputs, known, strict=True)]
        return Ahead(min(found.column, _least(inputs, known, starts)), made.num_computed, made.rows)

    def cost(self, inputs: Sequence[RowInput], known: Sequence[Known], request: ForwardRequest, latest: int) -> float:
        """Return what it costs, in tokens, to bring rows to one column if they start exactly where they are known."""
        starts = [min(row.pad + of_row.num_tokens, latest) for row, of_row in zip(inputs, known, strict=True)]
        found = plan(_planned(inputs, known, starts), self._bounds(request, latest, is_exact=True))
        return math.inf if found is None else found.cost

    def _bounds(self, request: ForwardRequest, latest: int, *, is_exact: bool) -> Bounds:
        store = self._opening.store
        with store.lock:
            on_host = store.pool.is_on_host
        cost, rules = FORWARD_COST_ON_HOST if on_host else FORWARD_COST_ON_ACCELERATOR, store.states.rules
        return Bounds(
            0,
            request.num_new_columns,
            latest,
            cost,
            is_exact=is_exact,
            width=rules.width,
            least=2 if rules.clamps_one_token else 1,
            align=store.states.align if is_exact else 1,
        )

    def _cut(self, found: Plan, rows: list[PlannedRow], known: Sequence[Known], bounds: Bounds) -> Plan:
        """Return a plan whose forwards also end where windows or states of rows are to be kept."""
        with self._opening.store.lock:
            for number, (planned, of_row) in enumerate(zip(rows, known, strict=True)):
                ahead = max((prefix.heirs.get(number, 0) for prefix in found.prefixes), default=0)
                rows[number] = planned._replace(wanted=self._wanted(planned, of_row, ahead, bounds))
        return cut(found, rows, bounds)

    def _wanted(self, planned: PlannedRow, known: Known, ahead: int, bounds: Bounds) -> tuple[int, ...]:
        """Return after how many tokens of a row its windows or states are to be kept, so that later calls resume there.

        One place is where the row parts from what is known. States, unless a forward shows them everywhere, are also
        kept at the last place before the prompt's end and, in a long prompt, at places in between, as long as there is
        room.

        Args:
            ahead: tokens of the longest prefix that is computed for the row.
        """
        states, most = self._opening.store.states, bounds.latest - planned.pad
        if not states or states.rules.is_recorded:
            parts_at = min(known.num_matched, most) // states.align * states.align
            return (parts_at,) if parts_at > max(known.num_tokens, ahead) and self._opening.store.windows else ()
        align, first, last = states.align, max(known.num_tokens, ahead), max(known.num_in_blocks, ahead)
        wanted = {most // align * align, min(known.num_matched, most) // align * align}
        grid = range(first // states.grid * states.grid + states.grid, most, states.grid)
        if len(grid) + len(wanted) <= states.kept.num_free:
            wanted.update(grid)
        least = max(first + 1, last + _LEAST_GAIN if last else 1)
        return tuple(sorted(place for place in wanted if place >= least))


class _Made:
    """`_Made` makes and runs the rows that run ahead of one call.

    Args:
        inputs: what each row of the call brings.
        known: what is known of each row of the call.
        options: plain arguments of the call's forward, name -> value.
        previous: rows of the call before.

    Attributes:
        num_computed: row -> number of tokens that were computed for it.
        rows: rows that ran ahead, in their order.
    """

    def __init__(
        self,
        opening: OpensRows,
        side: SideForwards,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        options: Mapping[str, Any],
        previous: Rows | None,
    ) -> None:
        self._opening, self._side, self._inputs, self._known = opening, side, inputs, known
        self._options, self._previous = options, previous
        self.num_computed: Counter[int] = Counter()
        self.rows: list[Rows] = []

    def run(self, found: Plan) -> None:
        """Run the forwards of a plan."""
        for prefix in found.prefixes:
            row = self._inputs[prefix.row]
            pad = min(row.pad, self._opening.store.states.rules.width) if self._side.takes_positions else row.pad
            start, stop = pad + prefix.known if prefix.known else 0, pad + prefix.num_tokens
            made = self._forward(None, [row._replace(pad=pad)], [self._known[prefix.row]], start, stop)
            self.num_computed[prefix.row] += prefix.num_tokens - prefix.known
            for number, num_tokens in prefix.heirs.items():
                self._known[number].learn(made, 0, num_tokens)
        last: tuple[tuple[int, ...], Rows] | None = None
        for step in found.steps:
            going_on = last[1] if last is not None and last[0] == step.rows and last[1].n == step.start else None
            if going_on is not None and going_on.windows is not None:
                going_on = None  # rows with windows would give up what is seen at their end before it is kept
            some, known = [self._inputs[at] for at in step.rows], [self._known[at] for at in step.rows]
            made = self._forward(going_on, some, known, step.start, step.stop)
            last = step.rows, made
            for at, number in enumerate(step.rows):
                pad = some[at].pad
                self.num_computed[number] += max(0, step.stop - pad) - max(0, step.start - pad)
                self._known[number].learn(made, at, max(0, step.stop - pad))

    def _forward(
        self, going_on: Rows | None, inputs: Sequence[RowInput], known: Sequence[Known], start: int, stop: int
    ) -> Rows:
        """Run the columns `[start, stop)`, and return the rows that ran them.

        Args:
            going_on: rows that have run to `start`; None: new rows begin.
        """
        side, rows = self._side, going_on
        inputs = [row._replace(token_ids=row.token_ids[: max(0, stop - row.pad)]) for row in inputs]
        if rows is None:
            start = 0 if all(row.pad >= start for row in inputs) else start
            rows = self._opening.run_ahead(inputs, known, start, stop, self._previous)
            rows.in_generate = True
            self.rows.append(rows)
        always = {**self._options, cache_argument(side.model): rows, "use_cache": True, "return_dict": True}
        if side.takes_logits_to_keep:
            always["logits_to_keep"] = 1
        with torch.no_grad():
            side.model(**{**always, **side.arguments_of(inputs, start, stop)})
        return rows


def _planned(inputs: Sequence[RowInput], known: Sequence[Known], starts: Sequence[int]) -> list[PlannedRow]:
    return [
        PlannedRow(row.pad, start if of_row.num_tokens else None, row.token_ids, kind)
        for row, of_row, start, kind in zip(inputs, known, starts, _kinds(inputs), strict=True)
    ]


def _least(inputs: Sequence[RowInput], known: Sequence[Known], starts: Sequence[int]) -> int:
    """Return the column at which all rows can start as they are: rows of padding alone up to it start anywhere."""
    column = min(
        start if of_row.num_tokens else row.pad for row, of_row, start in zip(inputs, known, starts, strict=True)
    )
    return column if any(row.pad < column for row in inputs) else 0


def _kinds(inputs: Sequence[RowInput]) -> list[int]:
    """Return the number of each row's kind: rows of one kind have one root, and can share."""
    kinds: dict[bytes, int] = {}
    return [kinds.setdefault(row.root, len(kinds)) for row in inputs]
