"""The order of prompts, and how it is cut into batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.jobs.order import Limits, OrderedPrompt, batches, ordered

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=24)


@given(PROMPTS, st.sampled_from([1, 2, 3]))
def test_prompts_that_share_a_prefix_stand_together_and_each_is_there_once(prompts: list[list[int]], step: int) -> None:
    places = {each.prompt: place for place, each in enumerate(ordered(prompts, step=step))}
    assert sorted(places) == [*range(len(prompts))]
    for prompt in prompts:
        for length in range(step, len(prompt) + 1, step):
            who = sorted(places[n] for n, other in enumerate(prompts) if other[:length] == prompt[:length])
            assert who == [*range(who[0], who[0] + len(who))]


@given(PROMPTS)
def test_the_remainder_is_what_no_other_prompt_begins_with(prompts: list[list[int]]) -> None:
    for each in ordered(prompts, step=1):
        own, others = prompts[each.prompt], prompts[: each.prompt] + prompts[each.prompt + 1 :]
        shared = [n for n in range(len(own) + 1) if any(other[:n] == own[:n] and len(other) >= n for other in others)]
        assert each.remainder == len(own) - max(shared, default=0)


def test_many_prompts_each_the_beginning_of_the_next_one_are_no_problem() -> None:
    assert len(ordered([[1] * length for length in range(3000)])) == 3000


def test_side_by_side_the_longest_come_first() -> None:
    lengths = [3, 40, 7, 22]
    assert [each.prompt for each in ordered([[number] * length for number, length in enumerate(lengths)])] == [
        1,
        3,
        2,
        0,
    ]


def cost(cut: Sequence[Sequence[OrderedPrompt]], num_new: int) -> int:
    return sum(64 * num_new + len(rows) * max(each.remainder for each in rows) for rows in cut)


def is_padded_too_short(rows: Sequence[OrderedPrompt], least_padded: int) -> bool:
    longest = max(each.num_tokens for each in rows)
    return any(each.num_tokens < min(longest, least_padded) for each in rows)


def is_too_large(rows: Sequence[OrderedPrompt], num_tokens: float, num_new: int) -> bool:
    first, *others = rows
    return (
        bool(others) and first.num_tokens + sum(each.num_computed for each in others) + len(rows) * num_new > num_tokens
    )


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), max_size=9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 6),
    st.sampled_from([0, 3, 100, 500, math.inf]),
    st.integers(1, 2),
)
def test_batches_heed_every_limit_and_cost_no_more_than_a_batch_for_each_prompt(
    sizes: list[tuple[int, int]],
    batch_size: int,
    num_new: int,
    least_padded: int,
    num_tokens: float,
    num_sequences: int,
) -> None:
    order = [OrderedPrompt(n, tokens, remainder, remainder) for n, (remainder, tokens) in enumerate(sizes)]
    limits = Limits(batch_size, num_tokens, num_new, num_sequences, least_padded)
    cut = [[order[number] for number in rows] for rows in batches(order, limits)]
    assert [each for rows in cut for each in rows] == order
    assert all(1 <= len(rows) <= batch_size for rows in cut)
    assert not any(is_padded_too_short(rows, least_padded) for rows in cut)
    assert not any(is_too_large(rows, num_tokens, num_sequences * num_new) for rows in cut)
    assert cost(cut, num_new) <= cost([[each] for each in order], num_new)


@pytest.mark.parametrize(
    ("num_shared", "num_sequences", "num_batches"), [(1024, 1, 2), (0, 1, 13), (1024, 8, 13), (64, 1, 5)]
)
def test_batches_grow_with_what_their_prompts_share(num_shared: int, num_sequences: int, num_batches: int) -> None:
    prompts = [[1] * num_shared + [2 + number] * (16 if num_shared else 1040) for number in range(100)]
    order, limits = ordered(prompts), Limits(1, num_new_tokens=16, num_sequences=num_sequences)
    longest = max(map(len, prompts))
    assert len([*batches(order, limits.that_pay(longest, reads_once=True))]) == num_batches
    assert len([*batches(order, limits.that_pay(longest, reads_once=False))]) == 13
