"""What a scheduled forward does to rows and blocks, step by step."""

from __future__ import annotations

import math
import random

import pytest

from hf_paged_cache import CacheArgumentError, ForwardMismatchError, OutOfBlocksError
from hf_paged_cache.call.admission import UNLIMITED, CallLimits
from hf_paged_cache.call.prefix_match import Found
from hf_paged_cache.call.prepare import begin_rows, continue_rows, hold_windows, map_slots, take_blocks, take_step
from hf_paged_cache.call.rows import Row, Rows
from hf_paged_cache.call.scheduled_forward import RowInput
from hf_paged_cache.store.block_store import BlockStore

from .bench import (
    BLOCK_SIZE,
    OTHER_ROOT,
    ROOT,
    Holder,
    commit,
    limits,
    make_row,
    make_rows,
    new_row,
    put_in_store,
    request,
    tokens_in_batch,
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


def test_a_row_takes_its_pad_root_and_first_position(store: BlockStore) -> None:
    rows, _ = begin_rows(store, request(new_row([1, 2], pad=3, first=7, root=OTHER_ROOT)), [])
    row = rows.distinct[0]
    assert (row.pad, row.first_position, row.root, row.table.root) == (3, 7, OTHER_ROOT, OTHER_ROOT)


def test_a_forward_that_cannot_be_reused_matches_nothing_and_will_commit_nothing(store: BlockStore) -> None:
    put_in_store(store, [1, 2, 3, 4])
    previous = make_rows(store, [1, 2, 3, 4, 5]).distinct
    rows, found = begin_rows(store, request([1, 2, 3, 4, 5], bypass="a reason"), previous)
    assert found == [Found(0, "a reason")]
    assert (rows.distinct[0].num_known, rows.distinct[0].commit_end) == (0, 0)


# Rows go on


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


# Blocks


def test_each_row_takes_its_new_tokens_and_the_blocks_for_them(store: BlockStore) -> None:
    rows = make_rows(store, [1, 2, 3], [4, 5, 6])
    taken = take_blocks(store, Holder(), rows, request([7, 8], [9, 9]), UNLIMITED)
    assert taken == 2
    assert tokens_in_batch(rows) == [[1, 2, 3, 7, 8], [4, 5, 6, 9, 9]]
    assert [row.num_confirmed for row in rows.distinct] == [3, 3]


def test_tokens_that_a_match_holds_already_are_not_appended_again(store: BlockStore) -> None:
    put_in_store(store, list(range(8)))
    rows, _ = begin_rows(store, request(range(10)), [])
    take_blocks(store, Holder(), rows, request(range(10)), UNLIMITED)
    assert list(rows.distinct[0].table.token_ids) == list(range(10))


@pytest.mark.parametrize(("held", "num_confirmed"), [(0, 0), (3, 0), (3, 3), (5, 3)])
def test_only_what_a_table_lacks_of_the_new_tokens_is_appended(
    store: BlockStore, held: int, num_confirmed: int
) -> None:
    row = make_row(store, range(held))
    row.num_confirmed = num_confirmed
    take_blocks(store, Holder(), Rows([row], [0], num_confirmed), request(range(num_confirmed, 9)), UNLIMITED)
    assert list(row.table.token_ids) == list(range(9))


@pytest.mark.parametrize("given", [UNLIMITED, limits()], ids=["plain", "of unknown length"])
def test_a_forward_for_which_nothing_is_reserved_is_refused_with_its_rows_unchanged(given: CallLimits) -> None:
    store = BlockStore(BLOCK_SIZE, 4)
    rows = make_rows(store, [1, 2, 3], [4, 5, 6])
    with pytest.raises(OutOfBlocksError, match=r"this forward \(2 rows\) may need 2 more blocks"):
        take_blocks(store, Holder(), rows, request([7, 8], [9, 9]), given)
    assert [row.table.num_tokens for row in rows.distinct] == [3, 3]
    assert take_blocks(store, Holder(), rows, request([7], [9]), UNLIMITED) == 0


def test_a_copy_of_a_shared_partial_block_is_due_once_it_is_to_be_written(store: BlockStore) -> None:
    rows = make_rows(store, [1, 2, 3], alias=[0, 0])
    rows.separate()
    assert take_blocks(store, Holder(), rows, request([7], [9]), UNLIMITED) >= 1
    assert store.allocator.pending_copies == ((1, 2),)
    assert rows.distinct[0].table.block_ids != rows.distinct[1].table.block_ids


# The end of a sequence


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([5, 1, 2, 9, 3], 4),
        ([9, 1, 2, 3, 4], None),
        ([5, 9, 9, 3, 4], 3),
        ([5, 1, 2, 3, 9], 5),
        ([5, 1, 2, 3, 4], None),
        ([5, 1, 8, 9, 4], 3),
    ],
)
@pytest.mark.parametrize("pad", [0, 1])
def test_tokens_after_the_first_generated_end_are_not_committed(
    store: BlockStore, tokens: list[int], end: int | None, pad: int
) -> None:
    """Of two tokens of prompt; one more column of it is padding."""
    rows, _ = begin_rows(store, request(new_row(tokens, pad)), [])
    take_blocks(store, Holder(), rows, request(new_row(tokens, pad)), limits(num_prompt=2 + pad, end=(9, 8)))
    assert rows.distinct[0].commit_end == end


def test_an_end_that_was_confirmed_is_not_looked_at_again(store: BlockStore) -> None:
    """It was generated by a call before, which passes it on as a part of the prompt, or `generate` went on behind it."""
    rows = make_rows(store, [5, 9, 9])
    take_blocks(store, Holder(), rows, request([1, 9, 2]), limits(num_prompt=1, end=(9,)))
    assert rows.distinct[0].commit_end == 5


# Slots


@pytest.mark.parametrize("seed", range(10))
def test_every_unknown_token_is_written_once_to_its_own_slot(seed: int) -> None:
    chance = random.Random(seed)
    store = BlockStore(BLOCK_SIZE, 200)
    num_columns = chance.randint(3, 12)
    put_in_store(store, [0] * 8)
    inputs = []
    for i in range(chance.randint(1, 3)):
        pad = chance.randint(0, 2)
        common = min(chance.choice([0, 8]), num_columns - pad)
        inputs.append(new_row([0] * common + [10 * i + j + 1 for j in range(num_columns - pad - common)], pad))
    rows, _ = begin_rows(store, request(*inputs, num_new=num_columns), [])
    known = rows.known_columns()
    start = chance.randint(0, min(num_columns - 1, *known))
    take_blocks(store, Holder(), rows, request(*inputs), UNLIMITED)
    mapping = map_slots(store, rows, known, start, num_columns)
    sources = list(range((num_columns - start) * len(known))) if mapping.sources is None else list(mapping.sources)
    expected = {}
    for i, (row, before) in enumerate(zip(rows.distinct, known, strict=True)):
        for position in range(before - row.pad, row.table.num_tokens):
            slot = row.table.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            expected[slot] = i * (num_columns - start) + row.pad + position - start
    assert len(mapping.slots) == len(sources)
    assert dict(zip(mapping.slots, sources, strict=True)) == expected


# A decode step


def test_a_step_does_what_any_forward_does() -> None:
    """Rows of all lengths, forked rows and ends of sequences: the same tables, slots and commits as the long way."""
    shuffler = random.Random(0)
    for _ in range(60):
        tokens = [[shuffler.randrange(1, 9) for _ in range(length)] for length in shuffler.sample(range(1, 12), 3)]
        new = [shuffler.randrange(1, 9) for _ in range(4)]
        given = limits(shuffler.choice([math.inf, 30]), num_prompt=shuffler.choice([0, 12]), end=(7,))
        outcomes = []
        for take in (take_step, take_blocks):
            store = BlockStore(BLOCK_SIZE, 64)
            made = [make_row(store, ids, 12 - len(ids)) for ids in tokens]
            commit(*made)
            made.append(made[0].fork())
            rows = Rows(made, list(range(4)), 12)
            known = rows.known_columns()
            assert known == [12] * 4
            if take is take_step:
                num_taken, mapping = take_step(store, Holder(), rows, new, given, lambda: None)
            else:
                num_taken = take_blocks(store, Holder(), rows, request(*([token] for token in new)), given)
                mapping = map_slots(store, rows, known, 12, 13)
            store.allocator.check()
            outcomes.append(
                (num_taken, mapping.slots, mapping.sources, [(row.layout(), row.commit_end) for row in rows.distinct])
            )
        assert outcomes[0] == outcomes[1]


def test_a_step_that_has_no_room_is_refused_and_can_be_taken_back() -> None:
    store = BlockStore(BLOCK_SIZE, 3)
    rows = make_rows(store, [1, 2, 3, 4], [5, 6, 7, 8])
    with pytest.raises(OutOfBlocksError, match=r"this forward \(2 rows\) may need 2 more blocks"):
        take_step(store, Holder(), rows, [1, 2], UNLIMITED, lambda: None)
    rows.roll_back()
    assert tokens_in_batch(rows) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    store.allocator.check()


def test_rows_whose_windows_are_gone_are_refused() -> None:
    store = BlockStore(BLOCK_SIZE, 64, window_of={0: 5}, layers=[0])
    store.make_room(20)
    row = Row(store.new_table(ROOT, b""), 0, ROOT)
    row.table.append_tokens(range(40))
    row.table.let_pass()
    rows = Rows([row], [0], 40)
    assert hold_windows(rows, 20, 38) == 38
    for block_id in row.table.block_ids[3:5]:
        store.windows.groups[0].places.pop(block_id)
    assert hold_windows(rows, 8, 20) == 12  # what is before tokens 13 to 19 is gone
    with pytest.raises(ForwardMismatchError, match="no longer hold what is before column 16"):
        hold_windows(rows, 16, 20)
