"""Plans of forwards: each column of each row is run once, from where it is known, and no plan costs more than none.

What a plan says it costs is what its forwards cost; for two rows, no column to start at costs less.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged_cache.call.plan import Bounds, Plan, PlannedRow, cut, plan

# Rows that start after any of their known tokens

BLOCK_SIZE = 2
# Of few pieces, so that rows share much, part in the middle of it, and resume for long.
PIECES = st.lists(st.sampled_from([[0] * 4, [1] * 4, [0] * 16, [1] * 9]), max_size=4)
RESTS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
TOKENS = st.builds(lambda pieces, rest: [*chain.from_iterable(pieces), *rest], PIECES, RESTS)


class Batch:
    """Rows of a first forward, padded on the left, of two kinds, some of whose prefixes are known."""

    def __init__(self, rows: list[tuple[int, list[int]]], known: list[tuple[int, list[int]]], num_needed: int) -> None:
        self.stop = max(len(tokens) for _, tokens in rows)
        self.latest = self.stop - min(num_needed, self.stop)
        self.num_known = [
            max((common(tokens, held) for held_kind, held in known if held_kind == kind), default=0)
            for kind, tokens in rows
        ]
        self.rows = [
            PlannedRow(self.stop - len(tokens), self.stop - len(tokens) + number, array("q", tokens), kind)
            for (kind, tokens), number in zip(rows, self.num_known, strict=True)
        ]

    def plan(self, forward_cost: int) -> Plan:
        found = plan(self.rows, Bounds(0, self.stop, self.latest, forward_cost, align=BLOCK_SIZE))
        assert found is not None
        return found

    def cost(self, found: Plan, forward_cost: int) -> int:
        """What it costs, in tokens, to run a plan and then the forward over all rows; each begins where it is known."""
        known, total = [*self.num_known], 0
        for prefix in found.prefixes:
            row = self.rows[prefix.row]
            assert known[prefix.row] >= prefix.known
            total += prefix.num_tokens - prefix.known + forward_cost
            for number, length in prefix.heirs.items():
                heir = self.rows[number]
                assert length <= prefix.num_tokens
                assert (heir.kind, heir.token_ids[:length]) == (row.kind, row.token_ids[:length])
                known[number] = max(known[number], length)
        for step in found.steps:
            for number in step.rows:
                assert self.rows[number].pad + known[number] >= step.start
                known[number] = max(known[number], step.stop - self.rows[number].pad)
            total += len(step.rows) * (step.stop - step.start) + forward_cost
        assert all(row.pad + number >= found.column for row, number in zip(self.rows, known, strict=True))
        assert 0 <= found.column <= self.latest
        return total + len(self.rows) * (self.stop - found.column)

    def least_cost(self, forward_cost: int) -> int:
        """Of all columns at which the forward over all rows could start, where each row alone computes what lies before it."""
        costs = []
        for column in range(self.latest + 1):
            held = [(row.kind, row.token_ids[:number]) for row, number in zip(self.rows, self.num_known, strict=True)]
            total = len(self.rows) * (self.stop - column)
            for row in sorted(self.rows, key=lambda row: -len(row.token_ids)):
                tokens = row.token_ids[: max(0, column - row.pad)]
                known = max(common(tokens, other) for kind, other in held if kind == row.kind)
                if known < len(tokens):
                    total += len(tokens) - known + forward_cost
                    held.append((row.kind, tokens))
            costs.append(total)
        return min(costs)


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Tokens in whole blocks that two rows begin with; all of the first where that is all of it."""
    length = next((at for at, (one, other) in enumerate(zip(tokens, others, strict=False)) if one != other), None)
    length = min(len(tokens), len(others)) if length is None else length
    return length if length == len(tokens) else length // BLOCK_SIZE * BLOCK_SIZE


@st.composite
def batches(draw: st.DrawFn, *, most: int = 6) -> Batch:
    kinds = st.integers(0, 1)
    rows = draw(st.lists(st.tuples(kinds, TOKENS), min_size=2, max_size=most))
    known = draw(st.lists(st.tuples(st.sampled_from(rows), st.integers(1, 40)), max_size=2))
    return Batch(rows, [(kind, tokens[:length]) for (kind, tokens), length in known], draw(st.integers(1, 2)))


@settings(max_examples=500)
@given(batches(), st.sampled_from([0, 1, 4, 16, 64]))
def test_what_a_plan_says_it_costs_is_what_its_forwards_cost_and_no_more_than_none(
    batch: Batch, forward_cost: int
) -> None:
    found = batch.plan(forward_cost)
    start = min(batch.latest, *(row.pad + number for row, number in zip(batch.rows, batch.num_known, strict=True)))
    assert batch.cost(found, forward_cost) == found.cost <= len(batch.rows) * (batch.stop - start)


@settings(max_examples=500)
@given(batches(most=2), st.sampled_from([0, 1, 4, 16, 64]))
def test_for_two_rows_no_column_to_start_at_costs_less_but_for_a_part_of_a_block(
    batch: Batch, forward_cost: int
) -> None:
    assert batch.plan(forward_cost).cost < batch.least_cost(forward_cost) + BLOCK_SIZE * len(batch.rows)


def rows_of(*rows: list[int], num_known: Sequence[int] = ()) -> list[PlannedRow]:
    stop, known = max(map(len, rows)), num_known or [0] * len(rows)
    pads = [stop - len(tokens) for tokens in rows]
    return [PlannedRow(pad, pad + n, array("q", each)) for pad, n, each in zip(pads, known, rows, strict=True)]


def plan_of(rows: list[PlannedRow], *, forward_cost: int = 4) -> Plan:
    stop = rows[0].pad + len(rows[0].token_ids)
    found = plan(rows, Bounds(0, stop, stop - 1, forward_cost, align=BLOCK_SIZE))
    assert found is not None
    return found


def prefixes_of(found: Plan) -> list[tuple[int, int]]:
    return [(prefix.row, prefix.num_tokens) for prefix in found.prefixes]


def test_nested_prefixes_are_computed_once_each() -> None:
    a, b, c = [1] * 20, [2] * 20, [3] * 20
    found = plan_of(rows_of([*a, *b, 5, 5], [*a, *b, 6, 6], [*a, *c, 7, 7]))
    assert prefixes_of(found) == [(0, 40)]
    assert found.prefixes[0].heirs == {0: 40, 1: 40, 2: 20}
    assert [(step.rows, step.start, step.stop) for step in found.steps] == [((2,), 20, 40)]


def test_a_row_that_knows_less_than_its_neighbours_is_computed_alone() -> None:
    rows = rows_of([*[1] * 40, 5, 5], [*[1] * 40, 6, 6], [*[2] * 40, 7, 7], num_known=[40, 40, 0])
    found = plan_of(rows)
    assert (found.prefixes, found.column) == ((), 40)
    assert [(step.rows, step.start, step.stop) for step in found.steps] == [((2,), 0, 40)]


def test_rows_that_know_less_than_their_neighbours_are_computed_together() -> None:
    rows = rows_of(*([*[seed] * 40, 5, 5] for seed in range(4)), num_known=[40, 40, 0, 8])
    assert [(step.rows, step.start, step.stop) for step in plan_of(rows).steps] == [((2,), 0, 8), ((2, 3), 8, 40)]
    assert [(step.rows, step.start, step.stop) for step in plan_of(rows, forward_cost=9).steps] == [((2, 3), 0, 40)]


def test_what_is_short_is_not_worth_a_forward() -> None:
    rows = rows_of([1, 1, 1, 1, 5, 5], [1, 1, 1, 1, 6, 6])
    assert not plan_of(rows, forward_cost=4).runs
    assert prefixes_of(plan_of(rows, forward_cost=3)) == [(0, 4)]


def test_rows_of_other_kinds_share_nothing() -> None:
    rows = rows_of([*[1] * 40, 5, 5], [*[1] * 40, 6, 6])
    assert prefixes_of(plan_of(rows)) == [(0, 40)]
    assert not plan_of([rows[0], rows[1]._replace(kind=1)]).runs


# Rows that start where they are known, or anew

WIDTH = 4


def bounds_of(stop: int, **changes: int) -> Bounds:
    return Bounds(0, stop, stop - 1, forward_cost=64, is_exact=True, width=WIDTH)._replace(**changes)


def found_of(rows: Sequence[PlannedRow], *, stop: int, **changes: int) -> Plan:
    found = plan(rows, bounds_of(stop, **changes))
    assert found is not None
    return found


def require_right(found: Plan, rows: Sequence[PlannedRow], bounds: Bounds) -> None:
    """All columns from where each row may begin, once, in order; nobody begins where nothing is known."""
    assert bounds.before <= found.column <= max(bounds.latest, bounds.before)
    for number, start in found.starts(len(rows)).items():
        row = rows[number]
        columns = [column for step in found.steps if number in step.rows for column in range(step.start, step.stop)]
        assert columns == list(range(start, found.column))
        if number in found.cold:
            assert start == 0 or start + WIDTH <= row.pad
        else:
            assert start == row.start
    for step, following in zip(found.steps, found.steps[1:], strict=False):
        assert step.stop == following.start
        assert set(step.rows) <= set(following.rows)
    assert all(step.stop - step.start >= bounds.least or not step.start for step in found.steps)
    alone = [step for step in found.steps if step.stop - step.start == 1]
    assert not any(rows[number].pad > step.start for step in alone for number in step.rows), "padding in one column"


def random_rows(rng: random.Random, stop: int, before: int) -> list[PlannedRow]:
    rows = []
    for _ in range(rng.randrange(1, 6)):
        pad = rng.choice((0, 0, rng.randrange(stop // 2)))
        start = rng.choice((None, rng.randrange(pad + 1, stop + 3), max(pad + 1, stop // 2), max(pad + 1, before)))
        wanted = tuple(sorted(rng.sample(range(1, stop), 3)))
        rows.append(PlannedRow(pad, start, wanted=wanted))
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_a_random_batch_comes_together(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        stop = rng.randrange(20, 300)
        before = rng.choice((0, 0, rng.randrange(stop - 4)))
        latest, least, cost = rng.choice((stop - 1, stop - 2, before)), rng.choice((1, 2)), rng.choice((0, 8, 64))
        rows = random_rows(rng, stop, before)
        bounds = Bounds(before, stop, latest, cost, is_exact=True, width=WIDTH, least=least)
        found = plan(rows, bounds)
        if found is None:
            assert least == 2 or before == 1
            continue
        require_right(found, rows, bounds)
        assert found.cost <= len(rows) * stop + (cost if before else 0)
        require_right(cut(found, rows, bounds), rows, bounds)
        alone = plan(rows, bounds._replace(forward_cost=0, least=1), may_run_ahead=False)
        if alone is None:
            assert before
        else:
            assert not alone.runs
            require_right(alone, rows, bounds)


def test_rows_of_other_lengths_join_at_their_own_columns() -> None:
    rows = [PlannedRow(0, 1000), PlannedRow(5, 1005), PlannedRow(5, 1005), PlannedRow(20, 1020)]
    found = found_of(rows, stop=1040)
    assert [(step.rows, step.start, step.stop) for step in found.steps] == [((0,), 1000, 1005), ((0, 1, 2), 1005, 1020)]
    assert (found.column, found.cold) == (1020, frozenset())


def test_a_row_whose_state_saves_less_than_a_forward_begins_anew() -> None:
    found = found_of([PlannedRow(0, 16), PlannedRow(10, None)], stop=100)
    assert (found.steps, found.column, found.cold) == ((), 0, frozenset({0, 1}))


def test_a_row_that_begins_does_so_in_its_padding_late_enough_to_spare_it() -> None:
    found = found_of([PlannedRow(0, 500), PlannedRow(900, None)], stop=1000)
    assert [(step.rows, step.start, step.stop) for step in found.steps] == [((0,), 500, 896)]
    assert found.column == 896


def test_a_state_that_lies_too_far_right_is_none() -> None:
    assert found_of([PlannedRow(0, 100)], stop=100).column == 0
    assert found_of([PlannedRow(0, 99)], stop=100, latest=98).column == 0
    assert found_of([PlannedRow(0, 98)], stop=100, latest=98).column == 98


def test_no_forward_is_of_one_column_where_that_is_computed_otherwise() -> None:
    rows = [PlannedRow(0, 500), PlannedRow(1, 501), PlannedRow(3, 503)]
    assert [step.stop - step.start for step in found_of(rows, stop=600).steps] == [1, 2]
    found = found_of(rows, stop=600, least=2)
    assert all(step.stop - step.start > 1 for step in found.steps)


def test_a_single_row_is_cut_at_each_place_and_a_batch_where_it_costs_little() -> None:
    row = PlannedRow(0, wanted=(128, 192))
    found = cut(found_of([row], stop=200), [row], bounds_of(200))
    assert [(step.start, step.stop) for step in found.steps] == [(0, 128), (128, 192)]
    assert found.column == 192
    others = [PlannedRow(pad, wanted=(128,)) for pad in (0, 3, 5)]
    assert cut(found_of(others, stop=200), others, bounds_of(200)).column == 133
    assert not cut(found_of(others, stop=150), others, bounds_of(150)).steps
    equal = [PlannedRow(0, wanted=(128,))] * 3
    assert cut(found_of(equal, stop=150), equal, bounds_of(150)).column == 128


def tokens(*parts: tuple[int, int]) -> array[int]:
    return array("q", [1000 * seed + number for seed, length in parts for number in range(length)])


def test_a_prefix_that_rows_share_is_computed_in_one_of_them() -> None:
    ids = [tokens((1, 640), (number, 20 + number)) for number in range(2, 6)]
    stop = max(map(len, ids))
    rows = [PlannedRow(stop - len(each), token_ids=each) for each in ids]
    found = found_of(rows, stop=stop, align=64)
    assert [(prefix.num_tokens, [*prefix.heirs]) for prefix in found.prefixes] == [(640, [0, 1, 2, 3])]
    assert found.starts(4) == {number: row.pad + 640 for number, row in enumerate(rows)}
    assert not found_of([row._replace(kind=at) for at, row in enumerate(rows)], stop=stop, align=64).prefixes
    short = [PlannedRow(0, token_ids=tokens((1, 64), (number, 20))) for number in (2, 3)]
    assert not found_of(short, stop=84, align=64).runs


def test_a_shared_prefix_goes_on_from_the_one_before_it() -> None:
    ids = [tokens((1, 640), (2, 640), (number, 20)) for number in (3, 4, 5)]
    ids += [tokens((1, 640), (number, 660)) for number in (6, 7, 8)]
    found = found_of([PlannedRow(0, token_ids=each) for each in ids], stop=1300, align=64)
    assert [(prefix.num_tokens, len(prefix.heirs)) for prefix in found.prefixes] == [(640, 6), (1280, 3)]
    assert found.starts(6) == {0: 1280, 1: 1280, 2: 1280, 3: 640, 4: 640, 5: 640}
