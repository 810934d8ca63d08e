"""A scheduled forward starts at one column for all rows, and takes blocks and slots for what it computes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache import ForwardMismatchError, OutOfBlocksError
from hf_paged_cache.call.admission import UNLIMITED, CallLimits
from hf_paged_cache.call.prepare import begin_rows
from hf_paged_cache.call.rows import Row, Rows
from hf_paged_cache.call.schedule import hold_windows, map_slots, start_column, take_blocks, take_step
from hf_paged_cache.store.block_store import BlockStore

from .bench import (
    BLOCK_SIZE,
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


# One column for all


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(0, 6),
    st.integers(1, 20),
    st.data(),
)
def test_the_forward_starts_at_the_last_column_that_all_rows_allow(
    rows: list[tuple[int, int]], start: int, num_new: int, data: st.DataObject
) -> None:
    """Rows of padding and known tokens."""
    stop = start + num_new
    num_needed = data.draw(st.integers(1, num_new))

    def allowed(column: int) -> bool:
        known = all(position < pad + num_known for pad, num_known in rows for position in range(start, column))
        return known and stop - column >= num_needed

    expected = max(column for column in range(start, stop) if allowed(column))
    columns = [pad + num_known for pad, num_known in rows]
    assert start_column(columns, start=start, stop=stop, num_needed=num_needed) == expected


def test_the_order_of_rows_changes_nothing() -> None:
    shuffler = random.Random(0)
    columns = [48, 10 + 32, 3 + 57]
    for _ in range(5):
        shuffler.shuffle(columns)
        assert start_column(columns, start=0, stop=60, num_needed=1) == 42


def test_a_whole_prompt_that_is_known_still_computes_its_last_column() -> None:
    assert start_column([60], start=0, stop=60, num_needed=1) == 59


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
