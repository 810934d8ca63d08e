"""What is reserved of window blocks: who is admitted gets them, and is counted by them."""

from __future__ import annotations

import random

import pytest

from hf_paged_cache.store.block_store import BlockStore
from hf_paged_cache.store.window_groups import RowToCome

from .random_window_calls import ROOT, Calls, Tables, run_calls
from .test_window_groups import filled, store_of

SHAPES = {
    "few window blocks": {
        "block_size": 2,
        "num_blocks": 300,
        "window_of": {1: 5, 2: 16},
        "layers": range(3),
        "window_share": 0.1,
    },
    "two windows": {
        "block_size": 4,
        "num_blocks": 400,
        "window_of": {0: 3, 1: 9, 2: 9},
        "layers": range(4),
        "window_share": 0.08,
    },
    "as many": {"block_size": 2, "num_blocks": 60, "window_of": {0: 7}, "layers": range(2), "window_share": 1.0},
    "all layers": {
        "block_size": 2,
        "num_blocks": 30,
        "window_of": {0: 7, 1: 2},
        "layers": range(2),
        "window_share": 0.5,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_that_was_admitted_gets_its_window_blocks(name: str) -> None:
    calls = run_calls(Calls(BlockStore(**SHAPES[name]), random.Random(name)), 1_000)
    assert calls.num_admitted > 20
    assert calls.num_refused > 10
    assert calls.num_plain > 10


@pytest.mark.parametrize("share", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("layers", [range(2), range(3)], ids=["all have a window", "one has none"])
def test_a_budget_in_bytes_is_kept_to(share: float, layers: range) -> None:
    store = BlockStore(2, window_of={0: 16, 1: 3}, layers=layers, window_share=share)
    calls = Calls(store, random.Random(f"{share} {layers}"), budget_bytes=20_000 * len(layers))
    run_calls(calls, 500)
    assert calls.num_admitted > 20
    assert store.is_settled
    assert store.max_num_blocks is not None
    assert store.max_num_blocks > 64  # as the budget says


def test_what_was_admitted_before_the_budget_was_known_is_kept_to() -> None:
    for seed in range(5):
        store = BlockStore(2, window_of={0: 33}, layers=range(2), window_share=0.1)
        calls = Calls(store, random.Random(seed), max_tokens=60)
        for _ in range(4):
            calls.begin()
        admitted = [max(reserved) for reserved in store.windows._reserved.values()]
        calls.budget_bytes = 16
        calls.advance()
        assert store.is_settled
        assert store.windows.groups[0].most < 1 + 2 * sum(admitted) + 64
        calls.budget_bytes = None
        run_calls(calls, 300)


class Idle:
    """A call with rows that somebody set up."""

    is_running = True
    salt = b""

    def __init__(self, *tables) -> None:
        self.rows, self.previous = Tables(), Tables()
        self.rows.tables += tables


def test_what_calls_share_is_counted_for_each_that_has_reserved() -> None:
    store = store_of()
    first = Idle(filled(store, range(8)))
    store.windows.reserve(first, (6,))
    second = Idle(store.new_table(ROOT, b""))
    assert second.rows.tables[0].hold_prefix(range(8)) == 8
    store.windows.reserve(second, (6,))
    assert store.windows.num_needed() == [2]
    assert store.windows.num_obtainable(None) == [29 - 12]
    assert store.windows.num_obtainable(first) == [29 - 6]
    pinned = store.new_table(ROOT, b"")
    pinned.hold_prefix(range(8))
    assert store.windows.num_obtainable(None) == [29 - 12 - 2]
    assert store.windows.lacking(first, (21,)) is None
    assert store.windows.lacking(first, (22,)) == (
        "22 blocks of 2 tokens in layers with a window of 4, but 21 of 29 can be had"
    )
    store.windows.reserve(second, ())
    second.rows.free()
    assert store.windows.num_obtainable(first) == [29 - 2]


def test_who_has_more_than_was_reserved_is_counted_by_what_there_is() -> None:
    store = store_of()
    call = Idle(filled(store, range(8)))
    store.windows.reserve(call, (1,))
    assert store.windows.num_obtainable(None) == [29 - 2]


def test_what_is_reserved_is_not_spare() -> None:
    store = store_of()
    store.windows.reserve(Idle(), (20,))  # collected at once
    store.windows.reserve(call := Idle(), (8,))
    assert store.windows.groups[0].num_spare == 29 - 8
    store.windows.reserve(call, ())
    assert store.windows.groups[0].num_spare == 29


@pytest.mark.parametrize(
    ("row", "keeps_past", "expected"),
    [
        (
            RowToCome(40, 80, 1, is_in_chunks=False),
            False,
            3 + 2,
        ),  # window of 4: 2 blocks behind a whole one, 3 behind any
        (RowToCome(4, 80, 1, is_in_chunks=False), False, 3),  # a prompt of two blocks
        (RowToCome(40, 80, 1, is_in_chunks=True), False, 6),
        (RowToCome(40, 80, 4, is_in_chunks=False), False, 5 + 4 * 3),
        (RowToCome(40, 42, 4, is_in_chunks=False), False, 5 + 4 * 1),
        (RowToCome(40, 80, 1, is_in_chunks=False), True, 40),
        (RowToCome(40, 80, 3, is_in_chunks=False), True, 20 + 3 * 20),
        (RowToCome(2, 2, 1, is_in_chunks=False), False, 1),
    ],
)
def test_what_a_call_needs_in_its_worst_case(row: RowToCome, keeps_past: bool, expected: int) -> None:
    admission = store_of().windows
    assert admission.of_call([row], keeps_past=keeps_past) == (expected,)
    assert admission.of_call([row, row], keeps_past=keeps_past) == (2 * expected,)


def test_a_forward_needs_what_it_sees_and_what_the_next_one_sees() -> None:
    assert store_of().windows.of_forward([(8, 40, False), (8, 9, False)]) == (2 + 2 + 3,)


def test_where_there_are_as_many_as_blocks_nobody_lacks_any() -> None:
    assert store_of(1.0).windows.lacking(Idle(), (1000,)) is None
    assert store_of(0.9).windows.lacking(Idle(), (1000,)) is not None


def test_what_is_reserved_is_kept_to_until_somebody_else_needs_it() -> None:
    store = store_of()
    store.windows.reserve(call := Idle(), (27,))
    table = filled(store, range(8))
    assert store.windows.is_kept_to
    others = filled(store, range(100, 104))
    assert not store.windows.is_kept_to
    store.windows.reserve(call, ())
    assert store.windows.is_kept_to
    assert table.block_ids
    assert others.block_ids


def test_other_windows_begin_anew() -> None:
    store = store_of()
    store.windows.reserve(call := Idle(), (5,))
    other = Idle()
    assert store.follow_windows({0: 4, 1: 9}, other)
    assert store.windows.reserved_for(call) == ()
    store.windows.reserve(other, (1, 2))
    assert [(group.window, group.num_to_come) for group in store.windows.groups] == [(9, 1), (4, 2)]
