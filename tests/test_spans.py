"""Blocks that lie side by side are found, and nothing else is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.spans import runs_of, spans_of

BLOCK_IDS = st.lists(st.integers(1, 6), unique=True, max_size=6)


@given(BLOCK_IDS)
def test_runs_are_the_blocks_in_order_and_as_few_as_can_be(block_ids: list[int]) -> None:
    runs = runs_of(block_ids)
    assert [first + i for first, number in runs for i in range(number)] == block_ids
    assert all(left + number != right for (left, number), (right, _) in itertools.pairwise(runs))


@given(st.lists(st.tuples(st.integers(0, 3), BLOCK_IDS), min_size=1, max_size=3), st.integers(1, 12))
def test_spans_cover_each_column_that_has_a_slot_once(rows: list[tuple[int, list[int]]], stop: int) -> None:
    spans = spans_of(rows, stop, block_size=2, max_spans=99)
    assert spans is not None
    found = {(row, column + i): slot + i for row, column, slot, number in spans for i in range(number)}
    expected = {
        (row, pad + index): block_ids[index // 2] * 2 + index % 2
        for row, (pad, block_ids) in enumerate(rows)
        for index in range(min(len(block_ids) * 2, stop - pad))
    }
    assert found == expected
    assert sum(span.num_tokens for span in spans) == len(expected)


def test_more_spans_than_allowed_are_none() -> None:
    rows = [(0, [1, 3, 5]), (0, [7])]
    assert spans_of(rows, 6, 2, max_spans=3) is None
    assert spans_of(rows, 6, 2, max_spans=4) is not None
