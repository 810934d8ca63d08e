"""What prompts cost: counted when a forward is announced, added up when it is confirmed."""

from __future__ import annotations

from array import array

import pytest

from hf_paged_cache.call.counters import PromptCounts
from hf_paged_cache.call.plan import KnownRow
from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput


def announce(
    counts: PromptCounts,
    pads: list[int],
    *,
    start: int,
    stop: int,
    before: int = 0,
    end_of_prompt: int | None = None,
    known: list[int] | None = None,
    members: list[int] | None = None,
    keep_columns: str | None = None,
    prefilled: tuple[int, ...] = (),
) -> None:
    rows = tuple(RowInput(array("q"), pad, 0, b"") for pad in pads)
    members = list(range(len(pads))) if members is None else members
    known = [0] * len(members) if known is None else known
    counts.announce(
        ForwardRequest(rows, stop - before, keep_columns=keep_columns, prefilled=prefilled),
        members,
        [KnownRow(pads[member], number) for member, number in zip(members, known, strict=True)],
        before=before,
        start=start,
        stop=stop,
        end_of_prompt=end_of_prompt,
    )


def numbers(counts: PromptCounts) -> list[tuple[int, int, int]]:
    """(prompt, computed, reused) of each row."""
    frozen = [row.frozen() for row in counts.rows]
    assert all(row.reused_tokens == row.prompt_tokens - row.computed_tokens for row in frozen)
    return [(row.prompt_tokens, row.computed_tokens, row.reused_tokens) for row in frozen]


def test_padding_is_no_token_and_known_columns_are_not_computed() -> None:
    counts = PromptCounts()
    announce(counts, [0, 3, 9], start=6, stop=10)
    counts.confirm()
    assert numbers(counts) == [(10, 4, 6), (7, 4, 3), (1, 1, 0)]
    assert (counts.metrics.num_queried_tokens, counts.metrics.num_hit_tokens, counts.num_calls) == (18, 9, 1)


def test_a_row_that_another_ran_for_counts_as_reused() -> None:
    counts = PromptCounts()
    announce(counts, [0, 0, 0], start=0, stop=10, members=[0, 2])
    counts.confirm()
    assert numbers(counts) == [(10, 10, 0), (10, 0, 10), (10, 10, 0)]


def test_generated_tokens_are_not_counted() -> None:
    counts = PromptCounts()
    announce(counts, [0], start=0, stop=10, end_of_prompt=10)
    counts.confirm()
    for column in range(10, 14):
        announce(counts, [0], before=column, start=column, stop=column + 1, end_of_prompt=10)
        counts.confirm()
    assert numbers(counts) == [(10, 10, 0)]
    assert counts.num_calls == 1


def test_a_forward_over_the_end_of_the_prompt_counts_up_to_it() -> None:
    counts = PromptCounts()
    announce(counts, [0], start=0, stop=12, end_of_prompt=10)
    counts.confirm()
    assert numbers(counts) == [(10, 10, 0)]


def test_chunks_of_a_prompt_add_up() -> None:
    counts = PromptCounts()
    announce(counts, [0, 2], start=0, stop=4, end_of_prompt=10)
    counts.confirm()
    announce(counts, [0, 2], before=4, start=7, stop=10, end_of_prompt=10, known=[7, 5])
    counts.confirm()
    assert numbers(counts) == [(10, 7, 3), (8, 5, 3)]
    assert counts.num_calls == 1


def test_a_forward_that_is_not_confirmed_does_not_count() -> None:
    counts = PromptCounts()
    announce(counts, [0], start=0, stop=10)
    announce(counts, [0], start=0, stop=5)
    counts.confirm()
    counts.confirm()
    assert numbers(counts) == [(5, 5, 0)]


def test_another_call_counts_its_own_rows_and_all_calls_together() -> None:
    counts = PromptCounts()
    announce(counts, [0], start=0, stop=10)
    counts.confirm()
    counts.start_call()
    assert counts.rows == []
    announce(counts, [0], start=8, stop=10)
    counts.confirm()
    assert numbers(counts) == [(10, 2, 8)]
    assert (counts.metrics.num_queried_tokens, counts.metrics.num_hit_tokens, counts.num_calls) == (20, 8, 2)


@pytest.mark.parametrize(
    ("keep", "why"), [(None, "another row knows no more"), ("logits were asked for", "logits were asked for")]
)
def test_a_row_says_how_far_it_matched_and_why_known_tokens_were_computed_again(keep: str | None, why: str) -> None:
    counts = PromptCounts()
    counts.note_matches([(8, "no cached block goes on"), (4, "a block is not full")])
    announce(counts, [0, 0], start=4, stop=10, known=[8, 4], keep_columns=keep)
    counts.confirm()
    first, second = (row.frozen() for row in counts.rows)
    assert first.matched_tokens == 8
    assert first.stopped == f"no cached block goes on; known tokens from 4 on computed again: {why}"
    assert (second.matched_tokens, second.stopped) == (4, "a block is not full")


def test_matches_of_a_forward_that_was_never_confirmed_are_those_of_the_next() -> None:
    counts = PromptCounts()
    counts.note_matches([(8, "old")])
    announce(counts, [0], start=8, stop=10, known=[8])
    counts.note_matches([(4, "new")])
    announce(counts, [0], start=4, stop=10, known=[4])
    counts.confirm()
    assert (counts.rows[0].matched_tokens, counts.rows[0].stopped) == (4, "new")


def test_what_a_prefill_computed_counts_for_its_row_and_once() -> None:
    counts = PromptCounts()
    announce(counts, [0, 0, 0], start=8, stop=10, known=[8, 8, 8], prefilled=(8, 0, 0))
    counts.confirm()
    assert numbers(counts) == [(10, 10, 0), (10, 2, 8), (10, 2, 8)]
    assert "8 of its tokens were computed first" in counts.rows[0].stopped
    announce(counts, [0, 0, 0], before=10, start=12, stop=13, known=[12, 12, 12], prefilled=(4, 0, 0))
    counts.confirm()  # two of these four were computed in the forward before: they fill a block
    assert numbers(counts) == [(13, 13, 0), (13, 3, 10), (13, 3, 10)]
    assert counts.metrics.num_hit_tokens == 20
