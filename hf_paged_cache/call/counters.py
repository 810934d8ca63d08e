"""Counts what prompts cost: in the last call, and in all calls of a cache. Plain numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..rows.request import CallState, ForwardRequest
from ..stats import CallStats, CallTotals, RowStats
from .find import Known


class PromptCounters(CallTotals):
    """`PromptCounters` counts the rows of the last call of a cache one by one, and the rows of all calls together."""

    def __init__(self, of_all: CallTotals | None = None) -> None:
        super().__init__()
        self._all = (self,) if of_all is None else (self, of_all)  # the latter are of all caches of the store
        self.last = CallState("none")

    def add_call(self, kind: str, rows: Sequence[RowStats], peak_kv_bytes: int, *, bypassed: bool) -> None:
        """Count a call that ran elsewhere; it is the last call from here on."""
        state = CallState(kind, counts=[*rows], peak_kv_bytes=peak_kv_bytes)
        self.add_forward(state, rows, begins=True, bypassed=bypassed)

    def add_forward(self, state: CallState, new: Sequence[RowStats], *, begins: bool, bypassed: bool) -> None:
        """Count a forward of prompts, which is in the call's state already; its call is the last call from here on."""
        if begins and bypassed:
            self.note_bypass()
        for totals in self._all:
            totals.record(state.counts, new, num_calls=int(begins))
        self.last = state

    def note_bypass(self) -> None:
        """Count a call as bypassed: it reuses and keeps nothing more."""
        for totals in self._all:
            totals.num_bypassed_calls += 1

    def last_call(self) -> CallStats:
        """Return what was confirmed of the last call."""
        state = self.last
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
            read_once_tokens=state.seen.tokens,
            dense=state.seen.dense,
            captured=str(state.captured),
        )


def count_prompt(
    request: ForwardRequest,
    known: Sequence[Known],
    num_found: Sequence[int],
    members: Sequence[int],
    copies: Sequence[int],
    start: int,
    ahead: Mapping[int, int],
) -> list[RowStats]:
    """Count the tokens of each row of the batch, for which the row `copies[i]` runs, that is its row `members[..]`.

    Of a row that runs, `num_found` tokens were there before the call, and `ahead` tokens were computed first.
    """
    counts = []
    for member, number in enumerate(copies):
        of_row, runs, pad = known[number], members[number] == member, request.rows[member].pad
        num_tokens, skipped, first = max(0, request.num_new_columns - pad), max(0, start - pad), ahead.get(number, 0)
        computed, stopped = min(num_tokens, num_tokens - skipped + first), of_row.stopped
        if runs and first:
            stopped += f"; {first} of its tokens were computed first, alone"
        if runs and of_row.num_found - skipped > request.num_logits_needed:
            why = request.keep_columns or "another row's hit is shorter"
            stopped += f"; cached from {skipped} on, but computed again: {why}"
        count = RowStats(num_tokens, computed if runs else 0, stopped=stopped)
        count.matched_tokens, count.reused_tokens = num_found[number], min(num_found[number], num_tokens - computed)
        count.host_tokens = min(count.reused_tokens, of_row.brought.get("host", 0))
        count.disk_tokens = min(count.reused_tokens - count.host_tokens, of_row.brought.get("disk", 0))
        counts.append(count)
    return counts


def count_bypassed(num_tokens: Sequence[int], why: str) -> list[RowStats]:
    """Count the tokens of each row of a call, or of one more forward, that reuses and keeps nothing."""
    return [RowStats(number, number, stopped=why) for number in num_tokens]
