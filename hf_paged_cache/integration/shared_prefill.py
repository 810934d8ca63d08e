"""What runs ahead of the forward over all rows of a call: a prefix that rows share, once, and rows that know less than others.

Each is a small call of rows of its own; what it computes is kept, and copied from its rows to those of the call.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..call.match import Known
from ..call.plan import FORWARD_COST_ON_ACCELERATOR, FORWARD_COST_ON_HOST, Bounds, PlannedRow, Prefix, Step, plan
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..model.cache_adapters import cache_argument
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .keeping import Keeping
from .side_forward import SideForwards


class OpensRows(Protocol):
    """Who fills rows and keeps them."""

    store: BlockStore
    keeping: Keeping

    def run_ahead(
        self,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        previous: Rows | None,
    ) -> Rows: ...


class SharedPrefill:
    """Runs what comes first.

    Args:
        calls: fills rows and keeps them.
        side: makes arguments of forwards.
    """

    def __init__(self, calls: OpensRows, side: SideForwards) -> None:
        self._calls, self._side = calls, side

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
    ) -> tuple[int, Mapping[int, int]]:
        """Let rows come to one column; what is computed for them is theirs.

        Args:
            latest: the last column at which they may start.
            arguments: of the forward, by name.
            previous: of the call before.
            is_exact: rows start where they are known, or begin anew: layers have windows.

        Returns:
            the column at which all rows start, and for each row the tokens that were computed for it first.
        """
        ahead: Counter[int] = Counter()
        if latest <= 0:
            return 0, ahead
        if len(inputs) == 1:
            column = min(inputs[0].pad + known[0].num_tokens, latest)
            return column if column > inputs[0].pad else 0, ahead
        starts = [min(row.pad + of_row.num_tokens, latest) for row, of_row in zip(inputs, known, strict=True)]
        column = _least(inputs, known, starts)
        may_share = may_share and request.num_new_columns > self._calls.store.block_size
        if not may_share and not is_exact:
            return column, ahead
        rows = [
            PlannedRow(row.pad, start if of_row.num_tokens else None, row.token_ids, kind)
            for row, of_row, start, kind in zip(inputs, known, starts, _kinds(inputs), strict=True)
        ]
        with self._calls.store.lock:
            on_host = self._calls.store.pool.is_on_host
        cost = FORWARD_COST_ON_HOST if on_host else FORWARD_COST_ON_ACCELERATOR
        align = self._calls.store.block_size if is_exact else 1
        bounds = Bounds(0, request.num_new_columns, latest, cost, is_exact=is_exact, align=align)
        found = plan(rows, bounds, may_run_ahead=may_share)
        if is_exact:
            for number in range(len(rows)) if found is None else found.cold:
                known[number].forget()
            column = 0 if found is None or all(row.pad >= found.column for row in inputs) else found.column
        if found is None or not found.runs:
            return column, ahead
        options = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
        for prefix in found.prefixes:
            self._prefix(prefix, inputs, known, options, previous)
            ahead[prefix.row] += prefix.num_tokens - prefix.known
        for step in found.steps:
            self._step(step, inputs, known, options, previous)
            for number in step.rows:
                pad = inputs[number].pad
                ahead[number] += max(0, step.stop - pad) - max(0, step.start - pad)
        if is_exact:
            return column, ahead
        starts = [min(row.pad + of_row.num_tokens, latest) for row, of_row in zip(inputs, known, strict=True)]
        return min(found.column, _least(inputs, known, starts)), ahead

    def _prefix(
        self,
        prefix: Prefix,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        options: Mapping[str, Any],
        previous: Rows | None,
    ) -> None:
        """Compute a prefix in one row, for all rows that begin with it."""
        row = inputs[prefix.row]
        pad = 0 if self._side.takes_positions else row.pad
        alone = row._replace(token_ids=row.token_ids[: prefix.num_tokens], pad=pad)
        start = pad + prefix.known if prefix.known else 0
        made = self._run([alone], [known[prefix.row]], start, pad + prefix.num_tokens, options, previous)
        for number, num_tokens in prefix.heirs.items():
            known[number].learn(made, 0, num_tokens)

    def _step(
        self,
        step: Step,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        options: Mapping[str, Any],
        previous: Rows | None,
    ) -> None:
        """Compute columns of some rows."""
        some = [inputs[number] for number in step.rows]
        cut = [row._replace(token_ids=row.token_ids[: max(0, step.stop - row.pad)]) for row in some]
        made = self._run(cut, [known[number] for number in step.rows], step.start, step.stop, options, previous)
        for at, number in enumerate(step.rows):
            known[number].learn(made, at, max(0, step.stop - inputs[number].pad))

    def _run(
        self,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        options: Mapping[str, Any],
        previous: Rows | None,
    ) -> Rows:
        """Rows that run the columns `[start, stop)`."""
        model = self._side.model
        if all(row.pad >= start for row in inputs):
            start = 0
        rows = self._calls.run_ahead(inputs, known, start, stop, previous)
        passed = self._side.arguments_of(inputs, start, stop)
        always = {**options, cache_argument(model): rows, "use_cache": True, "return_dict": True}
        if self._side.takes_logits_to_keep:
            always["logits_to_keep"] = 1
        rows.in_generate = True
        with torch.no_grad():
            model(**{**always, **passed})
        return rows

    def keep(self, known: Sequence[Known]) -> None:
        """Keep what ran ahead: the model was the same all the time."""
        made = {id(of_row.ahead[0]): of_row.ahead[0] for of_row in known if of_row.ahead is not None}
        for rows in made.values():
            self._calls.keeping.keep_ahead(rows)


def _least(inputs: Sequence[RowInput], known: Sequence[Known], starts: Sequence[int]) -> int:
    """The column at which all rows can start as they are: rows of padding alone up to there start anywhere."""
    column = min(
        start if of_row.num_tokens else row.pad for row, of_row, start in zip(inputs, known, starts, strict=True)
    )
    return column if any(row.pad < column for row in inputs) else 0


def _kinds(inputs: Sequence[RowInput]) -> list[int]:
    """Rows of one kind have one root, and can share."""
    kinds: dict[bytes, int] = {}
    return [kinds.setdefault(row.root, len(kinds)) for row in inputs]
