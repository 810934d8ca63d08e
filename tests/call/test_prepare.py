"""Rows of a forward that is about to run begin or resume, and hold what is known of them."""

from __future__ import annotations

import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.call.prefix_match import Found
from hf_paged_cache.call.prepare import begin_rows, continue_rows
from hf_paged_cache.call.scheduled_forward import RowInput
from hf_paged_cache.store.block_store import BlockStore

from .bench import (
    BLOCK_SIZE,
    OTHER_ROOT,
    make_rows,
    new_row,
    put_in_store,
    request,
)


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(BLOCK_SIZE, 64)


# Rows begin


def test_equal_rows_begin_as_one_and_take_no_fresh_block(store: BlockStore) -> None:
    put_in_store(store, [1, 2, 3, 4])
    before = store.allocator.num_free_blocks
    rows, found = begin_rows(store, request([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5]), [])
    assert (rows.alias, len(rows.distinct), rows.num_columns) == ([0, 1, 0], 2, 0)
    assert [row.num_known for row in rows.distinct] == [4, 4]
    assert [each.num_tokens for each in found] == [4, 4, 4]
    assert store.allocator.num_free_blocks == before


@pytest.mark.parametrize(
    "other",
    [new_row([1, 2], root=OTHER_ROOT), new_row([1], pad=1), new_row([1, 3])],
    ids=["root", "padding", "tokens"],
)
def test_rows_that_differ_in_anything_run_each_for_itself(store: BlockStore, other: RowInput) -> None:
    rows, _ = begin_rows(store, request([1, 2], other), [])
    assert rows.alias == [0, 1]


def test_rows_that_may_not_be_aliases_run_each_for_itself(store: BlockStore) -> None:
    rows, _ = begin_rows(store, request([1, 2], [1, 2], may_alias=False), [])
    assert rows.alias == [0, 1]


def test_a_forward_that_cannot_be_reused_matches_nothing_and_will_commit_nothing(store: BlockStore) -> None:
    put_in_store(store, [1, 2, 3, 4])
    previous = make_rows(store, [1, 2, 3, 4, 5]).distinct
    rows, found = begin_rows(store, request([1, 2, 3, 4, 5], bypass="a reason"), previous)
    assert found == [Found(0, "a reason")]
    assert (rows.distinct[0].num_known, rows.distinct[0].commit_end) == (0, 0)


# Rows resume


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_rows_cannot_go_on(store: BlockStore, number: int) -> None:
    rows = make_rows(store, [1, 2], [3, 4])
    with pytest.raises(CacheArgumentError, match=f"the cache runs 2 rows, got {number}"):
        continue_rows(store, request(*[[5]] * number), rows)


def test_aliases_stay_aliases_while_chunks_of_a_prompt_are_equal(store: BlockStore) -> None:
    rows = make_rows(store, [1, 2], alias=[0, 0])
    assert continue_rows(store, request([5, 6], [5, 6]), rows) is None
    assert rows.is_aliased


def test_aliases_part_where_their_tokens_do(store: BlockStore) -> None:
    rows = make_rows(store, [1, 2], alias=[0, 0, 0])
    sources = continue_rows(store, request([5, 6], [5, 7], [5, 6]), rows)
    assert sources == [0, 0]
    assert rows.alias == [0, 1, 0]


@pytest.mark.parametrize("options", [{}, {"may_alias": False}], ids=["one token", "not allowed"])
def test_aliases_part_before_a_forward_of_one_token_and_where_they_are_not_allowed(
    store: BlockStore, options: dict[str, bool]
) -> None:
    rows = make_rows(store, [1, 2], alias=[0, 0])
    num_new = 2 if options else 1
    sources = continue_rows(store, request(*[[5] * num_new] * 2, **options), rows)
    assert sources == [0, 0]
    assert not rows.is_aliased
    assert rows.distinct[0].table is not rows.distinct[1].table


def test_rows_that_are_no_aliases_never_become_any(store: BlockStore) -> None:
    rows = make_rows(store, [1, 2], [1, 2])
    assert continue_rows(store, request([5, 6], [5, 6]), rows) is None
    assert not rows.is_aliased


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (new_row([5]), {"bypass": "a reason"}),
        (new_row([5], root=OTHER_ROOT), {}),
        (new_row([5], pad=1), {}),
    ],
    ids=["bypass", "root", "padding"],
)
def test_nothing_is_committed_from_where_a_row_goes_on_otherwise_than_it_began(
    store: BlockStore, new: RowInput, options: dict[str, str]
) -> None:
    rows = make_rows(store, [1, 2, 3])
    continue_rows(store, request(new, num_new=1, **options), rows)
    assert rows.distinct[0].commit_end == 3


def test_a_later_chunk_holds_what_the_store_knows_of_it(store: BlockStore) -> None:
    put_in_store(store, list(range(16)))
    rows = make_rows(store, [0, 1, 2])
    continue_rows(store, request(range(3, 14)), rows)
    assert rows.distinct[0].table.num_tokens == 12
    assert rows.distinct[0].num_confirmed == 3
    store.allocator.check()


@pytest.mark.parametrize("why", ["not committed any more", "all logits are needed"])
def test_a_later_chunk_is_not_matched_where_that_would_be_wrong_or_of_no_use(store: BlockStore, why: str) -> None:
    put_in_store(store, list(range(16)))
    rows = make_rows(store, [0, 1, 2])
    if why == "not committed any more":
        rows.distinct[0].stop_commits(2)
        continue_rows(store, request(range(3, 14)), rows)
    else:
        continue_rows(store, request(range(3, 14), num_logits_needed=11), rows)
    assert rows.distinct[0].table.num_tokens == 3
