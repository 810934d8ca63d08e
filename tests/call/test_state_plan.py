"""Plans of forwards: each column of each row is run once, from a state that is known, and no plan costs more than none."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from hf_paged_cache.call.state_plan import Bounds, Staircase, StatefulRow, climb, cut, shared, starts_of

WIDTH = 4


def bounds_of(stop: int) -> Bounds:
    return Bounds(before=0, stop=stop, latest=stop - 1, width=WIDTH, forward_cost=64)


def plan(rows: Sequence[StatefulRow], *, stop: int, before: int = 0, **changes: int) -> Staircase:
    found = climb(rows, bounds_of(stop)._replace(before=before, **changes))
    assert found is not None
    return found


def require_right(
    staircase: Staircase, rows: Sequence[StatefulRow], *, before: int, stop: int, latest: int, least: int = 1
) -> None:
    """All columns from where each row may begin, once, in order; nobody begins where nothing is known."""
    assert before <= staircase.column <= max(latest, before)
    for number, start in starts_of(staircase, len(rows)).items():
        row = rows[number]
        columns = [column for step in staircase.steps if number in step.rows for column in range(step.start, step.stop)]
        assert columns == list(range(start, staircase.column))
        if number in staircase.cold:
            assert start == 0 or start + WIDTH <= row.pad
        else:
            assert start == row.start
    for step, following in zip(staircase.steps, staircase.steps[1:], strict=False):
        assert step.stop == following.start
        assert set(step.rows) <= set(following.rows)
    assert all(step.stop - step.start >= least or not step.start for step in staircase.steps)
    alone = [step for step in staircase.steps if step.stop - step.start == 1]
    assert not any(rows[number].pad > step.start for step in alone for number in step.rows), "padding in one column"


def random_rows(rng: random.Random, stop: int, before: int) -> list[StatefulRow]:
    rows = []
    for _ in range(rng.randrange(1, 6)):
        pad = rng.choice((0, 0, rng.randrange(stop // 2)))
        start = rng.choice((None, rng.randrange(pad + 1, stop + 3), max(pad + 1, stop // 2), max(pad + 1, before)))
        wanted = tuple(sorted(rng.sample(range(1, stop), 3)))
        rows.append(StatefulRow(pad, start, wanted))
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_a_random_batch_comes_together(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        stop = rng.randrange(20, 300)
        before = rng.choice((0, 0, rng.randrange(stop - 4)))
        latest, least, cost = rng.choice((stop - 1, stop - 2, before)), rng.choice((1, 2)), rng.choice((0, 8, 64))
        rows = random_rows(rng, stop, before)
        bounds = Bounds(before, stop, latest, WIDTH, cost, least)
        found = climb(rows, bounds)
        if found is None:
            assert least == 2 or before == 1
            continue
        require_right(found, rows, before=before, stop=stop, latest=latest, least=least)
        nothing = len(rows) * stop + (cost if before else 0)
        assert found.cost <= nothing
        require_right(
            cut(found, rows, bounds),
            rows,
            before=before,
            stop=stop,
            latest=latest,
            least=least,
        )
        alone = climb(rows, Bounds(before, stop, latest, WIDTH, forward_cost=0), may_run_ahead=False)
        if alone is None:
            assert before
        else:
            assert not alone.steps
            require_right(alone, rows, before=before, stop=stop, latest=latest)


def test_rows_of_other_lengths_join_at_their_own_columns() -> None:
    rows = [StatefulRow(0, 1000), StatefulRow(5, 1005), StatefulRow(5, 1005), StatefulRow(20, 1020)]
    found = plan(rows, stop=1040)
    assert [(step.rows, step.start, step.stop) for step in found.steps] == [((0,), 1000, 1005), ((0, 1, 2), 1005, 1020)]
    assert (found.column, found.cold) == (1020, frozenset())


def test_a_row_whose_state_saves_less_than_a_forward_begins_anew() -> None:
    found = plan([StatefulRow(0, 16), StatefulRow(10, None)], stop=100)
    assert (found.steps, found.column, found.cold) == ((), 0, frozenset({0, 1}))


def test_a_row_that_begins_does_so_in_its_padding_late_enough_to_spare_it() -> None:
    found = plan([StatefulRow(0, 500), StatefulRow(900, None)], stop=1000)
    assert [(step.rows, step.start, step.stop) for step in found.steps] == [((0,), 500, 896)]
    assert found.column == 896


def test_a_state_that_lies_too_far_right_is_none() -> None:
    assert plan([StatefulRow(0, 100)], stop=100).column == 0
    assert plan([StatefulRow(0, 99)], stop=100, latest=98).column == 0
    assert plan([StatefulRow(0, 98)], stop=100, latest=98).column == 98


def test_no_forward_is_of_one_column_where_that_is_computed_otherwise() -> None:
    rows = [StatefulRow(0, 500), StatefulRow(1, 501), StatefulRow(3, 503)]
    assert [step.stop - step.start for step in plan(rows, stop=600).steps] == [1, 2]
    found = plan(rows, stop=600, least=2)
    assert all(step.stop - step.start > 1 for step in found.steps)


def test_a_single_row_is_cut_at_each_place_and_a_batch_where_it_costs_little() -> None:
    row = StatefulRow(0, None, (128, 192))
    found = cut(plan([row], stop=200), [row], bounds_of(200))
    assert [(step.start, step.stop) for step in found.steps] == [(0, 128), (128, 192)]
    assert found.column == 192
    others = [StatefulRow(pad, None, (128,)) for pad in (0, 3, 5)]
    assert cut(plan(others, stop=200), others, bounds_of(200)).column == 133
    assert not cut(plan(others, stop=150), others, bounds_of(150)).steps
    equal = [StatefulRow(0, None, (128,))] * 3
    assert cut(plan(equal, stop=150), equal, bounds_of(150)).column == 128


def tokens(*parts: tuple[int, int]) -> array[int]:
    return array("q", [1000 * seed + number for seed, length in parts for number in range(length)])


def test_a_prefix_that_rows_share_is_computed_in_one_of_them() -> None:
    ids = [tokens((1, 640), (number, 20 + number)) for number in range(2, 6)]
    stop = max(map(len, ids))
    rows = [StatefulRow(stop - len(each)) for each in ids]
    limits = [len(each) - 1 for each in ids]
    prefixes, known = shared(ids, [b""] * 4, rows, limits, bounds_of(stop), align=64)
    assert [(prefix.num_tokens, prefix.members) for prefix in prefixes] == [(640, (0, 1, 2, 3))]
    assert [row.start for row in known] == [row.pad + 640 for row in rows]
    assert shared(ids, [b"a", b"b", b"c", b"d"], rows, limits, bounds_of(stop), align=64) == ([], rows), (
        "of other roots"
    )
    short = [tokens((1, 64), (number, 20)) for number in (2, 3)]
    rows = [StatefulRow(0)] * 2
    assert shared(short, [b""] * 2, rows, [83] * 2, bounds_of(84), align=64) == ([], rows)


def test_a_shared_prefix_goes_on_from_the_one_before_it() -> None:
    ids = [tokens((1, 640), (2, 640), (number, 20)) for number in (3, 4, 5)]
    ids += [tokens((1, 640), (number, 660)) for number in (6, 7, 8)]
    rows, stop = [StatefulRow(0)] * 6, 1300
    prefixes, known = shared(ids, [b""] * 6, rows, [stop - 1] * 6, bounds_of(stop), align=64)
    assert [(prefix.num_tokens, len(prefix.members)) for prefix in prefixes] == [(640, 6), (1280, 3)]
    assert [row.start for row in known] == [1280] * 3 + [640] * 3
