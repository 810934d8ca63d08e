"""Brings the rows of a forward to one column where layers carry states, and cuts it where snapshots are wanted.

Owns the forwards that this takes, ahead of the one that was asked for, on sibling caches; `call.state_plan` says which. Refuses
nothing: what cannot be done so is computed from where all rows can go on.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ..blocks import resumable
from ..call.admission import would_fit
from ..call.call import Call
from ..call.call_states import row_origin
from ..call.rows import Origin, Row, Rows
from ..call.schedule import FORWARD_COST_ON_ACCELERATOR, FORWARD_COST_ON_HOST
from ..call.scheduled_forward import ForwardRequest, ScheduledForward
from ..call.state_plan import Bounds, Prefix, Staircase, StatefulRow, climb, cut, shared
from ..errors import OutOfBlocksError
from ..kv.states import row_of
from ..model.conditioning import Conditioning
from ..store.block_store import BlockStore
from .ranks import Ranks
from .side_forward import SiblingCache, SideForwards, SideRow

_LEAST_GAIN = 64  # tokens behind a known place that a snapshot must save the next prompt


class _ChangedError(Exception):
    """What was computed ahead is not what the rows would compute: the model has changed meanwhile."""


class StateForwards:
    """Plans and runs the forwards of one cache's rows whose layers carry states.

    Args:
        blocks: where rows and snapshots are stored.
        conditioning: the model, and whether a shorter forward computes the same.
        side: runs the forwards.
        ranks: the processes that must run as many.
    """

    def __init__(self, blocks: BlockStore, conditioning: Conditioning, side: SideForwards, ranks: Ranks) -> None:
        self._blocks = blocks
        self._conditioning = conditioning
        self._side = side
        self._ranks = ranks

    def schedule(
        self,
        request: ForwardRequest,
        call: Call,
        arguments: Mapping[str, Any],
        *,
        digest: bytes,
        may_run_ahead: bool,
    ) -> ScheduledForward:
        """Prepare the rows, bring them together, and take their blocks. No lock is held while a model runs.

        Args:
            arguments: of the forward, by name.
            digest: of the model, of which the rows' roots are.
            may_run_ahead: forwards of our own would compute the same, and nobody counts them.
        """
        with self._blocks.lock:
            call.prepare(request)
            if not may_run_ahead or not self._may_run(call) or not self._pays(request, call):
                return call.schedule(request)
            is_trusted = call.rows.are_trusted
        # Forwards ahead commit what they go on from, so first it is judged: no lock is held meanwhile.
        is_known_good = is_trusted or self._conditioning.digest() == digest
        with self._blocks.lock:
            if not is_trusted:
                call.judge(conditions_held=is_known_good)
            if not is_known_good:
                return call.schedule(request)
            options = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
            run = Ahead(self._blocks, self._side, call, request, options, digest)
        with ExitStack() as held:
            try:
                column = run.bring(held)
            except (OutOfBlocksError, _ChangedError):  # rows go on from where all of them can
                run.num_computed, run.cold, column = {}, frozenset(), None
            except BaseException:
                if call.forward is None:
                    call.roll_back()
                raise
            finally:
                with self._blocks.lock:
                    call.demand = None  # rows may hold more by now
        return call.schedule(request, run.num_computed, state_column=column, cold=run.cold)

    def _may_run(self, call: Call) -> bool:
        """Whether forwards of our own may come first."""
        if not call.states.plans_ahead or self._ranks.are_several:
            return False
        return not self._conditioning.rope.depends_on_length  # a shorter forward has other frequencies

    def _pays(self, request: ForwardRequest, call: Call) -> bool:
        """Whether there is anything to bring together or to cut: a decode step has neither."""
        is_lost = call.states.are_torn and call.rows.num_columns > 0
        return is_lost or (request.num_new_columns > 1 and request.bypass is None and request.keep_columns is None)


class Ahead:
    """The forwards ahead of one.

    Attributes:
        num_computed: row of the batch -> tokens computed for it ahead.
        cold: running rows that begin anew.
    """

    def __init__(
        self,
        blocks: BlockStore,
        side: SideForwards,
        call: Call,
        request: ForwardRequest,
        options: Mapping[str, Any],
        digest: bytes,
    ) -> None:
        self._blocks = blocks
        self._side = side
        self._call = call
        self._request = request
        self._options = options
        self._digest = digest
        before, rules = call.rows.num_columns, blocks.states.rules
        self._bounds = Bounds(
            before,
            before + request.num_new_columns,
            call.states.latest_start(call.rows, request),
            rules.width,
            FORWARD_COST_ON_HOST if blocks.pool.is_on_host else FORWARD_COST_ON_ACCELERATOR,
            2 if rules.clamps_one_token else 1,
        )
        self._members = call.rows.members()
        self._tokens = [
            row.with_new(request.rows[member].token_ids)
            for row, member in zip(call.rows.distinct, self._members, strict=True)
        ]
        self.num_computed: dict[int, int] = {}
        self.cold: frozenset[int] = frozenset()

    def bring(self, held: ExitStack) -> int | None:
        """Run what pays; returns the column at which the rows' origins are, None where nothing was run for it.

        Raises:
            OutOfBlocksError: a forward does not fit.
        """
        call, rows = self._call, self._call.rows
        with self._blocks.lock:
            planned = call.states.as_planned(rows)
            is_first = not call.num_scheduled and call.limits.are_known
            if is_first and not would_fit(call, self._bounds.stop, 0, num_prefixes=1):
                return None  # it is refused, or windows have no room behind a forward ahead: nothing was computed
        planned = self._share(held, planned)
        staircase = climb(planned, self._bounds)
        if staircase is None:
            return None
        if not self._blocks.states.rules.is_recorded:
            wanted = [self._wanted(number, row) for number, row in enumerate(planned)]
            planned = [row._replace(wanted=places) for row, places in zip(planned, wanted, strict=True)]
            staircase = cut(staircase, planned, self._bounds)
        self.cold = staircase.cold
        if not staircase.steps:
            return staircase.column
        if call.states.are_torn and self._bounds.before:
            call.states.require_known(rows)
        return self._climb(held, staircase, planned)

    def _wanted(self, number: int, planned: StatefulRow) -> tuple[int, ...]:
        """Tokens of a row behind which a snapshot is wanted: the last place before the prompt's end, where it parts from
        what is known, and in a long prompt, as long as there is room, places in between.
        """
        states, row = self._blocks.states, self._call.rows.distinct[number]
        align, most = states.align, self._bounds.latest - row.pad
        known = (planned.start or row.pad) - row.pad
        with self._blocks.lock:
            num_free, num_held = states.kept.num_free, max(row.num_matched, row.table.num_tokens)
            last = resumable((states.kept,), row.table.block_ids, num_held)
        wanted = {most // align * align, min(num_held, most) // align * align}
        grid = range(known // states.grid * states.grid + states.grid, most, states.grid)
        if len(grid) + len(wanted) <= num_free:
            wanted.update(grid)
        least = max(known + 1, last + _LEAST_GAIN if last else 1)
        return tuple(sorted(place for place in wanted if place >= least))

    def _share(self, held: ExitStack, planned: list[StatefulRow]) -> list[StatefulRow]:
        """Compute the prefixes that rows share, where that pays; returns the rows, which may go on behind them."""
        rows = self._call.rows  # one that is not what its tokens say shares nothing
        if len(planned) < 2 or not self._request.may_alias or self._bounds.latest <= self._bounds.before:
            return planned
        prefixes, changed = shared(
            self._tokens,
            [(row.root, -1 if row.commit_end is None else number) for number, row in enumerate(rows.distinct)],
            planned,
            [self._bounds.latest - row.pad for row in planned],
            self._bounds,
            align=self._blocks.states.align,
        )
        for prefix in prefixes:
            self._compute(held, prefix)
        return changed

    def _compute(self, held: ExitStack, prefix: Prefix) -> None:
        """Compute a prefix in one row, and let all rows that share it go on behind it."""
        call, row = self._call, self._call.rows.distinct[prefix.row]
        cache = held.enter_context(self._side.sibling())
        start = row_origin(row)
        pad = min(row.pad, self._bounds.width) if self._side.takes_positions else row.pad
        begins = [SideRow(pad, row.first_position, self._tokens[prefix.row])]
        column = pad + start if start else 0
        with self._blocks.lock:
            cache.call.join(Rows([self._forked(row, pad, column)], [0], column))
        self._run(cache, begins, column, pad + prefix.num_tokens)
        member = self._members[prefix.row]
        self.num_computed[member] = self.num_computed.get(member, 0) + prefix.num_tokens - start
        with self._blocks.lock:
            (side_row,) = cache.call.rows.distinct
            if not _may_be_adopted(side_row, row):
                raise _ChangedError
            origin = Origin(prefix.num_tokens, row_of(cache.call.states.live.read(), 0))
            for number in prefix.members:
                other = call.rows.distinct[number]
                if other.table.num_tokens < prefix.num_tokens:
                    replaced, other.table = other.table, side_row.table.fork()
                    replaced.free()
                    if other.table.num_tokens > prefix.num_tokens:
                        other.table.truncate(prefix.num_tokens)
                other.origin = origin

    def _climb(self, held: ExitStack, staircase: Staircase, planned: list[StatefulRow]) -> int:
        """Run the steps, and let the rows go on behind them."""
        rows = self._call.rows
        cache = held.enter_context(self._side.sibling())
        joined: list[int] = []
        starts: dict[int, int] = {}
        for step in staircase.steps:
            joining = [number for number in step.rows if number not in joined]
            starts.update(dict.fromkeys(joining, step.start))
            with self._blocks.lock:
                forks = [
                    self._joined(rows.distinct[number], step.start, number in staircase.cold) for number in joining
                ]
                if forks:
                    cache.call.join(Rows(forks, list(range(len(forks))), step.start))
            joined += joining
            side_rows = [
                SideRow(rows.distinct[number].pad, rows.distinct[number].first_position, self._tokens[number])
                for number in joined
            ]
            self._run(cache, side_rows, step.start, step.stop)
        with self._blocks.lock:
            self._adopt(cache, joined, staircase.column)
        for number, start in starts.items():
            row, member = rows.distinct[number], self._members[number]
            ahead = max(0, staircase.column - row.pad) - max(0, max(start, self._bounds.before) - row.pad)
            if ahead > 0:
                self.num_computed[member] = self.num_computed.get(member, 0) + ahead
        return staircase.column

    def _run(self, cache: SiblingCache, rows: list[SideRow], start: int, stop: int) -> None:
        self._side.run_columns(cache, rows, start, stop, digest=self._digest, options=self._options)

    def _forked(self, row: Row, pad: int, column: int) -> Row:
        """A row that goes on from another one's origin, in the same blocks."""
        forked = row.fork()
        forked.pad = pad
        forked.num_known = forked.num_confirmed = max(0, column - pad)
        return forked

    def _joined(self, row: Row, column: int, is_cold: bool) -> Row:
        """A row that joins the forwards ahead: from its origin, or in its padding, of which it may have seen a part."""
        if column > row.pad and not is_cold:
            return self._forked(row, row.pad, column)
        begun = Row(
            self._blocks.new_table(row.root, row.table.namespace), min(row.pad, column), row.root, row.first_position
        )
        begun.origin = None if is_cold else row.origin
        return begun

    def _adopt(self, cache: SiblingCache, joined: list[int], column: int) -> None:
        """Rows go on where those of a sibling have come to.

        Raises:
            _ChangedError: they must not.
        """
        call, live = self._call, cache.call.states.live.read()
        side_rows = cache.call.rows.distinct
        if not all(
            _may_be_adopted(side_row, call.rows.distinct[number])
            for side_row, number in zip(side_rows, joined, strict=True)
        ):
            raise _ChangedError
        for at, (side_row, number) in enumerate(zip(side_rows, joined, strict=True)):
            row = call.rows.distinct[number]
            replaced, row.table = row.table, side_row.table.fork()
            replaced.free()
            row.origin = Origin(max(0, column - row.pad), row_of(live, at))


def _may_be_adopted(side_row: Row, row: Row) -> bool:
    """Whether what was computed ahead is what the row would compute."""
    return side_row.commit_end in (None, row.commit_end) and side_row.root == row.root
