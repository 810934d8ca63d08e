"""The order of prompts, and how it is cut into batches and put on workers."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.jobs.order import Limits, OrderedPrompt, batches, ordered, partition

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
    order = ordered([[number] * length for number, length in enumerate(lengths)])
    assert [each.prompt for each in order] == [1, 3, 2, 0]


def cost(cut: Sequence[Sequence[OrderedPrompt]], num_new: int) -> int:
    return sum(64 * num_new + len(rows) * max(each.remainder for each in rows) for rows in cut)


def num_held(rows: Sequence[OrderedPrompt], num_sequences: int, num_new: int) -> int:
    return len(rows) * num_sequences * (max(each.num_tokens for each in rows) + num_new)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), max_size=9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 3, 100, 500, math.inf]),
    st.integers(1, 2),
)
def test_batches_heed_every_limit_and_cost_no_more_than_a_batch_for_each_prompt(
    sizes: list[tuple[int, int]],
    batch_size: int,
    num_new: int,
    pads: bool,
    num_tokens: float,
    num_sequences: int,
) -> None:
    order = [OrderedPrompt(n, tokens, remainder, remainder) for n, (remainder, tokens) in enumerate(sizes)]
    limits = Limits(batch_size, num_tokens, num_new, num_sequences, pads)
    cut = [[order[number] for number in rows] for rows in batches(order, limits)]
    assert [each for rows in cut for each in rows] == order
    assert all(1 <= len(rows) <= batch_size for rows in cut)
    assert pads or all(len({each.num_tokens for each in rows}) == 1 for rows in cut)
    assert all(len(rows) == 1 or num_held(rows, num_sequences, num_new) <= num_tokens for rows in cut)
    assert cost(cut, num_new) <= cost([[each] for each in order], num_new)


SOME = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=40)


def place(prompts: list[list[int]], num_workers: int, num_new_tokens: int = 1) -> list[list[int]]:
    return partition(ordered(prompts, step=1), num_workers, num_new_tokens)


def computed(prompts: list[list[int]], numbers: list[int]) -> int:
    """Tokens that a worker computes whose pool holds all of them."""
    return len({tuple(prompts[number][: n + 1]) for number in numbers for n in range(len(prompts[number]))})


@given(SOME, st.integers(1, 6))
def test_each_prompt_is_on_one_worker_and_a_cut_repeats_one_path(prompts: list[list[int]], num_workers: int) -> None:
    workers = place(prompts, num_workers)
    assert sorted(number for numbers in workers for number in numbers) == [*range(len(prompts))]
    alone = computed(prompts, [*range(len(prompts))])
    together = sum(computed(prompts, numbers) for numbers in workers)
    longest = max(map(len, prompts))
    assert alone <= together <= alone + (num_workers - 1) * longest


@given(SOME, st.integers(1, 6))
def test_load_is_even_but_for_one_prompt_and_a_path(prompts: list[list[int]], num_workers: int) -> None:
    workers, longest = place(prompts, num_workers), max(map(len, prompts))
    loads = [computed(prompts, numbers) + len(numbers) for numbers in workers]
    fair = (computed(prompts, [*range(len(prompts))]) + len(prompts)) / num_workers
    assert max(loads) <= fair + 3 * (longest + 1)


@given(SOME)
def test_a_prompt_costs_what_it_computes_after_those_before_it(prompts: list[list[int]]) -> None:
    placed = ordered(prompts, step=1)
    order = [each.prompt for each in placed]
    after = [computed(prompts, order[: n + 1]) - computed(prompts, order[:n]) for n in range(len(order))]
    assert [each.num_computed for each in placed] == after


def test_a_prefix_that_most_have_is_spread() -> None:
    shared = [*range(3, 53)]
    prompts = [[*shared, number] for number in range(100, 190)] + [[number, 1] for number in range(10)]
    workers = place(prompts, 4, num_new_tokens=8)
    assert all(any(number < 90 for number in numbers) for numbers in workers[:3])
    assert max(map(len, workers)) < 32


def test_placed_by_prefix_nearly_all_is_reused_that_can_be() -> None:
    prompts = [[task] * 400 + [1000 + number] * 20 for number in range(30) for task in range(20)]
    best = computed(prompts, [*range(len(prompts))])
    assert sum(computed(prompts, own) for own in place(prompts, 6, num_new_tokens=8)) < 1.15 * best
    assert sum(computed(prompts, [*range(first, len(prompts), 7)]) for first in range(7)) > 3 * best
