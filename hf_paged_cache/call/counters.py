"""Counts what prompts cost: in the last call, and in all calls of a cache. Plain numbers."""

from collections.abc import Sequence

from ..stats import CallStats, RowCount
from ..store.call_totals import CallTotals
from .call_state import CallState


class PromptCounters:
    """`PromptCounters` counts the rows of the last call one by one, and the rows of all calls together.

    Args:
        of_all: totals of all caches of the store, in which these calls are counted, too; None: they are not.

    Attributes:
        totals: totals of all calls.
    """

    def __init__(self, of_all: CallTotals | None = None) -> None:
        self.totals = CallTotals()
        self._of_all = CallTotals() if of_all is None else of_all
        self._last: tuple[str, Sequence[RowCount]] = "none", ()
        self._state: CallState | None = None  # state of the last call, if it ran on rows of this cache
        self._peak = 0  # peak bytes of the last call, if it did not

    def add_call(self, kind: str, rows: Sequence[RowCount], peak_kv_bytes: int, *, bypassed: bool) -> None:
        """Count a call that ran elsewhere; it is the last call from here on."""
        if bypassed:
            self.note_bypass()
        self._record(rows, [row.stopped for row in rows], num_calls=1)
        self._last, self._state, self._peak = (kind, [*rows]), None, peak_kv_bytes

    def add_forward(self, state: CallState, new: Sequence[RowCount], *, begins: bool, bypassed: bool) -> None:
        """Count a forward of prompts; its call is the last call from here on.

        Args:
            state: state of the call, this forward included.
            new: what this forward adds.
            begins: the call begins with this forward.
            bypassed: the call reuses and keeps nothing.
        """
        if begins and bypassed:
            self.note_bypass()
        self._record(new, [row.stopped for row in state.counts], num_calls=int(begins))
        self.end_call(state)

    def note_bypass(self) -> None:
        """Count a call as bypassed: it reuses and keeps nothing more."""
        for totals in (self.totals, self._of_all):
            totals.num_bypassed_calls += 1

    def end_call(self, state: CallState) -> None:
        """End a call: it is the last call from here on, also where others ran inside of it."""
        self._last, self._state = (state.kind, state.counts), state

    def _record(self, rows: Sequence[RowCount], reasons: Sequence[str], *, num_calls: int) -> None:
        num_tokens = sum(row.prompt_tokens for row in rows)
        num_computed, num_reused = sum(row.computed_tokens for row in rows), sum(row.reused_tokens for row in rows)
        for totals in (self.totals, self._of_all):
            totals.record(num_tokens, num_computed, num_reused, num_calls=num_calls)
            totals.record_reasons((why, row.computed_tokens) for why, row in zip(reasons, rows, strict=True))

    @property
    def peak_kv_bytes(self) -> int:
        """Most bytes that the last call took."""
        return self._peak if self._state is None else self._state.peak_kv_bytes

    def last_call(self) -> CallStats:
        """Return what was confirmed of the last call."""
        kind, counted = self._last
        tokens, num_rows, dense = (0, 0, "") if self._state is None else self._state.read_once
        rows = tuple(row.frozen() for row in counted)
        prompt, reused = sum(row.prompt_tokens for row in rows), sum(row.reused_tokens for row in rows)
        return CallStats(
            kind=kind,
            prompt_tokens=prompt,
            computed_tokens=sum(row.computed_tokens for row in rows),
            reused_tokens=reused,
            shared_tokens=sum(row.shared_tokens for row in rows),
            hit_rate=reused / prompt if prompt else 0.0,
            peak_kv_bytes=self.peak_kv_bytes,
            rows=rows,
            read_once_tokens=tokens,
            read_once_rows=num_rows,
            dense=dense,
            captured="" if self._state is None else str(self._state.captured),
        )
