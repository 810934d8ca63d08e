"""The longest known prefix of a row: by hash in the store, token by token in previous rows, and why it ends there."""

from __future__ import annotations

import random

import pytest

from hf_paged_cache.blocks.sight import Window
from hf_paged_cache.blocks.tokens import common_prefix_length
from hf_paged_cache.call.prefix_match import Found, PreviousRows, hold_longer, match_row
from hf_paged_cache.call.rows import Row
from hf_paged_cache.store.block_store import BlockStore

from .bench import BLOCK_SIZE, OTHER_ROOT, ROOT, make_row, new_row, put_in_store


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(BLOCK_SIZE, 64)


def state_of(store: BlockStore) -> tuple[int, int, int]:
    allocator = store.allocator
    return allocator.num_free_blocks, allocator.num_cached_blocks, allocator.num_blocks_in_use


def test_nothing_of_another_root_is_matched(store: BlockStore) -> None:
    put_in_store(store, list(range(12)), OTHER_ROOT)
    previous = make_row(store, list(range(12)), root=OTHER_ROOT)
    assert match_row(store, new_row(list(range(12))), PreviousRows([previous]))[0].num_tokens == 0


def test_of_a_previous_row_only_what_is_confirmed_and_true_is_matched(store: BlockStore) -> None:
    previous = make_row(store, list(range(12)))
    previous.num_confirmed = 9
    assert match_row(store, new_row(list(range(12))), PreviousRows([previous]))[0].num_tokens == 9
    previous.stop_commits(6)
    assert match_row(store, new_row(list(range(12))), PreviousRows([previous]))[0].num_tokens == 6


def test_a_match_that_is_given_up_leaves_everything_as_it_was(store: BlockStore) -> None:
    put_in_store(store, list(range(8)))
    previous = make_row(store, list(range(100, 111)))
    before = state_of(store)
    for tokens in ([*range(12)], [*range(100, 111)], [*range(100, 106)], [5, 5]):
        match_row(store, new_row(tokens), PreviousRows([previous]))[0].free()
        assert state_of(store) == before
    store.allocator.check()


def test_a_match_holds_its_blocks_so_that_nothing_evicts_them(store: BlockStore) -> None:
    put_in_store(store, list(range(8)))
    table, _ = match_row(store, new_row(list(range(8))), PreviousRows([]))
    store.allocator.forget_cached_blocks()
    assert table.num_tokens == 8
    assert store.allocator.num_blocks_in_use == 2


@pytest.mark.parametrize(
    ("tokens", "previous", "num_known", "why"),
    [
        ([*range(8)], False, 8, "the whole prompt was known"),
        ([*range(10)], False, 8, "from token 8 on there is no full block: 2 of 4 tokens"),
        ([*range(4), 9, 9, 9, 9], False, 4, "no cached block continues with tokens 4 to 7"),
        ([9, 9, 9, 9], False, 0, "no cached block has these first 4 tokens under the same conditions"),
        ([9, 9], False, 0, "from token 0 on there is no full block: 2 of 4 tokens"),
        ([*range(9), 50, 9], True, 9, "the prompt differs from the last call's tokens at token 9"),
        ([*range(10), 9], True, 10, "the last call's row ends at token 10, and the prompt continues"),
        ([*range(10)], True, 10, "the whole prompt was known"),
    ],
)
def test_a_match_says_why_it_ends(
    store: BlockStore, tokens: list[int], previous: bool, num_known: int, why: str
) -> None:
    put_in_store(store, list(range(8)))
    rows = [make_row(store, list(range(10)))] if previous else []
    assert match_row(store, new_row(tokens), PreviousRows(rows))[1] == Found(num_known, why)


@pytest.mark.parametrize("seed", range(10))
def test_random_rows_match_what_a_search_token_by_token_finds(store: BlockStore, seed: int) -> None:
    chance = random.Random(seed)

    def tokens() -> list[int]:
        return [chance.randint(0, 1) for _ in range(chance.randint(1, 13))]

    stored = [tokens() for _ in range(4)]
    for each in stored:
        put_in_store(store, each)
    previous = [make_row(store, tokens()) for _ in range(3)]
    for _ in range(20):
        new = tokens()

        def common(other: list[int], new: list[int] = new) -> int:
            return next(
                (i for i, (a, b) in enumerate(zip(other, new, strict=False)) if a != b), min(len(other), len(new))
            )

        by_hash = max(min(common(each), len(each)) // BLOCK_SIZE * BLOCK_SIZE for each in stored)
        by_token = max(common(list(row.table.token_ids)) for row in previous)
        table, found = match_row(store, new_row(new), PreviousRows(previous))
        with table:
            assert table.num_tokens == found.num_tokens == max(by_hash, by_token)
            assert list(table.token_ids) == new[: table.num_tokens]
    store.allocator.check()


@pytest.mark.parametrize(("num_new", "longer"), [(1, None), (2, 8), (3, 8), (6, 12), (9, 12)])
def test_a_running_row_finds_more_of_itself_with_its_new_tokens(
    store: BlockStore, num_new: int, longer: int | None
) -> None:
    put_in_store(store, list(range(12)))
    before = state_of(store)
    row = make_row(store, list(range(6)))
    block_ids, with_row = list(row.table.block_ids), state_of(store)
    assert hold_longer(store, row, new_row(range(6, 6 + num_new)).token_ids) == (longer is not None)
    assert list(row.table.token_ids) == list(range(longer or 6))
    assert row.num_confirmed == 6
    if longer is None:
        assert (row.table.block_ids, state_of(store)) == (block_ids, with_row)
    else:
        assert state_of(store)[2] == longer // BLOCK_SIZE  # its own blocks were given back
    row.table.free()
    assert state_of(store) == before


@pytest.mark.parametrize("seed", range(30))
def test_of_many_previous_rows_the_closest_is_found(store: BlockStore, seed: int) -> None:
    """Against all pairs; few token ids of few bits and of many, so that rows share much and order is by every byte."""
    chance = random.Random(seed)
    ids = [0, 1, 255, 256, 2**31, 2**40]

    def tokens() -> list[int]:
        return [chance.choice(ids) for _ in range(chance.randint(0, 5))]

    previous = [make_row(store, tokens(), root=chance.choice([ROOT, OTHER_ROOT])) for _ in range(chance.randint(0, 12))]
    index = PreviousRows(previous)
    for _ in range(20):
        new = new_row(tokens(), root=chance.choice([ROOT, OTHER_ROOT]))
        lengths = [common_prefix_length(row.true_token_ids, new.token_ids) for row in previous if row.root == new.root]
        closest, num_common = index.closest(new)
        assert num_common == max(lengths, default=-1)
        if closest is None:
            assert not lengths
        else:
            assert closest.root == new.root
            assert common_prefix_length(closest.true_token_ids, new.token_ids) == num_common


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_longer_is_held_only_where_a_window_can_go_on_from_where_the_row_stands(*, is_kept: bool) -> None:
    store = BlockStore(BLOCK_SIZE, 64, sight_of={0: Window(5)}, layers=[0])
    store.make_room(20)
    (group,) = store.windows.groups
    row = Row(store.new_table(ROOT, b""), 0, ROOT)
    row.table.append_tokens(range(9))  # not committed: the other's blocks are its own
    row.table.release_passed()
    row.num_confirmed = 9
    group.num_to_come = 0 if is_kept else 1000  # then nothing is kept but a sequence's end
    with store.new_table(ROOT, b"") as other:
        other.append_tokens(range(40))
        other.release_passed()
        other.commit_full_blocks(40)
    assert hold_longer(store, row, new_row(range(9, 44)).token_ids) == is_kept
    assert row.table.num_tokens == (40 if is_kept else 9)
    needed = group.needed_by([row.table.allocation])
    assert {*row.table.block_ids[1:3]} <= needed  # tokens 5 to 8 are seen
    store.check()
