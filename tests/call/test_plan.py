"""What is computed where: equal rows once, and from the first column that some row does not know."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.call.plan import Groups, KnownRow, first_column, group_equal

ROWS = st.lists(st.builds(KnownRow, pad=st.integers(0, 6), num_known=st.integers(0, 12)), min_size=1, max_size=4)


@given(st.lists(st.integers(0, 3), max_size=8))
def test_rows_are_in_one_group_exactly_when_their_keys_are_equal(keys: list[int]) -> None:
    groups = group_equal(keys)
    for i, left in enumerate(keys):
        for j, right in enumerate(keys):
            assert (groups.group_of[i] == groups.group_of[j]) == (left == right)
    assert groups.members == [groups.group_of.index(number) for number in range(len(groups.members))]


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_groups_first_row_is_never_left_of_its_number(keys: list[int]) -> None:  # rows can be moved in place
    assert all(member >= number for number, member in enumerate(group_equal(keys).members))


def test_no_rows_are_no_groups() -> None:
    assert group_equal([]) == Groups([], [])
    assert group_equal([]) == ([], [])


@given(ROWS, st.integers(0, 6), st.integers(1, 20), st.data())
def test_the_forward_starts_at_the_last_column_that_all_rows_allow(
    rows: list[KnownRow], start: int, num_new: int, data: st.DataObject
) -> None:
    stop = start + num_new
    num_needed = data.draw(st.integers(1, num_new))

    def allowed(column: int) -> bool:
        known = all(position < row.pad + row.num_known for row in rows for position in range(start, column))
        return known and stop - column >= num_needed

    expected = max(column for column in range(start, stop) if allowed(column))
    assert first_column(rows, start=start, stop=stop, num_needed=num_needed) == expected


def test_the_order_of_rows_changes_nothing() -> None:
    shuffler = random.Random(0)
    rows = [KnownRow(pad=0, num_known=48), KnownRow(pad=10, num_known=32), KnownRow(pad=3, num_known=57)]
    for _ in range(5):
        shuffler.shuffle(rows)
        assert first_column(rows, start=0, stop=60, num_needed=1) == 42


def test_a_whole_prompt_that_is_known_still_computes_its_last_column() -> None:
    assert first_column([KnownRow(pad=0, num_known=60)], start=0, stop=60, num_needed=1) == 59
