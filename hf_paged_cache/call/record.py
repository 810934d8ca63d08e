"""Counts what the rows of a call began with and cost, for `last_call` and `stats`. Plain numbers."""

from collections.abc import Mapping, Sequence

from ..stats import RowStats
from .match import Known
from .request import ForwardRequest


def count_prompt(
    request: ForwardRequest,
    known: Sequence[Known],
    num_found: Sequence[int],
    members: Sequence[int],
    copies: Sequence[int],
    start: int,
    ahead: Mapping[int, int],
) -> list[RowStats]:
    """Count the tokens of each row of the batch.

    Args:
        known: what is known of each row that runs.
        num_found: for each row that runs, number of tokens that were there before the call.
        members: row that runs -> the row of the batch that it is.
        copies: row of the batch -> the row that runs for it.
        start: column from which on the rows run.
        ahead: row that runs -> number of tokens that were computed for it first.
    """
    counts = []
    for row in request.rows:
        num_tokens = max(0, request.num_new_columns - row.pad)
        counts.append(RowStats(prompt_tokens=num_tokens))
    for number, (member, of_row) in enumerate(zip(members, known, strict=True)):
        count, pad = counts[member], request.rows[member].pad
        skipped = max(0, start - pad)
        count.computed_tokens = min(count.prompt_tokens, count.prompt_tokens - skipped + ahead.get(number, 0))
        if ahead.get(number):
            count.stopped = f"; {ahead[number]} of its tokens were computed first, alone"
        else:
            count.stopped = ""
        if of_row.num_found - skipped > request.num_logits_needed:
            why = request.keep_columns or "another row's hit is shorter"
            count.stopped += f"; cached from {skipped} on, but computed again: {why}"
    for member, number in enumerate(copies):
        count, running = counts[member], counts[members[number]]
        count.reused_tokens = min(num_found[number], running.prompt_tokens - running.computed_tokens)
        count.matched_tokens = num_found[number]
        count.host_tokens = min(count.reused_tokens, known[number].brought.get("host", 0))
        count.disk_tokens = min(count.reused_tokens - count.host_tokens, known[number].brought.get("disk", 0))
        said = running.stopped if members[number] == member else ""
        count.stopped = known[number].stopped + said
    return counts


def count_bypassed(num_tokens: Sequence[int], why: str) -> list[RowStats]:
    """Count the tokens of each row of a call, or of one more forward, that reuses and keeps nothing."""
    return [RowStats(number, number, stopped=why) for number in num_tokens]
