"""The forwards that run ahead of one over all rows, on sibling caches: `call.plan` says which.

Owns when there may be any, and that rows hold what was computed before anybody can evict it. Refuses nothing: where they may not run, do
not pay or do not fit, rows are computed as they are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..blocks import resumable
from ..blocks.tokens import TokenIds
from ..call.admission import would_fit
from ..call.call import Call
from ..call.plan import FORWARD_COST_ON_ACCELERATOR, FORWARD_COST_ON_HOST, Bounds, Plan, PlannedRow, Prefix, cut, plan
from ..call.rows import Origin, Row, Rows
from ..call.schedule import resumable_column
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..errors import OutOfBlocksError
from ..kv.states import States, row_of
from ..store.block_store import BlockStore
from .side_forward import SideForwards

_LEAST_GAIN = 64  # tokens after a known place that a snapshot must save the next prompt


class _ChangedError(Exception):
    """Rows cannot continue as was planned: the model has changed meanwhile, or a window no longer shows what is before a row's column."""


class Ahead(NamedTuple):
    """What has run ahead of a forward: what `Call.schedule` must know of it.

    Attributes:
        computed: row of the batch -> tokens computed for it.
        column: where the origins of all rows are; None: where all can resume, as they are.
        cold: running rows that begin anew before that column.
    """

    computed: Mapping[int, int] = {}
    column: int | None = None
    cold: frozenset[int] = frozenset()


class ForwardsAhead:
    """Plans the forwards ahead of one cache's, and has them run by `side`."""

    def __init__(self, blocks: BlockStore, side: SideForwards) -> None:
        self._blocks = blocks
        self._side = side

    def may_run(self, request: ForwardRequest, call: Call) -> bool:
        """Whether there may be any: there is something to share, to bring together or to cut."""
        if not call.plans_ahead or request.has_images:
            return False
        for row in call.rows.distinct:
            if row.shift:
                return False
        if call.states is not None:
            is_lost = call.states.are_lost(call.rows)
            is_one_column = request.num_new_columns == 1
        else:
            is_lost, is_one_column = False, request.num_new_columns <= self._blocks.block_size
            if len(call.rows.distinct) == 1 or not request.may_alias:
                return False
        return is_lost or not (is_one_column or request.bypass is not None or request.keep_columns is not None)

    def plan(self, request: ForwardRequest, call: Call, num_known: Sequence[int] | None = None) -> Plan | None:
        """The forwards that pay, of the rows that the call has prepared; None where there is nothing to say. The store's lock is held.

        Args:
            num_known: tokens of each running row that count as known; None: what it holds.
        """
        bounds = self._bounds(request, call)
        rows = self._planned(request, call, bounds.latest, num_known)
        found = plan(rows, bounds)
        if found is not None and not all(map(_can_join, call.rows.distinct, found.starts(len(rows)).values())):
            found = plan(rows, bounds._replace(is_exact=True))
        if call.states is None:
            return found if found is not None and found.runs else None
        if found is None or self._blocks.states.rules.is_recorded:
            return found
        for number, (row, planned) in enumerate(zip(call.rows.distinct, rows, strict=True)):
            ahead = max((prefix.heirs.get(number, 0) for prefix in found.prefixes), default=0)
            rows[number] = planned._replace(wanted=self._wanted(row, planned, ahead, bounds))
        return cut(found, rows, bounds)

    def fits(self, found: Plan, request: ForwardRequest, call: Call) -> bool:
        """Whether the call fits if this runs ahead of it: else it is refused before anything is computed. The store's lock is held."""
        size, num_shared = self._blocks.block_size, 0
        held = [*map(_num_tokens, call.rows.distinct)]
        for prefix in found.prefixes:
            for number, num_tokens in prefix.heirs.items():
                if number != prefix.row:
                    num_shared += max(0, num_tokens // size - -(-held[number] // size))
                held[number] = max(held[number], num_tokens)
        for number in {number for step in found.steps for number in step.rows}:  # they give up what comes after it
            kept = max(0, found.column - call.rows.distinct[number].pad)
            num_shared -= max(0, -(-held[number] // size) - -(-kept // size))
        stop = call.rows.num_columns + request.num_new_columns
        return would_fit(call, stop, num_shared, len(found.prefixes) + bool(found.steps))

    def run(
        self,
        found: Plan,
        request: ForwardRequest,
        call: Call,
        arguments: Mapping[str, Any],
        digest: bytes,
        *,
        on_ranks: bool = False,
    ) -> Ahead:
        """Run a plan, and let the rows hold what it computes. No lock is held while a model runs.

        Args:
            arguments: of the forward, by name.
            digest: of the model, of which the rows' roots are.
            on_ranks: other processes run as many forwards, whatever becomes of them here.
        """
        rows, column = call.rows, found.column if call.states is not None else None
        with self._blocks.lock:
            call.previous.free()  # the call fits beside no rows of before: what runs ahead needs their blocks now
        if call.states is not None and call.states.are_lost(rows):
            call.states.require_known(rows)
        options = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
        running = Forerunners(self._side, call, request, options, digest, raises=not on_ranks)
        try:
            running.run(found)
        except (OutOfBlocksError, _ChangedError):  # rows resume from where all of them can
            return Ahead(running.num_computed)
        finally:
            with self._blocks.lock:
                call.demand = None  # rows may hold more by now
        return Ahead(running.num_computed, column, found.cold)

    def _bounds(self, request: ForwardRequest, call: Call) -> Bounds:
        blocks, before = self._blocks, call.rows.num_columns
        rules = blocks.states.rules
        return Bounds(
            before,
            before + request.num_new_columns,
            request.latest_start(before, call.num_needed(request)),
            FORWARD_COST_ON_HOST if blocks.pool.is_on_host else FORWARD_COST_ON_ACCELERATOR,
            is_exact=call.states is not None,
            first=0 if call.states is not None else before,
            width=rules.width,
            least=2 if rules.clamps_one_token else 1,
            align=blocks.states.align,
        )

    def _planned(
        self, request: ForwardRequest, call: Call, latest: int, num_known: Sequence[int] | None
    ) -> list[PlannedRow]:
        rows = call.rows
        if call.states is not None:
            planned = call.states.as_planned(rows)
        else:
            planned = []
            for row, number in zip(rows.distinct, num_known or map(_num_tokens, rows.distinct), strict=True):
                start = row.table.num_resumable_tokens(min(number, max(0, latest - row.pad)))
                planned.append(PlannedRow(row.pad, max(row.pad + start, rows.num_columns) if start else None))
        if len(planned) > 1 and request.may_alias:
            kinds: dict[object, int] = {}  # by number: the order of roots is another in each process
            for number, (row, tokens) in enumerate(zip(rows.distinct, all_tokens(request, rows), strict=True)):
                # a row that is not what its tokens say shares nothing
                kind = row.root, -1 if row.commit_end is None else number
                planned[number] = planned[number]._replace(token_ids=tokens, kind=kinds.setdefault(kind, len(kinds)))
        return planned

    def _wanted(self, row: Row, planned: PlannedRow, ahead: int, bounds: Bounds) -> tuple[int, ...]:
        """Tokens of a row after which a snapshot is wanted: the last place before the prompt's end, where it parts from
        what is known, and in a long prompt, as long as there is room, places in between.

        Args:
            ahead: tokens of the longest prefix that is computed for it.
        """
        states, most = self._blocks.states, bounds.latest - row.pad
        align, known = states.align, max(planned.known, ahead)
        num_held = max(row.num_matched, row.table.num_tokens)
        last = max(resumable((states.kept,), row.table.block_ids, num_held), ahead)
        wanted = {most // align * align, min(num_held, most) // align * align}
        grid = range(known // states.grid * states.grid + states.grid, most, states.grid)
        if len(grid) + len(wanted) <= states.kept.num_free:
            wanted.update(grid)
        least = max(known + 1, last + _LEAST_GAIN if last else 1)
        return tuple(sorted(place for place in wanted if place >= least))


class Forerunners:
    """The forwards ahead of one, as they run.

    Attributes:
        num_computed: row of the batch -> tokens computed for it ahead.
    """

    def __init__(
        self,
        side: SideForwards,
        call: Call,
        request: ForwardRequest,
        options: Mapping[str, Any],
        digest: bytes,
        *,
        raises: bool,
    ) -> None:
        self.num_computed: Counter[int] = Counter()
        self._blocks = call.store
        self._side = side
        self._call = call
        self._options = options
        self._digest = digest
        self._raises = (
            raises  # at once, where what was computed is of another model; else other ranks run as many forwards
        )
        self._has_changed = False
        self._members = call.rows.members()
        self._tokens = all_tokens(request, call.rows)

    def run(self, found: Plan) -> None:
        """Run a plan. Where that fails, rows that run already resume from where they stand, as they could before.

        Raises:
            OutOfBlocksError: a forward does not fit.
            _ChangedError: what was computed must not be held, and is not.
        """
        rows = self._call.rows
        with self._blocks.lock:
            before = [(row, row.table.fork(), row.origin, row.num_known) for row in rows.distinct]
        try:
            with ExitStack() as held:
                for prefix in found.prefixes:
                    self._compute(held.enter_context(self._side.sibling()), prefix)
                if found.steps:
                    self._climb(held.enter_context(self._side.sibling()), found)
            with self._blocks.lock:
                column = resumable_column(rows, rows.num_columns, found.column)
            if self._has_changed or column is None or (self._call.states is not None and column != found.column):
                raise _ChangedError
        except BaseException:
            with self._blocks.lock:
                must_put_back = self._has_changed or (rows.num_columns and self._blocks.groups)
                for row, table, origin, num_known in before if must_put_back else ():
                    if not row.table.allocation.is_freed:
                        replaced, row.table, row.origin, row.num_known = row.table, table, origin, num_known
                        replaced.free()
            raise
        finally:
            with self._blocks.lock:
                for row, table, *_ in before:
                    if row.table is not table:
                        table.free()

    def _compute(self, cache: Any, prefix: Prefix) -> None:
        """Compute a prefix in one row, and let all rows that share it resume after it."""
        call, row = self._call, self._call.rows.distinct[prefix.row]
        width = self._blocks.states.rules.width
        pad = min(row.pad, width) if self._side.takes_positions else row.pad
        column = pad + prefix.known if prefix.known else 0
        with self._blocks.lock:
            cache.call.join(Rows([_forked(row, pad, column)], [0], column))
        self._run(cache, [prefix.row], column, pad + prefix.num_tokens, pad)
        self.num_computed[self._members[prefix.row]] += prefix.num_tokens - prefix.known
        with self._blocks.lock:
            (side_row,) = cache.call.rows.distinct
            live = cache.call.carried()
            for number, num_tokens in prefix.heirs.items():
                self._adopt(call.rows.distinct[number], side_row, row, num_tokens, row_of(live, 0))

    def _climb(self, cache: Any, found: Plan) -> None:
        """Run the steps, and let the rows resume after them."""
        rows, joined = self._call.rows, list[int]()
        starts = found.starts(len(rows.distinct))
        for step in found.steps:
            joining = [number for number in step.rows if number not in joined]
            if joining:
                with self._blocks.lock:
                    forks = [self._joined(rows.distinct[n], step.start, n in found.cold) for n in joining]
                    cache.call.join(Rows(forks, list(range(len(forks))), step.start))
            joined += joining
            self._run(cache, joined, step.start, step.stop)
        for number in joined:
            start = max(starts[number], rows.num_columns)
            pad = rows.distinct[number].pad
            self.num_computed[self._members[number]] += max(0, found.column - pad) - max(0, start - pad)
        with self._blocks.lock:
            live = cache.call.carried()
            for at, (side_row, number) in enumerate(zip(cache.call.rows.distinct, joined, strict=True)):
                row = rows.distinct[number]
                self._adopt(row, side_row, row, max(0, found.column - row.pad), row_of(live, at), replaces=True)

    def _run(self, cache: Any, numbers: Sequence[int], start: int, stop: int, pad: int | None = None) -> None:
        """Run columns `[start, stop)` of rows; with so much padding in place of theirs."""
        rows = []
        for number in numbers:
            row, tokens = self._call.rows.distinct[number], self._tokens[number]
            pads = row.pad if pad is None else pad
            rows.append(RowInput(tokens[max(0, start - pads) : max(0, stop - pads)], pads, row.first_position))
        self._side.run(cache, rows, [stop], digest=self._digest, options=self._options)
        self._call.require_prepared()

    def _joined(self, row: Row, column: int, is_cold: bool) -> Row:
        """A row that joins the forwards ahead: from where it is known, or in its padding, of which it may have seen a part."""
        is_anew = is_cold and self._call.states is not None  # else what it holds up to there is as good
        if not _can_join(row, column):
            raise _ChangedError
        if column > row.pad and not is_anew:
            return _forked(row, row.pad, column)
        begun = Row(
            self._blocks.new_table(row.root, row.table.namespace), min(row.pad, column), row.root, row.first_position
        )
        begun.origin = None if is_anew else row.origin
        return begun

    def _adopt(
        self, row: Row, side_row: Row, like: Row, num_tokens: int, states: States, *, replaces: bool = False
    ) -> None:
        """Let a row resume where a sibling's has come to.

        Args:
            like: the row that it was computed for.
            replaces: also where the row holds as many tokens, but other blocks of windows.

        Raises:
            _ChangedError: it must not.
        """
        if side_row.commit_end not in (None, like.commit_end) or side_row.root != like.root:
            self._has_changed = True
            if self._raises:
                raise _ChangedError
        if replaces or row.table.num_tokens < num_tokens:
            replaced, row.table = row.table, side_row.table.fork()
            replaced.free()
            num_kept = min(num_tokens, row.table.num_tokens)
            if self._call.states is None:  # what windows do not show the end of is computed, and written, again
                num_kept = row.table.num_resumable_tokens(num_kept)
            if row.table.num_tokens > num_kept:
                row.table.truncate(num_kept)
            row.num_known = row.table.num_tokens
        if self._call.states is not None:
            row.origin = Origin(num_tokens, states)


def all_tokens(request: ForwardRequest, rows: Rows) -> list[TokenIds]:
    """Of each running row all tokens, those of the forward included."""
    members = zip(rows.distinct, rows.members(), strict=True)
    return [row.with_new(request.rows[member].token_ids) for row, member in members]


def _can_join(row: Row, column: int) -> bool:
    """Whether all windows show what is before a column of a row, as far as it holds tokens up to there."""
    num_tokens = min(max(0, column - row.pad), row.table.num_tokens)
    return row.table.num_resumable_tokens(num_tokens) == num_tokens


def _num_tokens(row: Row) -> int:
    return row.table.num_tokens


def _forked(row: Row, pad: int, column: int) -> Row:
    """A row that resumes from a column of another one, in the same blocks."""
    forked = row.fork()
    forked.pad = pad
    forked.num_known = forked.num_confirmed = max(0, column - pad)
    return forked
