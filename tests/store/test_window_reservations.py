"""What is reserved of window blocks: who is admitted gets them, and is counted by them."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks import Allocation
from hf_paged_cache.blocks.sight import Window
from hf_paged_cache.store.window_groups import RowToCome

from .test_window_groups import ROOT, filled, store_of


class Tables:
    """Rows of a call."""

    def __init__(self, *tables) -> None:
        self.tables = [*tables]

    def block_ids(self) -> set[int]:
        return {block for table in self.tables for block in table.block_ids}

    def allocations(self) -> list[Allocation]:
        return [table.allocation for table in self.tables]

    def free(self) -> None:
        while self.tables:
            self.tables.pop().free()


class Idle:
    """A call with rows that somebody set up."""

    is_running = True
    salt = b""

    def __init__(self, *tables) -> None:
        self.rows, self.previous = Tables(*tables), Tables()


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
        "22 blocks of 2 tokens in layers with a window of 4 tokens, but 21 of 29 can be had"
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
        ),  # window of 4: 2 blocks after a whole one, 3 after any
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
    assert store.follow_windows({0: Window(4), 1: Window(9)}, other)
    assert store.windows.reserved_for(call) == ()
    store.windows.reserve(other, (1, 2))
    assert [(group.name, group.num_to_come) for group in store.windows.groups] == [(9, 1), (4, 2)]
