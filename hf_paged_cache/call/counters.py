"""What prompts cost: counted when a forward is announced, added up when it is confirmed. Plain numbers."""

from collections.abc import Sequence

from ..blocks import PrefixCacheMetrics
from ..stats import CallStats, RowCount, hit_rate
from .plan import KnownRow
from .scheduled_forward import ForwardRequest

_WINDOW = 100  # forwards of prompts that the recent hit rate is about


class PromptCounts:
    """Counts of one call, a row a sequence, and of all calls before it.

    Attributes:
        rows: of the running call.
        metrics: prompt tokens and those reused of all calls, and of the last forwards.
        num_calls: calls that computed something.
    """

    def __init__(self) -> None:
        self.rows: list[RowCount] = []
        self.metrics = PrefixCacheMetrics(window=_WINDOW)
        self.num_calls = 0
        self._pending: list[RowCount] = []  # of the announced forward
        self._stopped: list[tuple[int, str]] = []  # matched tokens and why no more, of rows that begin

    def start_call(self) -> None:
        """The rows counted from here on are another call's."""
        self.rows, self._pending, self._stopped = [], [], []

    def note_matches(self, matches: Sequence[tuple[int, str]]) -> None:
        """Rows begin: for each row of the batch, the tokens found and why the match ended there."""
        self._stopped = list(matches)

    def announce(
        self,
        request: ForwardRequest,
        members: Sequence[int],
        known: Sequence[KnownRow],
        *,
        before: int,
        start: int,
        stop: int,
        end_of_prompt: int | None,
    ) -> None:
        """Count a forward of columns `[start, stop)` whose rows had `before` columns; only the prompt's count."""
        end = stop if end_of_prompt is None else min(stop, end_of_prompt)
        self._pending = []
        if before >= end:
            return
        for new in request.rows:
            self._pending.append(RowCount(prompt_tokens=max(0, end - max(before, new.pad)), stopped=""))
        for member, row in zip(members, known, strict=True):
            count = self._pending[member]
            count.computed_tokens = max(0, end - max(start, row.pad))
            skipped = max(0, start - row.pad)
            if row.num_known - skipped > request.num_logits_needed:
                why = request.keep_columns or "another row knows no more"
                count.stopped = f"; known tokens from {skipped} on computed again: {why}"
        for count, num_prefilled in zip(self._pending, request.prefilled, strict=False):
            if num_prefilled:
                # what was computed again, to fill a block, counts once
                count.computed_tokens = min(count.prompt_tokens, count.computed_tokens + num_prefilled)
                count.stopped = f"; {num_prefilled} of its tokens were computed first, alone{count.stopped}"

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
            hit_rate=hit_rate(prompt, computed),
            peak_kv_bytes=peak_kv_bytes,
            rows=rows,
        )

    def confirm(self) -> None:
        """The announced forward was run."""
        if not self._pending:
            return
        if len(self.rows) != len(self._pending):
            self.rows = [RowCount() for _ in self._pending]
            self.num_calls += 1
        for row, (matched, stopped) in zip(self.rows, self._stopped, strict=False):
            row.matched_tokens, row.stopped = matched, stopped
        for row, new in zip(self.rows, self._pending, strict=True):
            row.prompt_tokens += new.prompt_tokens
            row.computed_tokens += new.computed_tokens
            row.stopped += new.stopped
        num_tokens = sum(new.prompt_tokens for new in self._pending)
        self.metrics.record(num_tokens, num_tokens - sum(new.computed_tokens for new in self._pending))
        self._pending, self._stopped = [], []
