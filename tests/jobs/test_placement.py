"""Placing prompts on workers: each runs once, load is even, and prefixes stay together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.jobs.order import ordered, partition

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=40)


def place(prompts: list[list[int]], num_workers: int, num_new_tokens: int = 1) -> list[list[int]]:
    return partition(ordered(prompts, step=1), num_workers, num_new_tokens)


def computed(prompts: list[list[int]], numbers: list[int]) -> int:
    """Tokens that a worker computes whose pool holds all of them."""
    return len({tuple(prompts[number][: n + 1]) for number in numbers for n in range(len(prompts[number]))})


@given(PROMPTS, st.integers(1, 6))
def test_each_prompt_is_on_one_worker_and_a_cut_repeats_one_path(prompts: list[list[int]], num_workers: int) -> None:
    workers = place(prompts, num_workers)
    assert sorted(number for numbers in workers for number in numbers) == [*range(len(prompts))]
    alone = computed(prompts, [*range(len(prompts))])
    together = sum(computed(prompts, numbers) for numbers in workers)
    longest = max(map(len, prompts))
    assert alone <= together <= alone + (num_workers - 1) * longest


@given(PROMPTS, st.integers(1, 6))
def test_load_is_even_but_for_one_prompt_and_a_path(prompts: list[list[int]], num_workers: int) -> None:
    workers, longest = place(prompts, num_workers), max(map(len, prompts))
    loads = [computed(prompts, numbers) + len(numbers) for numbers in workers]
    fair = (computed(prompts, [*range(len(prompts))]) + len(prompts)) / num_workers
    assert max(loads) <= fair + 3 * (longest + 1)


@given(PROMPTS)
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
