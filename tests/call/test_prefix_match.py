"""The longest known prefix of a row: by hash in the store, token by token in ended rows, and why it ends there."""

from __future__ import annotations

import random
from array import array

import pytest

from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.blocks.tokens import common_prefix_length
from hf_paged_cache.call.prefix_match import PreviousRows, match_longer, match_row
from hf_paged_cache.call.rows import Row
from hf_paged_cache.call.scheduled_forward import RowInput
from hf_paged_cache.store.block_store import BlockStore

ROOT, OTHER_ROOT = root_hash(b"model"), root_hash(b"another model")
BLOCK_SIZE = 4


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(BLOCK_SIZE, 64)


def make_row(store: BlockStore, tokens: list[int], root: bytes = ROOT) -> Row:
    row = Row(BlockTable(store.allocator, root), 0, root)
    row.table.append_tokens(tokens)
    row.num_confirmed = len(tokens)
    return row


def put_in_store(store: BlockStore, tokens: list[int], root: bytes = ROOT) -> None:
    row = make_row(store, tokens, root)
    row.commit()
    row.table.free()


def new_row(tokens: list[int], root: bytes = ROOT) -> RowInput:
    return RowInput(array("q", tokens), pad=0, first_position=0, root=root)


def state_of(store: BlockStore) -> tuple[int, int, int]:
    allocator = store.allocator
    return allocator.num_free_blocks, allocator.num_cached_blocks, allocator.num_blocks_in_use


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 5, 7, 8, 9, 12])  # scenario 30
def test_the_store_is_matched_in_full_blocks(store: BlockStore, num_tokens: int) -> None:
    put_in_store(store, list(range(10)))
    match = match_row(store, new_row(list(range(num_tokens))), PreviousRows([]))
    assert match.table.num_tokens == min(8, num_tokens // BLOCK_SIZE * BLOCK_SIZE)
    assert list(match.table.token_ids) == list(range(match.table.num_tokens))


@pytest.mark.parametrize("common", [0, 1, 3, 4, 5, 9, 10])
def test_an_ended_row_is_matched_token_by_token(store: BlockStore, common: int) -> None:
    ended = make_row(store, list(range(10)))
    match = match_row(store, new_row([*range(common), 77, 78]), PreviousRows([ended]))
    assert list(match.table.token_ids) == list(range(common))
    assert match.table.block_ids == ended.table.block_ids[: -(-common // BLOCK_SIZE)]
    match.table.free()
    assert list(ended.table.token_ids) == list(range(10))  # the ended row is as it was


def test_the_longer_of_both_is_held(store: BlockStore) -> None:
    put_in_store(store, list(range(12)))
    short, long = make_row(store, list(range(5))), make_row(store, [*range(14)])
    assert match_row(store, new_row([*range(16)]), PreviousRows([short])).table.num_tokens == 12
    assert match_row(store, new_row([*range(16)]), PreviousRows([short, long])).table.num_tokens == 14
    assert match_row(store, new_row([*range(16)]), PreviousRows([long, short])).table.num_tokens == 14


def test_nothing_of_another_root_is_matched(store: BlockStore) -> None:
    put_in_store(store, list(range(12)), OTHER_ROOT)
    ended = make_row(store, list(range(12)), OTHER_ROOT)
    assert match_row(store, new_row(list(range(12))), PreviousRows([ended])).table.num_tokens == 0


def test_of_an_ended_row_only_what_is_confirmed_and_true_is_matched(store: BlockStore) -> None:
    ended = make_row(store, list(range(12)))
    ended.num_confirmed = 9
    assert match_row(store, new_row(list(range(12))), PreviousRows([ended])).table.num_tokens == 9
    ended.stop_commits(6)
    assert match_row(store, new_row(list(range(12))), PreviousRows([ended])).table.num_tokens == 6


def test_a_match_that_is_given_up_leaves_everything_as_it_was(store: BlockStore) -> None:
    put_in_store(store, list(range(8)))
    ended = make_row(store, list(range(100, 111)))
    before = state_of(store)
    for tokens in ([*range(12)], [*range(100, 111)], [*range(100, 106)], [5, 5]):
        match_row(store, new_row(tokens), PreviousRows([ended])).table.free()
        assert state_of(store) == before
    store.allocator.check()


def test_a_match_holds_its_blocks_so_that_nothing_evicts_them(store: BlockStore) -> None:
    put_in_store(store, list(range(8)))
    match = match_row(store, new_row(list(range(8))), PreviousRows([]))
    store.allocator.forget_cached_blocks()
    assert match.table.num_tokens == 8
    assert store.allocator.num_blocks_in_use == 2


@pytest.mark.parametrize(
    ("tokens", "ended", "why"),
    [
        ([*range(8)], False, "the whole prompt was known"),
        ([*range(10)], False, "the 2 tokens behind token 8 do not fill a block of 4"),
        ([*range(4), 9, 9, 9, 9], False, "no cached block goes on with tokens 4 to 7"),
        ([9, 9, 9, 9], False, "no cached block has these first 4 tokens under the same conditions"),
        ([9, 9], False, "the 2 tokens behind token 0 do not fill a block of 4"),
        ([*range(9), 50, 9], True, "the prompt differs from the last call's tokens at token 9"),
        ([*range(10), 9], True, "the last call's row ends at token 10, and the prompt goes on"),
        ([*range(10)], True, "the whole prompt was known"),
    ],
)
def test_a_match_says_why_it_ends(store: BlockStore, tokens: list[int], ended: bool, why: str) -> None:
    put_in_store(store, list(range(8)))
    rows = [make_row(store, list(range(10)))] if ended else []
    assert match_row(store, new_row(tokens), PreviousRows(rows)).stopped == why


@pytest.mark.parametrize("seed", range(10))
def test_random_rows_match_what_a_search_token_by_token_finds(store: BlockStore, seed: int) -> None:
    chance = random.Random(seed)

    def tokens() -> list[int]:
        return [chance.randint(0, 1) for _ in range(chance.randint(1, 13))]

    stored = [tokens() for _ in range(4)]
    for each in stored:
        put_in_store(store, each)
    ended = [make_row(store, tokens()) for _ in range(3)]
    for _ in range(20):
        new = tokens()

        def common(other: list[int], new: list[int] = new) -> int:
            return next(
                (i for i, (a, b) in enumerate(zip(other, new, strict=False)) if a != b), min(len(other), len(new))
            )

        by_hash = max(min(common(each), len(each)) // BLOCK_SIZE * BLOCK_SIZE for each in stored)
        by_token = max(common(list(row.table.token_ids)) for row in ended)
        with match_row(store, new_row(new), PreviousRows(ended)).table as table:
            assert table.num_tokens == max(by_hash, by_token)
            assert list(table.token_ids) == new[: table.num_tokens]
    store.allocator.check()


@pytest.mark.parametrize(("num_new", "longer"), [(1, None), (2, 8), (3, 8), (6, 12), (9, 12)])
def test_a_running_row_finds_more_of_itself_with_its_new_tokens(
    store: BlockStore, num_new: int, longer: int | None
) -> None:
    put_in_store(store, list(range(12)))
    row = make_row(store, list(range(6)))
    before = state_of(store)
    found = match_longer(store, row, array("q", range(6, 6 + num_new)))
    assert (None if found is None else found.num_tokens) == longer
    assert list(row.table.token_ids) == list(range(6))
    if found is not None:
        found.free()
    assert state_of(store) == before


@pytest.mark.parametrize("seed", range(30))
def test_of_many_ended_rows_the_closest_is_found(store: BlockStore, seed: int) -> None:
    """Against all pairs; few token ids of few bits and of many, so that rows share much and order is by every byte."""
    chance = random.Random(seed)
    ids = [0, 1, 255, 256, 2**31, 2**40]

    def tokens() -> list[int]:
        return [chance.choice(ids) for _ in range(chance.randint(0, 5))]

    ended = [make_row(store, tokens(), chance.choice([ROOT, OTHER_ROOT])) for _ in range(chance.randint(0, 12))]
    index = PreviousRows(ended)
    for _ in range(20):
        new = new_row(tokens(), chance.choice([ROOT, OTHER_ROOT]))
        lengths = [common_prefix_length(row.true_token_ids, new.token_ids) for row in ended if row.root == new.root]
        closest, num_common = index.closest(new)
        assert num_common == max(lengths, default=-1)
        if closest is None:
            assert not lengths
        else:
            assert closest.root == new.root
            assert common_prefix_length(closest.true_token_ids, new.token_ids) == num_common
