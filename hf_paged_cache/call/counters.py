"""Counts what prompts cost: in the last call, and in all calls of a cache. Plain numbers."""

from collections.abc import Sequence
from dataclasses import replace

from ..stats import CallStats, RowStats
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
        self._last = CallState("none")

    def add_call(self, kind: str, rows: Sequence[RowStats], peak_kv_bytes: int, *, bypassed: bool) -> None:
        """Count a call that ran elsewhere; it is the last call from here on."""
        state = CallState(kind, counts=[*rows], peak_kv_bytes=peak_kv_bytes)
        self.add_forward(state, rows, begins=True, bypassed=bypassed)

    def add_forward(self, state: CallState, new: Sequence[RowStats], *, begins: bool, bypassed: bool) -> None:
        """Count a forward of prompts; its call is the last call from here on.

        Args:
            state: state of the call, this forward included.
            new: what this forward adds.
            begins: the call begins with this forward.
            bypassed: the call reuses and keeps nothing.
        """
        if begins and bypassed:
            self.note_bypass()
        num_tokens = sum(row.prompt_tokens for row in new)
        num_computed, num_reused = sum(row.computed_tokens for row in new), sum(row.reused_tokens for row in new)
        for totals in (self.totals, self._of_all):
            totals.record(num_tokens, num_computed, num_reused, num_calls=int(begins))
            totals.record_reasons(
                (row.stopped, more.computed_tokens) for row, more in zip(state.counts, new, strict=True)
            )
        self.end_call(state)

    def note_bypass(self) -> None:
        """Count a call as bypassed: it reuses and keeps nothing more."""
        for totals in (self.totals, self._of_all):
            totals.num_bypassed_calls += 1

    def end_call(self, state: CallState) -> None:
        """End a call: it is the last call from here on, also where others ran inside of it."""
        self._last = state

    @property
    def peak_kv_bytes(self) -> int:
        """Most bytes that the last call took."""
        return self._last.peak_kv_bytes

    def last_call(self) -> CallStats:
        """Return what was confirmed of the last call."""
        state = self._last
        rows = tuple(replace(row) for row in state.counts)
        prompt, reused = sum(row.prompt_tokens for row in rows), sum(row.reused_tokens for row in rows)
        return CallStats(
            kind=state.kind,
            prompt_tokens=prompt,
            computed_tokens=sum(row.computed_tokens for row in rows),
            reused_tokens=reused,
            shared_tokens=sum(row.shared_tokens for row in rows),
            hit_rate=reused / prompt if prompt else 0.0,
            peak_kv_bytes=state.peak_kv_bytes,
            rows=rows,
            read_once_tokens=0 if state.seen is None else state.seen.tokens,
            read_once_rows=0 if state.seen is None else state.seen.rows,
            dense="" if state.seen is None else state.seen.dense,
            captured=str(state.captured),
        )
