"""What prompts cost: counted when a forward is scheduled, added up when it is confirmed. Plain numbers."""

from collections.abc import Mapping, Sequence

from ..stats import CallStats, RowCount
from ..store.call_totals import CallTotals
from .call_states import row_origin
from .prefix_match import Found
from .rows import Row, Rows
from .scheduled_forward import ForwardRequest


class PromptCounters:
    """Counts of one call, a row a sequence, and of all calls before it.

    Args:
        of_all: of all caches of the store, in which these calls are counted, too; None: in none.

    Attributes:
        rows: of the running call.
        kind: see `CallStats`; of the running call.
        totals: of all calls.
    """

    def __init__(self, of_all: CallTotals | None = None) -> None:
        self.rows: list[RowCount] = []
        self.kind = "none"  # of the running call
        self._elsewhere: tuple[str, list[RowCount]] | None = None  # the last call, where it ran on other caches
        self.totals = CallTotals()
        self._of_all = CallTotals() if of_all is None else of_all
        self._is_bypassed = False  # the scheduled forward runs without the store
        self._was_bypassed = False  # one of this call has
        self._pending: list[RowCount] = []  # of the scheduled forward
        self._found: Sequence[Found] = ()  # of rows that begin
        self._num_found: list[int] = []  # tokens of the prepared forward that were there before, of each running row
        self._brought: Sequence[Mapping[str, int]] = ()  # of the scheduled forward; empty where there is one tier alone

    def start_call(self, kind: str) -> None:
        """The rows counted from here on are another call's."""
        self.kind, self._elsewhere = kind, None
        self.rows, self._pending, self._found, self._was_bypassed = [], [], (), False

    def bring(self, of_row: Sequence[Mapping[str, int]]) -> None:
        """Of each row of the batch, tokens that the next forward finds because lower tiers had them, by tier."""
        self._brought = of_row

    def prepare(self, rows: Sequence[Row], found: Sequence[Found] | None = None, *, carry_states: bool) -> None:
        """Running rows hold what is known of them, and nothing was computed ahead of the forward yet.

        Args:
            found: of each row of the batch, where they begin.
        """
        if found is not None:
            self._found = found
        self._num_found = [
            max(0, (row_origin(row) if carry_states else row.table.num_tokens) - row.num_confirmed) for row in rows
        ]

    def schedule(
        self,
        request: ForwardRequest,
        rows: Rows,
        *,
        start: int,
        end: float,
        computed_ahead: Mapping[int, int],
        held_back_by: str = "row",
    ) -> None:
        """Count a forward that computes the columns from `start` on, in the prompt's share of it: the columns up to `end`.

        Args:
            rows: that hold what is known of them, and stand where the forward begins.
            computed_ahead: row of the batch -> tokens computed for it, alone, just before.
            held_back_by: "row" or "rank", of which another one's hit is shorter; or "state", of which `found` says it.
        """
        self._pending, self._is_bypassed = [], False
        before, members = rows.num_columns, rows.members()
        if before >= end:
            return
        stop = int(min(end, before + request.num_new_columns))
        for new in request.rows:
            num_tokens = max(0, stop - max(before, new.pad) - new.num_hidden)
            self._pending.append(RowCount(prompt_tokens=num_tokens, stopped=""))
        for member, row in zip(members, rows.distinct, strict=True):
            count = self._pending[member]
            num_skipped = max(0, start - row.pad)
            count.computed_tokens = min(count.prompt_tokens, max(0, stop - max(start, row.pad)))
            if row.table.num_tokens - num_skipped > request.num_logits_needed and held_back_by != "state":
                why = request.keep_columns or f"another {held_back_by}'s hit is shorter"
                count.stopped = f"; cached from {num_skipped} on, but computed again: {why}"
        for member, num_ahead in computed_ahead.items():
            count = self._pending[member]  # what is computed twice, to fill a block, counts once
            count.computed_tokens = min(count.prompt_tokens, count.computed_tokens + num_ahead)
            count.stopped = f"; {num_ahead} of its tokens were computed first, alone{count.stopped}"
        # an equal row computes nothing, and reuses as much
        for count, index in zip(self._pending, rows.alias, strict=True):
            running = self._pending[members[index]]
            count.reused_tokens = min(self._num_found[index], running.prompt_tokens - running.computed_tokens)

    def bypass(self, num_tokens: Sequence[int], why: str, *, begins: bool) -> None:
        """Count a forward that runs without the store, in place of one that was refused.

        Args:
            num_tokens: row of the batch -> tokens of its prompt; empty where it brings none, and nothing is to be said.
            why: what is said of the rows from here on; "": nothing new.
            begins: the rows begin with it.
        """
        stopped = "" if begins or not why else f"; {why}"
        self._pending = [RowCount(number, number, stopped=stopped) for number in num_tokens]
        self._found = [Found(0, why)] * len(num_tokens) if begins else ()
        self._is_bypassed = True

    def confirm(self) -> None:
        """The scheduled forward was run."""
        if self._is_bypassed and not self._was_bypassed:
            for totals in (self.totals, self._of_all):
                totals.num_bypassed_calls += 1
            self._was_bypassed = True
        self._is_bypassed = False
        if not self._pending:
            return
        is_new = len(self.rows) != len(self._pending)
        if is_new:
            self.rows = [RowCount(stopped="the last call's rows resumed") for _ in self._pending]
        for row, found in zip(self.rows, self._found, strict=False):
            row.matched_tokens, row.stopped = found.num_tokens, found.stopped
        for row, tokens_of in zip(self.rows, self._brought, strict=False):
            row.host_tokens += tokens_of.get("host", 0)
            row.disk_tokens += tokens_of.get("disk", 0)
        self._brought = ()
        for row, new in zip(self.rows, self._pending, strict=True):
            row.prompt_tokens += new.prompt_tokens
            row.computed_tokens += new.computed_tokens
            row.reused_tokens += new.reused_tokens
            row.stopped += new.stopped
        self._elsewhere = None
        reasons = [row.stopped for row in self.rows]
        self._record(self._pending, reasons, num_calls=int(is_new))
        self._pending, self._found = [], ()

    def add_call(self, kind: str, rows: Sequence[RowCount], *, is_last: bool) -> None:
        """Count a call that ran on other caches: the rows here stay those of the running one.

        Args:
            is_last: it is the last one, until there is another.
        """
        self._record(rows, [row.stopped for row in rows], num_calls=1)
        if is_last:
            self._elsewhere = kind, [*rows]

    def add_forward(
        self, kind: str, rows: list[RowCount], new: Sequence[RowCount], *, begins: bool, bypassed: bool
    ) -> None:
        """Count a forward of prompts of a call that is the last one from here on.

        Args:
            rows: of the call so far, this forward included; may grow.
            new: what this forward adds.
            begins, bypassed: of the call.
        """
        if begins and bypassed:
            for totals in (self.totals, self._of_all):
                totals.num_bypassed_calls += 1
        self._record(new, [row.stopped for row in rows], num_calls=int(begins))
        self._elsewhere = kind, rows

    def end_call(self, kind: str, rows: list[RowCount]) -> None:
        """A call has ended: it is the last one, also where others ran inside of it."""
        self._elsewhere = kind, rows

    def ran_last(self, rows: list[RowCount]) -> bool:
        """Whether the call with these counts is the last one."""
        return self._elsewhere is not None and self._elsewhere[1] is rows

    def _record(self, rows: Sequence[RowCount], reasons: Sequence[str], *, num_calls: int) -> None:
        num_tokens = sum(row.prompt_tokens for row in rows)
        num_computed, num_reused = sum(row.computed_tokens for row in rows), sum(row.reused_tokens for row in rows)
        for totals in (self.totals, self._of_all):
            totals.record(num_tokens, num_computed, num_reused, num_calls=num_calls)
            totals.record_reasons((why, row.computed_tokens) for why, row in zip(reasons, rows, strict=True))

    def of_call(
        self, peak_kv_bytes: int, read_once_tokens: int = 0, read_once_rows: int = 0, dense: str = ""
    ) -> CallStats:
        """What was confirmed of the running call, or of the last one; of attention what is given, if it ran here."""
        kind, counted = (self.kind, self.rows) if self._elsewhere is None else self._elsewhere
        if self._elsewhere is not None:
            read_once_tokens, read_once_rows, dense = 0, 0, ""
        rows = tuple(row.frozen() for row in counted)
        prompt, reused = sum(row.prompt_tokens for row in rows), sum(row.reused_tokens for row in rows)
        return CallStats(
            kind=kind,
            prompt_tokens=prompt,
            computed_tokens=sum(row.computed_tokens for row in rows),
            reused_tokens=reused,
            shared_tokens=sum(row.shared_tokens for row in rows),
            hit_rate=reused / prompt if prompt else 0.0,
            peak_kv_bytes=peak_kv_bytes,
            rows=rows,
            read_once_tokens=read_once_tokens,
            read_once_rows=read_once_rows,
            dense=dense,
        )
