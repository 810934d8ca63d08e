"""What an announced forward does to rows and blocks, step by step."""

from __future__ import annotations

import random
from array import array

import pytest

from hf_paged_cache import CacheArgumentError, OutOfBlocksError
from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.blocks.tokens import TokenIds
from hf_paged_cache.call.call_state import CallLimits
from hf_paged_cache.call.plan import KnownRow
from hf_paged_cache.call.prepare import (
    admit,
    begin_rows,
    continue_rows,
    each_alone,
    is_step,
    slot_mapping,
    stop_at_end_of_sequence,
    tail_behind,
    take_blocks,
    take_step,
)
from hf_paged_cache.call.rows import Row, Rows
from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput
from hf_paged_cache.store.block_store import BlockStore

ROOT, OTHER_ROOT = root_hash(b"model"), root_hash(b"another model")
BLOCK_SIZE = 4


class Holder:
    """A call that runs nothing."""

    is_running = False

    def drop_rows(self) -> None:
        """Nothing to drop."""

    def num_previous_blocks(self) -> int:
        return 0


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(BLOCK_SIZE, 64)


def new_row(tokens: list[int], pad: int = 0, first: int = 0, root: bytes = ROOT) -> RowInput:
    return RowInput(array("q", tokens), pad, first, root)


def request(*rows: RowInput, num_new: int | None = None, **options: object) -> ForwardRequest:
    number = len(rows[0].token_ids) + rows[0].pad if num_new is None else num_new
    return ForwardRequest(rows, number, **options)  # type: ignore[arg-type]


def put_in_store(store: BlockStore, tokens: list[int]) -> None:
    with BlockTable(store.allocator, ROOT) as table:
        table.append_tokens(tokens)
        table.commit_full_blocks(len(tokens))


def confirmed(store: BlockStore, *rows: list[int], alias: list[int] | None = None) -> Rows:
    """Rows whose tokens were announced and confirmed."""
    made = []
    for tokens in rows:
        row = Row(BlockTable(store.allocator, ROOT), 0, ROOT)
        row.table.append_tokens(tokens)
        made.append(row)
    result = Rows(made, list(range(len(rows))) if alias is None else alias, 0)
    result.confirm(len(rows[0]))
    return result


def limits(max_columns: int | None, num_prompt: int = 4, end: tuple[int, ...] = ()) -> CallLimits:
    return CallLimits(num_prompt, max_columns, 1, frozenset(end))


# Rows begin


def test_equal_rows_begin_as_one_and_take_no_fresh_block(store: BlockStore) -> None:
    put_in_store(store, [1, 2, 3, 4])
    before = store.allocator.num_free_blocks
    rows, matches = begin_rows(
        store, request(new_row([1, 2, 3, 4, 5]), new_row([1, 2, 3, 4, 6]), new_row([1, 2, 3, 4, 5])), []
    )
    assert (rows.alias, len(rows.distinct), rows.num_columns) == ([0, 1, 0], 2, 0)
    assert [row.num_known for row in rows.distinct] == [4, 4]
    assert [matched for matched, _ in matches] == [4, 4, 4]
    assert store.allocator.num_free_blocks == before


@pytest.mark.parametrize(
    "other",
    [new_row([1, 2], root=OTHER_ROOT), RowInput(array("q", [1]), 1, 0, ROOT), new_row([1, 3])],
    ids=["root", "padding", "tokens"],
)
def test_rows_that_differ_in_anything_run_each_for_itself(store: BlockStore, other: RowInput) -> None:
    rows, _ = begin_rows(store, request(new_row([1, 2]), other), [])
    assert rows.alias == [0, 1]


def test_rows_that_may_not_be_aliases_run_each_for_itself(store: BlockStore) -> None:
    rows, _ = begin_rows(store, request(new_row([1, 2]), new_row([1, 2]), may_alias=False), [])
    assert rows.alias == [0, 1]


def test_a_row_takes_its_pad_root_and_first_position(store: BlockStore) -> None:
    rows, _ = begin_rows(store, request(new_row([1, 2], pad=3, first=7, root=OTHER_ROOT)), [])
    row = rows.distinct[0]
    assert (row.pad, row.first_position, row.root, row.table.root) == (3, 7, OTHER_ROOT, OTHER_ROOT)


def test_a_forward_that_cannot_be_reused_matches_nothing_and_will_commit_nothing(store: BlockStore) -> None:
    put_in_store(store, [1, 2, 3, 4])
    ended = confirmed(store, [1, 2, 3, 4, 5]).distinct
    rows, matches = begin_rows(store, request(new_row([1, 2, 3, 4, 5]), bypass="a reason"), ended)
    assert matches == [(0, "a reason")]
    assert (rows.distinct[0].num_known, rows.distinct[0].commit_end) == (0, 0)


# Rows go on


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_rows_cannot_go_on(store: BlockStore, number: int) -> None:
    rows = confirmed(store, [1, 2], [3, 4])
    with pytest.raises(CacheArgumentError, match=f"the cache runs 2 rows, got {number}"):
        continue_rows(store, request(*[new_row([5])] * number), rows)


def test_aliases_stay_aliases_while_chunks_of_a_prompt_are_equal(store: BlockStore) -> None:
    rows = confirmed(store, [1, 2], alias=[0, 0])
    assert continue_rows(store, request(new_row([5, 6]), new_row([5, 6])), rows) is None
    assert rows.is_aliased


def test_aliases_part_where_their_tokens_do(store: BlockStore) -> None:
    rows = confirmed(store, [1, 2], alias=[0, 0, 0])
    sources = continue_rows(store, request(new_row([5, 6]), new_row([5, 7]), new_row([5, 6])), rows)
    assert sources == [0, 0]
    assert rows.alias == [0, 1, 0]


@pytest.mark.parametrize("options", [{}, {"may_alias": False}], ids=["one token", "not allowed"])
def test_aliases_part_before_a_forward_of_one_token_and_where_they_are_not_allowed(
    store: BlockStore, options: dict[str, bool]
) -> None:
    rows = confirmed(store, [1, 2], alias=[0, 0])
    num_new = 2 if options else 1
    sources = continue_rows(store, request(*[new_row([5] * num_new)] * 2, **options), rows)
    assert sources == [0, 0]
    assert not rows.is_aliased
    assert rows.distinct[0].table is not rows.distinct[1].table


def test_rows_that_are_no_aliases_never_become_any(store: BlockStore) -> None:
    rows = confirmed(store, [1, 2], [1, 2])
    assert continue_rows(store, request(new_row([5, 6]), new_row([5, 6])), rows) is None
    assert not rows.is_aliased


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (new_row([5]), {"bypass": "a reason"}),
        (new_row([5], root=OTHER_ROOT), {}),
        (RowInput(array("q", [5]), 1, 0, ROOT), {}),
    ],
    ids=["bypass", "root", "padding"],
)
def test_nothing_is_committed_from_where_a_row_goes_on_otherwise_than_it_began(
    store: BlockStore, new: RowInput, options: dict[str, str]
) -> None:
    rows = confirmed(store, [1, 2, 3])
    continue_rows(store, request(new, num_new=1, **options), rows)
    assert rows.distinct[0].commit_end == 3


def test_a_later_chunk_holds_what_the_store_knows_of_it(store: BlockStore) -> None:
    put_in_store(store, list(range(16)))
    rows = confirmed(store, [0, 1, 2])
    continue_rows(store, request(new_row(list(range(3, 14)))), rows)
    assert rows.distinct[0].table.num_tokens == 12
    assert rows.distinct[0].num_confirmed == 3
    store.allocator.check()


@pytest.mark.parametrize("why", ["not committed any more", "all logits are needed"])
def test_a_later_chunk_is_not_matched_where_that_would_be_wrong_or_of_no_use(store: BlockStore, why: str) -> None:
    put_in_store(store, list(range(16)))
    rows = confirmed(store, [0, 1, 2])
    if why == "not committed any more":
        rows.distinct[0].stop_commits(2)
        continue_rows(store, request(new_row(list(range(3, 14)))), rows)
    else:
        continue_rows(store, request(new_row(list(range(3, 14))), num_logits_needed=11), rows)
    assert rows.distinct[0].table.num_tokens == 3


# Blocks


def test_each_row_takes_its_new_tokens_and_the_blocks_for_them(store: BlockStore) -> None:
    rows = confirmed(store, [1, 2, 3], [4, 5, 6])
    taken = take_blocks(store, Holder(), rows, [array("q", [7, 8]), array("q", [9, 9])], None)
    assert taken == 2
    assert [list(row.table.token_ids) for row in rows.distinct] == [[1, 2, 3, 7, 8], [4, 5, 6, 9, 9]]
    assert [row.num_confirmed for row in rows.distinct] == [3, 3]


def test_tokens_that_a_match_holds_already_are_not_appended_again(store: BlockStore) -> None:
    put_in_store(store, list(range(8)))
    rows, _ = begin_rows(store, request(new_row(list(range(10)))), [])
    take_blocks(store, Holder(), rows, [array("q", range(10))], None)
    assert list(rows.distinct[0].table.token_ids) == list(range(10))


@pytest.mark.parametrize(("held", "confirmed_tokens"), [(0, 0), (3, 0), (3, 3), (5, 3)])
def test_the_tail_is_what_the_table_lacks_of_the_new_tokens(
    store: BlockStore, held: int, confirmed_tokens: int
) -> None:
    row = Row(BlockTable(store.allocator, ROOT), 0, ROOT)
    row.table.append_tokens(range(held))
    row.num_confirmed = confirmed_tokens
    new: TokenIds = array("q", range(confirmed_tokens, 9))
    assert list(tail_behind(row, new)) == list(range(held, 9))


@pytest.mark.parametrize("known_length", [False, True])
def test_a_plain_forward_that_does_not_fit_is_refused_with_its_rows_unchanged(known_length: bool) -> None:
    store = BlockStore(BLOCK_SIZE, 4)
    rows = confirmed(store, [1, 2, 3], [4, 5, 6])
    given = limits(None) if known_length else None
    with pytest.raises(OutOfBlocksError, match=r"this forward \(2 rows\) may need 2 more blocks"):
        take_blocks(store, Holder(), rows, [array("q", [7, 8]), array("q", [9, 9])], given)
    assert [row.table.num_tokens for row in rows.distinct] == [3, 3]
    assert take_blocks(store, Holder(), rows, [array("q", [7]), array("q", [9])], None) == 0


def test_a_shared_partial_block_is_copied_before_it_is_written(store: BlockStore) -> None:
    rows = confirmed(store, [1, 2, 3], alias=[0, 0])
    rows.separate()
    assert take_blocks(store, Holder(), rows, [array("q", [7]), array("q", [9])], None) >= 1
    assert store.allocator.pending_copies == ()
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
    ],
)
def test_tokens_behind_the_first_generated_end_are_not_committed(
    store: BlockStore, tokens: list[int], end: int | None
) -> None:
    row = Row(BlockTable(store.allocator, ROOT), 0, ROOT)
    row.table.append_tokens(tokens)
    stop_at_end_of_sequence(row, limits(None, num_prompt=2, end=(9, 8)))
    assert row.commit_end == end


def test_the_prompt_of_a_padded_row_ends_at_the_same_column(store: BlockStore) -> None:
    row = Row(BlockTable(store.allocator, ROOT), 3, ROOT)
    row.table.append_tokens([9, 1, 9, 2])  # columns 3 to 6: the prompt has 5, so it ends with token 1
    stop_at_end_of_sequence(row, limits(None, num_prompt=5, end=(9,)))
    assert row.commit_end == 3


# Admission


def test_a_call_is_promised_its_worst_case_or_refused_before_anything_changes() -> None:
    store, holder = BlockStore(BLOCK_SIZE, 6), Holder()
    rows, _ = begin_rows(store, request(new_row(list(range(10)))), [])
    admit(store, holder, rows, limits(20), num_columns=10, ended=[])
    assert store.num_reserved_blocks(Holder()) == 5
    with pytest.raises(OutOfBlocksError, match=r"this call \(1 row of up to 21 tokens\) may need 6"):
        admit(store, holder, rows, limits(21), num_columns=10, ended=[])
    assert store.num_reserved_blocks(Holder()) == 5


def test_blocks_of_ended_rows_that_are_dropped_first_count_as_obtainable() -> None:
    store, holder = BlockStore(BLOCK_SIZE, 6), Holder()
    ended = confirmed(store, [7] * 8).distinct
    rows, _ = begin_rows(store, request(new_row(list(range(10)))), [])
    with pytest.raises(OutOfBlocksError):
        admit(store, holder, rows, limits(20), num_columns=10, ended=[])
    admit(store, holder, rows, limits(20), num_columns=10, ended=ended)


def test_a_call_of_unknown_length_is_promised_nothing(store: BlockStore) -> None:
    holder = Holder()
    rows, _ = begin_rows(store, request(new_row([1])), [])
    admit(store, holder, rows, limits(None), num_columns=1, ended=[])
    assert store.num_reserved_blocks(Holder()) == 0


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
    known = [KnownRow(row.pad, row.table.num_tokens) for row in rows.distinct]
    start = chance.randint(0, min(num_columns - 1, *(each.pad + each.num_known for each in known)))
    take_blocks(store, Holder(), rows, [inputs[member].token_ids for member in rows.members()], None)
    target = slot_mapping(rows, known, start, num_columns)
    sources = list(range((num_columns - start) * len(known))) if target.sources is None else list(target.sources)
    expected = {}
    for i, (row, before) in enumerate(zip(rows.distinct, known, strict=True)):
        for position in range(before.num_known, row.table.num_tokens):
            slot = row.table.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            expected[slot] = i * (num_columns - start) + row.pad + position - start
    assert len(target.slots) == len(sources)
    assert dict(zip(target.slots, sources, strict=True)) == expected


def test_rows_alone_are_groups_of_their_own() -> None:
    assert each_alone(3) == ([0, 1, 2], [0, 1, 2])
    assert each_alone(3) == ([0, 1, 2], [0, 1, 2])


# A decode step


def test_a_step_does_what_any_forward_does() -> None:
    """Rows of all lengths, forked rows and ends of sequences: the same tables, slots and commits as the long way."""
    shuffler = random.Random(0)
    for _ in range(60):
        tokens = [[shuffler.randrange(1, 9) for _ in range(length)] for length in shuffler.sample(range(1, 12), 3)]
        new = request(*(new_row([shuffler.randrange(1, 9)]) for _ in range(4)))
        given = limits(shuffler.choice([None, 30]), num_prompt=shuffler.choice([0, 40]), end=(7,))
        outcomes = []
        for take in (take_step, take_blocks):
            store = BlockStore(BLOCK_SIZE, 64)
            made = [Row(BlockTable(store.allocator, ROOT), 0, ROOT) for _ in tokens]
            for row, ids in zip(made, tokens, strict=True):
                row.table.append_tokens(ids)
                row.table.commit_full_blocks(len(ids))
            made.append(made[0].fork())
            rows = Rows(made, list(range(4)), 0)
            rows.confirm(12)
            assert is_step(new, rows)
            known = [KnownRow(12 - row.table.num_tokens, row.table.num_tokens) for row in made]
            if take is take_step:
                num_taken, target = take_step(store, Holder(), rows, new, given)
            else:
                num_taken = take_blocks(store, Holder(), rows, [row.token_ids for row in new.rows], given)
                target = slot_mapping(rows, known, 12, 13)
            store.allocator.check()
            outcomes.append(
                (num_taken, target.slots, target.sources, [(row.layout(), row.commit_end) for row in rows.distinct])
            )
        assert outcomes[0] == outcomes[1]


def test_what_is_no_step_takes_the_long_way(store: BlockStore) -> None:
    rows = confirmed(store, [1, 2], [3, 4])
    one = (new_row([5]), new_row([6]))
    assert is_step(request(*one), rows)
    assert not is_step(request(new_row([5, 6]), new_row([6, 7])), rows)
    assert not is_step(request(*one, bypass="embeddings"), rows)
    assert not is_step(request(new_row([5]), new_row([6], root=OTHER_ROOT)), rows)
    assert not is_step(request(new_row([5]), new_row([6], pad=1), num_new=1), rows)
    assert not is_step(request(new_row([5])), rows)
    assert not is_step(request(new_row([5]), new_row([]), num_new=1), rows)  # a column of padding
    assert not is_step(request(*one), confirmed(store, [1, 2], alias=[0, 0]))
    rows.distinct[1].table.append_tokens([9])  # a row that knows more than is confirmed
    assert not is_step(request(*one), rows)


def test_a_step_that_has_no_room_is_refused(store: BlockStore) -> None:
    store = BlockStore(BLOCK_SIZE, 3)
    rows = confirmed(store, [1, 2, 3, 4], [5, 6, 7, 8])
    with pytest.raises(OutOfBlocksError, match="this forward"):
        take_step(store, Holder(), rows, request(new_row([1]), new_row([2])), None)
    rows.roll_back()
    store.allocator.check()
