"""The prefix tree of prompts, against one that is built token by token, and what the order of a plan costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.jobs.order import (
    Branch,
    Limits,
    OrderedPrompt,
    batches,
    build_prefix_tree,
    limits_that_pay,
    ordered,
)

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=24)


def members(branch: Branch) -> list[int]:
    """All prompts of a branch."""
    return [prompt for each in branch.walk() for prompt in each.prompts]


def plain_prefixes(prompts: Sequence[Sequence[int]], block_size: int) -> dict[tuple[int, ...], set[int]]:
    """Prefix of whole blocks that at least two prompts have -> who has it, where the longer ones part. Naive."""
    having: dict[tuple[int, ...], set[int]] = {}
    for number, tokens in enumerate(prompts):
        for length in range(block_size, len(tokens) + 1, block_size):
            having.setdefault(tuple(tokens[:length]), set()).add(number)
    shared = {prefix: who for prefix, who in having.items() if len(who) > 1}
    return {
        prefix: who
        for prefix, who in shared.items()
        if not any(who == other and len(longer) > len(prefix) for longer, other in shared.items())
    }


@given(PROMPTS, st.sampled_from([1, 2, 3]))
def test_branches_are_the_prefixes_at_which_prompts_part(prompts: list[list[int]], block_size: int) -> None:
    tree = build_prefix_tree(prompts, block_size=block_size, least_saving=0)
    found = {}
    for branch in [each for each in tree.walk() if each is not tree]:
        who = members(branch)
        (prefix,) = {tuple(prompts[number][: branch.num_tokens]) for number in who}
        found[prefix] = set(who)
        assert branch.num_prompts == len(who)
    assert found == plain_prefixes(prompts, block_size)
    assert sorted(members(tree)) == [*range(len(prompts))]


@given(PROMPTS, st.integers(0, 12))
def test_a_branch_that_saves_too_little_is_dissolved_and_loses_no_prompt(prompts: list[list[int]], least: int) -> None:
    tree = build_prefix_tree(prompts, block_size=1, least_saving=least)
    for parent in tree.walk():
        for branch in parent.branches:
            assert (branch.num_prompts - 1) * (branch.num_tokens - parent.num_tokens) >= least
    assert sorted(members(tree)) == [*range(len(prompts))]


def test_a_very_deep_tree_needs_no_recursion() -> None:
    prompts = [[1] * length for length in range(3000)]
    tree = build_prefix_tree(prompts, block_size=1, least_saving=0)
    assert len([*ordered(tree, [*map(len, prompts)])]) == 3000


@given(PROMPTS)
def test_the_prompts_of_a_branch_stand_together(prompts: list[list[int]]) -> None:
    tree = build_prefix_tree(prompts, block_size=1, least_saving=1)
    places = {each.prompt: place for place, each in enumerate(ordered(tree, [*map(len, prompts)]))}
    assert sorted(places) == [*range(len(prompts))]
    for branch in tree.walk():
        mine = sorted(places[prompt] for prompt in members(branch))
        assert mine == [*range(mine[0], mine[0] + len(mine))] if mine else True


def test_side_by_side_the_longest_come_first() -> None:
    lengths = [3, 40, 7, 22]
    prompts = [[number] * length for number, length in enumerate(lengths)]
    assert [each.prompt for each in ordered(build_prefix_tree(prompts), lengths)] == [1, 3, 2, 0]


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
def test_batches_are_cut_so_that_the_least_is_computed(
    sizes: list[tuple[int, int]],
    batch_size: int,
    num_new: int,
    least_padded: int,
    num_tokens: float,
    num_sequences: int,
) -> None:
    order = [
        OrderedPrompt(number, num_tokens, remainder, remainder) for number, (remainder, num_tokens) in enumerate(sizes)
    ]
    cut = batches(order, Limits(batch_size, num_tokens, num_sequences), num_new, least_padded)
    assert [number for rows in cut for number in rows] == [*range(len(order))]
    assert all(1 <= len(rows) <= batch_size for rows in cut)
    ways: list[list[list[OrderedPrompt]]] = [[]]  # all ways to cut, one placed after the other
    for each in order:
        ways = [[*way, [each]] for way in ways] + [
            [*way[:-1], [*way[-1], each]] for way in ways if way and len(way[-1]) < batch_size
        ]
    ways = [way for way in ways if not any(is_padded_too_short(rows, least_padded) for rows in way)]
    most = num_tokens, num_sequences * num_new
    assert not any(is_too_large([order[number] for number in rows], *most) for rows in cut)
    ways = [way for way in ways if not any(is_too_large(rows, *most) for rows in way)]
    assert not any(is_padded_too_short([order[number] for number in rows], least_padded) for rows in cut)
    assert cost([[order[number] for number in rows] for rows in cut], num_new) == min(cost(w, num_new) for w in ways)


@pytest.mark.parametrize(
    ("num_shared", "num_sequences", "num_batches"), [(1024, 1, 2), (0, 1, 13), (1024, 8, 13), (64, 1, 5)]
)
def test_batches_grow_with_what_their_prompts_share(num_shared: int, num_sequences: int, num_batches: int) -> None:
    prompts = [[1] * num_shared + [2 + number] * (16 if num_shared else 1040) for number in range(100)]
    lengths = [*map(len, prompts)]
    order = [*ordered(build_prefix_tree(prompts), lengths)]
    limits = limits_that_pay(lengths, 16, num_sequences, read_once=True)
    assert len(batches(order, limits, 16)) == num_batches
    apart = limits_that_pay(lengths, 16, num_sequences, read_once=False)
    assert len(batches(order, apart, 16)) == 13
