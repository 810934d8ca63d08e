"""What prompts cost: counted when a forward is scheduled, added up when it is confirmed."""

from __future__ import annotations

import math

import pytest

from hf_paged_cache.blocks import PrefixCachingBlockAllocator
from hf_paged_cache.call.counters import PromptCounters
from hf_paged_cache.call.prefix_match import Found
from hf_paged_cache.call.rows import Rows

from .bench import BLOCK_SIZE, make_row, new_row, request


def schedule(
    counters: PromptCounters,
    pads: list[int],
    *,
    start: int,
    stop: int,
    before: int = 0,
    end: float = math.inf,
    known: list[int] | None = None,
    members: list[int] | None = None,
    hidden: list[int] | None = None,
    keep_columns: str | None = None,
    computed_ahead: dict[int, int] | None = None,
    found: list[Found] | None = None,
) -> None:
    allocator = PrefixCachingBlockAllocator(100, BLOCK_SIZE)
    members = list(range(len(pads))) if members is None else members
    known = [0] * len(members) if known is None else known
    distinct = [make_row(allocator, range(number), pads[member]) for member, number in zip(members, known, strict=True)]
    alias = [max(index for index, first in enumerate(members) if first <= number) for number in range(len(pads))]
    for held, number in zip(distinct, known, strict=True):
        held.num_confirmed = min(number, max(0, before - held.pad))
    counters.prepare(distinct, found, carry_states=False)
    inputs = [new_row([], pad)._replace(num_hidden=0 if hidden is None else hidden[n]) for n, pad in enumerate(pads)]
    counters.schedule(
        request(*inputs, num_new=stop - before, keep_columns=keep_columns),
        Rows(distinct, alias, before),
        start=start,
        end=end,
        computed_ahead={} if computed_ahead is None else computed_ahead,
    )


def numbers(counters: PromptCounters) -> list[tuple[int, int, int]]:
    """(prompt, computed, reused or shared) of each row."""
    frozen = [row.frozen() for row in counters.rows]
    return [(row.prompt_tokens, row.computed_tokens, row.reused_tokens + row.shared_tokens) for row in frozen]


def test_a_bypassed_forward_computes_all_and_its_call_counts_once() -> None:
    counters = PromptCounters()
    for number in (1, 2):
        counters.start_call("generate")
        for num_tokens, why in (([5, 3], "no room"), ([1, 1], "")):
            counters.bypass(num_tokens, why, begins=bool(why))
            counters.confirm()
        assert numbers(counters) == [(6, 6, 0), (4, 4, 0)]
        assert [row.stopped for row in counters.rows] == ["no room"] * 2
        assert (counters.totals.num_calls, counters.totals.num_bypassed_calls) == (number, number)
    assert (counters.totals.metrics.num_queried_tokens, counters.totals.metrics.num_hit_tokens) == (20, 0)


def test_a_call_that_is_bypassed_on_its_way_says_so_after_what_it_said() -> None:
    counters = PromptCounters()
    schedule(counters, [0], start=0, stop=5)
    counters.confirm()
    before = counters.rows[0].stopped
    schedule(counters, [0], before=5, start=5, stop=7)  # is refused
    counters.bypass([2], "then no room", begins=False)
    counters.confirm()
    counters.bypass([], "", begins=False)  # what `generate` made
    counters.confirm()
    assert numbers(counters) == [(7, 7, 0)]
    assert counters.rows[0].stopped == f"{before}; then no room"
    assert (counters.totals.num_calls, counters.totals.num_bypassed_calls) == (1, 1)


def test_a_bypassed_forward_that_died_is_not_counted() -> None:
    counters = PromptCounters()
    counters.bypass([5], "no room", begins=True)
    schedule(counters, [0], start=0, stop=5)
    counters.confirm()
    assert (counters.totals.num_calls, counters.totals.num_bypassed_calls) == (1, 0)


def test_padding_is_no_token_and_known_columns_are_not_computed() -> None:
    counters = PromptCounters()
    schedule(counters, [0, 3, 9], start=6, stop=10, known=[6, 4, 0])
    counters.confirm()
    assert numbers(counters) == [(10, 4, 6), (7, 4, 3), (1, 1, 0)]
    assert (
        counters.totals.metrics.num_queried_tokens,
        counters.totals.metrics.num_hit_tokens,
        counters.totals.num_calls,
    ) == (18, 9, 1)


def test_a_forward_behind_the_prompt_counts_as_nothing() -> None:
    """Of other rows neither, nor as a query of no tokens, which would push one of a prompt out of the last ones."""
    counters = PromptCounters()
    schedule(counters, [0], start=0, stop=10, end=10)
    counters.confirm()
    schedule(counters, [0, 0], start=10, stop=12, before=10, end=10)
    counters.confirm()
    assert numbers(counters) == [(10, 10, 0)]
    assert (counters.totals.num_calls, counters.totals.metrics.num_queries) == (1, 1)


def test_what_the_mask_hides_is_no_token() -> None:
    counters = PromptCounters()
    schedule(counters, [0, 0, 2], start=0, stop=10, hidden=[0, 4, 3])
    counters.confirm()
    assert numbers(counters) == [(10, 10, 0), (6, 6, 0), (5, 5, 0)]


@pytest.mark.parametrize("known", [0, 4])
def test_a_row_that_another_ran_for_reuses_as_much_and_shares_the_rest(known: int) -> None:
    counters = PromptCounters()
    schedule(counters, [0, 0, 0], start=known, stop=10, members=[0, 2], known=[known, known])
    counters.confirm()
    assert numbers(counters) == [(10, 10 - known, known), (10, 0, 10), (10, 10 - known, known)]
    assert [row.frozen().shared_tokens for row in counters.rows] == [0, 10 - known, 0]
    assert (counters.totals.metrics.num_hit_tokens, counters.totals.metrics.num_shared_tokens) == (
        3 * known,
        10 - known,
    )


def test_chunks_of_a_prompt_add_up() -> None:
    counters = PromptCounters()
    schedule(counters, [0, 2], start=0, stop=4, end=10)
    counters.confirm()
    schedule(counters, [0, 2], before=4, start=7, stop=10, end=10, known=[7, 5])
    counters.confirm()
    assert numbers(counters) == [(10, 7, 3), (8, 5, 3)]
    assert counters.totals.num_calls == 1


def test_a_forward_that_is_not_confirmed_does_not_count() -> None:
    counters = PromptCounters()
    schedule(counters, [0], start=0, stop=10)
    schedule(counters, [0], start=0, stop=5)
    counters.confirm()
    counters.confirm()
    assert numbers(counters) == [(5, 5, 0)]


@pytest.mark.parametrize(
    ("keep", "why"), [(None, "another row's hit is shorter"), ("logits were asked for", "logits were asked for")]
)
def test_a_row_says_how_far_it_matched_and_why_known_tokens_were_computed_again(keep: str | None, why: str) -> None:
    counters = PromptCounters()
    found = [Found(8, "no cached block resumes"), Found(4, "a block is not full")]
    schedule(counters, [0, 0], start=4, stop=10, known=[8, 4], keep_columns=keep, found=found)
    counters.confirm()
    first, second = (row.frozen() for row in counters.rows)
    assert first.matched_tokens == 8
    assert first.stopped == f"no cached block resumes; cached from 4 on, but computed again: {why}"
    assert (second.matched_tokens, second.stopped) == (4, "a block is not full")


def test_matches_of_a_forward_that_was_never_confirmed_are_those_of_the_next() -> None:
    counters = PromptCounters()
    schedule(counters, [0], start=8, stop=10, known=[8], found=[Found(8, "old")])
    schedule(counters, [0], start=4, stop=10, known=[4], found=[Found(4, "new")])
    counters.confirm()
    assert (counters.rows[0].matched_tokens, counters.rows[0].stopped) == (4, "new")


def test_what_was_computed_ahead_counts_for_its_row_and_once() -> None:
    counters = PromptCounters()
    schedule(counters, [0, 0, 0], start=8, stop=10, known=[0, 0, 0], computed_ahead={0: 8})
    counters.confirm()
    assert numbers(counters) == [(10, 10, 0), (10, 2, 8), (10, 2, 8)]
    assert counters.totals.metrics.num_hit_tokens == 0
    assert "8 of its tokens were computed first" in counters.rows[0].stopped
    schedule(counters, [0, 0, 0], before=10, start=12, stop=13, known=[10, 10, 10], computed_ahead={0: 4})
    counters.confirm()  # two of these four were computed in the forward before: they fill a block
    assert numbers(counters) == [(13, 13, 0), (13, 3, 10), (13, 3, 10)]
    assert (counters.totals.metrics.num_hit_tokens, counters.totals.metrics.num_shared_tokens) == (0, 20)
