"""The worst case of a call, against calls that were really played through with random prompts, beams and forks."""

from __future__ import annotations

import random

import pytest

from hf_paged_cache import OutOfBlocksError
from hf_paged_cache.blocks import BlockTable
from hf_paged_cache.call.admission import (
    UNLIMITED,
    CallLimits,
    Demand,
    admit_call,
    demand_of,
    num_blocks_held_only_by,
    num_blocks_to_take,
    renew_reservation,
    require,
)
from hf_paged_cache.call.prepare import begin_rows
from hf_paged_cache.call.rows import Row, Rows
from hf_paged_cache.call.schedule import take_blocks
from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput
from hf_paged_cache.store.block_store import BlockStore

from .bench import ROOT, Holder, Prepared, commit, limits, make_row, make_rows, new_row, request


def make_request(chance: random.Random, before: list[Row]) -> ForwardRequest:
    """Rows of few different tokens, some equal, some resuming like rows before, some padded."""
    num_columns = chance.randint(2, 14)
    rows: list[RowInput] = []
    for _ in range(chance.randint(1, 4)):
        if rows and chance.random() < 0.5:
            rows.append(chance.choice(rows))
            continue
        pad = chance.choice([0, 0, 0, 1, 2, num_columns - 1])
        tokens = [chance.randint(0, 1) for _ in range(num_columns - pad)]
        if before and chance.random() < 0.7:
            known = list(chance.choice(before).table.token_ids)
            common = chance.randint(0, min(len(known), len(tokens)))
            tokens[:common] = known[:common]
        rows.append(new_row(tokens, pad))
    return ForwardRequest(tuple(rows), num_columns)


def play(store: BlockStore, rows: Rows, prompt: ForwardRequest, max_columns: int, chance: random.Random | None) -> None:
    """Run a call to its last column; with `chance`, beams choose among the rows of their prompt at every step.

    At every step what may still be taken is compared with what really is, later.
    """
    allocator, size = store.allocator, store.block_size
    said: list[tuple[int, int]] = []  # (blocks in use, blocks that it was said may still be taken)
    peaks: list[int] = []  # the most blocks in use since that step

    def note(num_columns: int) -> None:
        needed = num_blocks_to_take(rows, num_columns, max_columns, size)
        said.append((allocator.num_blocks_in_use, needed))
        peaks.append(0)

    def run(new: ForwardRequest, num_columns: int) -> None:
        take_blocks(Prepared(store, rows), new)
        peaks[:] = [max(peak, allocator.num_blocks_in_use) for peak in peaks]
        rows.confirm(num_columns)
        if chance is not None:
            rows.commit()  # rows that turn out equal then share their blocks

    note(prompt.num_new_columns)
    run(prompt, prompt.num_new_columns)
    rows.select(range(len(rows)))
    for num_columns in range(prompt.num_new_columns + 1, max_columns + 1):
        note(num_columns - 1)
        if chance is not None:
            sources = [chance.choice([j for j, g in enumerate(rows.group) if g == group]) for group in rows.group]
            rows.select(sources)
            tokens = [chance.randint(0, 1) for _ in sources]
        else:
            tokens = [1000 * i + num_columns for i in range(len(rows))]
        run(request(*([token] for token in tokens)), num_columns)
    for (in_use, needed), peak in zip(said, peaks, strict=True):
        assert peak - in_use <= needed, f"{peak - in_use} blocks were taken, {needed} were said"


def begin(chance: random.Random, block_size: int) -> tuple[BlockStore, Rows, ForwardRequest, list[Row]]:
    store = BlockStore(block_size, 2000)
    before = [make_row(store, [chance.randint(0, 1) for _ in range(chance.randint(1, 12))]) for _ in range(3)]
    for row in before:
        if chance.random() < 0.5:
            commit(row)
    prompt = make_request(chance, before)
    rows, _ = begin_rows(store, prompt, before)
    return store, rows, prompt, before


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(25))
def test_no_call_takes_more_blocks_than_its_worst_case(block_size: int, seed: int) -> None:
    chance = random.Random(seed)
    store, rows, prompt, before = begin(chance, block_size)
    if chance.random() < 0.5:
        for row in before:
            row.table.free()
    play(store, rows, prompt, prompt.num_new_columns + chance.randint(0, 9), chance)
    store.allocator.check()


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(10))
def test_rows_that_all_go_their_own_way_take_exactly_their_worst_case(block_size: int, seed: int) -> None:
    chance = random.Random(seed)
    store = BlockStore(block_size, 2000)
    prompt = make_request(chance, [])
    rows, _ = begin_rows(store, prompt, [])
    max_columns = prompt.num_new_columns + chance.randint(1, 9)
    needed = num_blocks_to_take(rows, prompt.num_new_columns, max_columns, block_size)
    play(store, rows, prompt, max_columns, None)
    assert store.allocator.num_blocks_in_use == needed


def test_a_row_that_fits_already_takes_nothing() -> None:
    store = BlockStore(4, 100)
    rows = make_rows(store, range(8))
    for max_columns in (0, 5, 8):
        assert num_blocks_to_take(rows, 8, max_columns, 4) == 0
    assert num_blocks_to_take(rows, 8, 9, 4) == 1


def test_aliases_share_the_full_blocks_of_their_prompt_only() -> None:
    store = BlockStore(4, 100)
    rows = Rows([Row(BlockTable(store.allocator, ROOT), 0, ROOT)], [0, 0, 0], 0)
    # 10 columns: 2 full blocks and half of one; 14 columns are 4 blocks a row
    assert num_blocks_to_take(rows, 10, 14, 4) == 2 + 3 * 2


@pytest.mark.parametrize("seed", range(10))
def test_blocks_held_only_by_rows_are_those_that_dropping_them_gives_back(seed: int) -> None:
    chance = random.Random(seed)
    store = BlockStore(2, 200)
    rows = [make_row(store, [chance.randint(0, 1) for _ in range(chance.randint(1, 9))]) for _ in range(3)]
    rows += [chance.choice(rows).fork() for _ in range(3)]
    for row in rows:
        if chance.random() < 0.5:
            commit(row)  # equal blocks become one
    chance.shuffle(rows)
    dropped = rows[: chance.randint(0, 6)]
    expected = num_blocks_held_only_by(dropped, store)
    before = store.allocator.num_blocks_in_use
    for row in dropped:
        row.table.free()
    assert before - store.allocator.num_blocks_in_use == expected


# Reservations


@pytest.mark.parametrize("num_released", [0, 2])
def test_a_call_is_refused_exactly_when_its_blocks_cannot_be_had(num_released: int) -> None:
    store, holder, other = BlockStore(4, 11), Holder(), Holder()
    row = make_row(store, range(8))  # 2 of 10 are in use
    store.reserve(other, 3)
    require(store, holder, Demand(5 + num_released, num_released), "this call")
    with pytest.raises(OutOfBlocksError):
        require(store, holder, Demand(6 + num_released, num_released), "this call")
    store.reserve(holder, 5)  # its own reservation is no obstacle
    require(store, holder, Demand(5, 0), "this call")
    assert row.table.num_tokens == 8


def test_a_refusal_shows_the_arithmetic() -> None:
    store, holder, other = BlockStore(4, 11), Holder(), Holder(num_previous=2)
    row = make_row(store, range(8))
    store.reserve(other, 3)
    store.add_holder(other)
    with pytest.raises(OutOfBlocksError) as caught:
        require(store, holder, Demand(6, 0), "this call (2 rows of up to 12 tokens)")
    assert row.table.num_tokens == 8
    assert str(caught.value) == (
        "this call (2 rows of up to 12 tokens) may need 6 more blocks of 4 tokens, but 5 can be had: of num_blocks=11 "
        "one is the null block, 2 are in use (2 by rows whose call is over, which their caches' reset() gives back) and 3 "
        "are reserved for running calls. Ask for fewer new tokens or rows, or build the cache with num_blocks=12 or "
        "more (or with max_bytes for so many)"
    )


def test_a_call_has_its_worst_case_reserved_or_is_refused_before_anything_changes() -> None:
    store = BlockStore(4, 6)
    rows, _ = begin_rows(store, request(range(10)), [])
    call = Prepared(store, rows, limits(20))
    admit_call(call, 10)
    assert store.num_reserved_blocks(Holder()) == 5
    call.limits = limits(21)
    with pytest.raises(OutOfBlocksError, match=r"this call \(1 row of up to 21 tokens\) may need 6"):
        admit_call(call, 10)
    assert store.num_reserved_blocks(Holder()) == 5


def test_a_forward_that_goes_further_than_the_limits_say_counts_to_its_own_end() -> None:
    store = BlockStore(4, 100)
    rows, _ = begin_rows(store, request(range(10)), [])
    assert [demand_of(Prepared(store, rows, limits(most)), 10) for most in (8, 10)] == [(3, 0, ())] * 2


def test_blocks_of_previous_rows_that_are_dropped_first_count_as_obtainable() -> None:
    store = BlockStore(4, 6)
    previous = make_rows(store, [7] * 8).distinct
    rows, _ = begin_rows(store, request(range(10)), [])
    with pytest.raises(OutOfBlocksError):
        admit_call(Prepared(store, rows, limits(20)), 10)
    call = Prepared(store, rows, limits(20), previous)
    admit_call(call, 10)
    assert store.num_reserved_blocks(Holder()) == 5


def test_a_call_of_unknown_length_has_nothing_reserved() -> None:
    assert not UNLIMITED.are_known
    assert not CallLimits(num_prompt_columns=5).are_known
    assert limits(20).are_known
    store = BlockStore(4, 100)
    rows, _ = begin_rows(store, request([1]), [])
    for given in (UNLIMITED, limits()):
        renew_reservation(Prepared(store, rows, given), 1)
        assert store.num_reserved_blocks(Holder()) == 0
    call = Prepared(store, rows, limits(20))
    renew_reservation(call, 1)
    assert store.num_reserved_blocks(Holder()) == 5
