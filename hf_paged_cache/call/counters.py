"""What prompts cost: counted when a forward is scheduled, added up when it is confirmed. Plain numbers."""

from collections.abc import Mapping, Sequence

from ..blocks import PrefixCacheMetrics
from ..stats import CallStats, RowCount
from .prefix_match import Found
from .rows import Row
from .scheduled_forward import ForwardRequest

_WINDOW = 100  # forwards of prompts that the recent hit rate is about


class PromptCounters:
    """Counts of one call, a row a sequence, and of all calls before it.

    Attributes:
        rows: of the running call.
        metrics: prompt tokens and those reused, of all calls and of the last forwards.
        num_calls: calls that computed something.
    """

    def __init__(self) -> None:
        self.rows: list[RowCount] = []
        self.metrics = PrefixCacheMetrics(window=_WINDOW)
        self.num_calls = 0
        self._pending: list[RowCount] = []  # of the scheduled forward
        self._found: Sequence[Found] = ()  # of rows that begin

    def start_call(self) -> None:
        """The rows counted from here on are another call's."""
        self.rows, self._pending, self._found = [], [], ()

    def begin_rows(self, found: Sequence[Found]) -> None:
        """Rows begin: what was found of each row of the batch."""
        self._found = found

    def schedule(
        self,
        request: ForwardRequest,
        rows: Sequence[tuple[int, Row]],
        *,
        before: int,
        start: int,
        end: float,
        computed_ahead: Mapping[int, int],
    ) -> None:
        """Count a forward that computes the columns from `start` on, in the prompt's share of it: the columns up to `end`.

        Args:
            rows: row of the batch -> running row, which holds what is known, for each that runs.
            before: columns that the rows had.
            computed_ahead: row of the batch -> tokens computed for it, alone, just before.
        """
        self._pending = []
        if before >= end:
            return
        stop = int(min(end, before + request.num_new_columns))
        for new in request.rows:
            num_tokens = max(0, stop - max(before, new.pad) - new.num_hidden)
            self._pending.append(RowCount(prompt_tokens=num_tokens, stopped=""))
        for member, row in rows:
            count = self._pending[member]
            num_skipped = max(0, start - row.pad)
            count.computed_tokens = min(count.prompt_tokens, max(0, stop - max(start, row.pad)))
            if row.table.num_tokens - num_skipped > request.num_logits_needed:
                why = request.keep_columns or "another row knows no more"
                count.stopped = f"; known tokens from {num_skipped} on computed again: {why}"
        for member, num_ahead in computed_ahead.items():
            count = self._pending[member]  # what is computed twice, to fill a block, counts once
            count.computed_tokens = min(count.prompt_tokens, count.computed_tokens + num_ahead)
            count.stopped = f"; {num_ahead} of its tokens were computed first, alone{count.stopped}"

    def confirm(self) -> None:
        """The scheduled forward was run."""
        if not self._pending:
            return
        if len(self.rows) != len(self._pending):
            self.rows = [RowCount(stopped="the last call's rows went on") for _ in self._pending]
            self.num_calls += 1
        for row, found in zip(self.rows, self._found, strict=False):
            row.matched_tokens, row.stopped = found.num_tokens, found.stopped
        for row, new in zip(self.rows, self._pending, strict=True):
            row.prompt_tokens += new.prompt_tokens
            row.computed_tokens += new.computed_tokens
            row.stopped += new.stopped
        num_tokens = sum(new.prompt_tokens for new in self._pending)
        self.metrics.record(num_tokens, num_tokens - sum(new.computed_tokens for new in self._pending))
        self._pending, self._found = [], ()

    def add_call(self, num_tokens: int, num_computed: int) -> None:
        """Count a call that ran elsewhere: the rows here stay those of the running one."""
        self.num_calls += 1
        self.metrics.record(num_tokens, num_tokens - num_computed)

    def of_call(self, peak_kv_bytes: int) -> CallStats:
        """What was confirmed of the running call, or of the last one."""
        rows = tuple(row.frozen() for row in self.rows)
        prompt, computed = sum(row.prompt_tokens for row in rows), sum(row.computed_tokens for row in rows)
        return CallStats(
            prompt_tokens=prompt,
            computed_tokens=computed,
            reused_tokens=prompt - computed,
            hit_rate=(prompt - computed) / prompt if prompt else 0.0,
            peak_kv_bytes=peak_kv_bytes,
            rows=rows,
        )
