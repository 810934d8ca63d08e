"""Allocator and pool grow together, within a budget, and reserved blocks are kept for whom they were reserved."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from hf_paged_cache import BlockStateError, CacheArgumentError
from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.kv.slot_mapping import ReadSource, SlotMapping
from hf_paged_cache.store import block_store
from hf_paged_cache.store.block_store import BlockStore

ROOT = root_hash(b"model")
BLOCK_SIZE = 4


class IdleHolder:
    """A call that runs nothing."""

    is_running = False
    salt = b""

    def drop_rows(self) -> None:
        """Nothing to drop."""

    def num_previous_blocks(self) -> int:
        return 0


class Rows:
    """Rows that a collected cache left behind: they count how often they were ended."""

    def __init__(self, failing: bool = False) -> None:
        self.num_ended = 0
        self._failing = failing

    def end(self) -> None:
        if self._failing:
            self._failing = False
            raise KeyboardInterrupt
        self.num_ended += 1


def fill(store: BlockStore, num_tokens: int, first: int = 0, *, commit: bool = True) -> BlockTable:
    """A table of tokens that were written, as a forward would."""
    table = BlockTable(store.allocator, ROOT)
    tokens = range(first, first + num_tokens)
    store.make_room(table.num_new_blocks_for_append(num_tokens))
    table.append_tokens(tokens)
    store.make_copies()
    slots = table.slots(0, num_tokens)
    store.pool.write(0, {"key": torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)}, SlotMapping(slots))
    if commit:
        table.commit_full_blocks(num_tokens)
    return table


def read(store: BlockStore, table: BlockTable) -> list[float]:
    slots = torch.tensor([table.slots(0, table.num_tokens)])
    return store.pool.gather(0, ReadSource(slots))["key"].flatten().tolist()


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_fewer_than_two_blocks_are_refused(num_blocks: int) -> None:
    with pytest.raises(CacheArgumentError, match=f"num_blocks is {num_blocks}; it must be at least 2"):
        BlockStore(BLOCK_SIZE, num_blocks)


def test_growth_keeps_every_row_and_the_pool_holds_at_least_what_the_allocator_manages() -> None:
    store = BlockStore(BLOCK_SIZE, 3000)
    first = store.max_num_blocks
    assert (first, store.allocator.num_blocks < 3000) == (3000, True)
    tables = [fill(store, 100, first=1000 * i) for i in range(20)]
    assert store.pool.capacity >= store.allocator.num_blocks
    for i, table in enumerate(tables):
        assert read(store, table) == list(range(1000 * i, 1000 * i + 100))
    store.allocator.check()


def test_a_store_grows_before_it_evicts_and_evicts_before_it_fails() -> None:
    store = BlockStore(BLOCK_SIZE, 130)
    small = store.allocator.num_blocks
    for i in range(40):
        fill(store, 3 * BLOCK_SIZE, first=1000 * i).free()
    assert small < store.allocator.num_blocks <= 130
    assert store.allocator.num_evictions == 0
    for i in range(40, 60):
        fill(store, 3 * BLOCK_SIZE, first=1000 * i).free()
    assert store.allocator.num_blocks == 130
    assert store.allocator.num_evictions > 0
    store.allocator.check()


def test_a_store_grows_by_a_factor_and_by_more_where_more_is_asked_for() -> None:
    store = BlockStore(BLOCK_SIZE, 100_000)
    first = store.allocator.num_blocks
    store.make_room(first - 1)  # there is room
    assert store.allocator.num_blocks == first
    store.make_room(first)
    assert store.allocator.num_blocks == first * store.pool.growth()
    store.make_room(50_000)
    assert store.allocator.num_free_blocks == 50_000


def test_a_store_never_grows_beyond_its_most_and_reaches_it() -> None:
    store = BlockStore(BLOCK_SIZE, 70)
    table = fill(store, 69 * BLOCK_SIZE)
    assert store.allocator.num_blocks == store.max_num_blocks == store.pool.capacity == 70
    assert read(store, table) == list(range(69 * BLOCK_SIZE))


def test_blocks_not_managed_yet_count_as_free() -> None:
    store = BlockStore(BLOCK_SIZE, 1000)
    assert store.num_free_blocks == 999
    table = fill(store, 10)
    assert store.num_free_blocks == 999 - 3
    table.free()
    assert store.num_free_blocks + store.allocator.num_cached_blocks == 999


def test_bytes_in_use_are_those_of_held_blocks() -> None:
    store = BlockStore(BLOCK_SIZE, 100)
    assert store.kv_bytes_in_use() == 0
    table = fill(store, 10)
    assert store.kv_bytes_in_use() == 3 * BLOCK_SIZE * 4
    table.free()
    assert store.kv_bytes_in_use() == 0


# Reserves


def test_what_is_reserved_for_one_holder_no_other_can_have() -> None:
    store, ours, theirs = BlockStore(BLOCK_SIZE, 11), IdleHolder(), IdleHolder()
    store.reserve(ours, 6)
    assert store.num_obtainable_blocks(ours) == 10
    assert store.num_obtainable_blocks(theirs) == 4
    assert (store.num_reserved_blocks(ours), store.num_reserved_blocks(theirs)) == (0, 6)
    with fill(store, 3 * BLOCK_SIZE):
        store.reserve(ours, 3)
        assert store.num_obtainable_blocks(theirs) == 10 - 3 - 3


def test_blocks_not_managed_yet_can_be_had_and_reserves_come_off_for_others_only() -> None:
    store, ours, theirs, third = BlockStore(BLOCK_SIZE, 1000), IdleHolder(), IdleHolder(), IdleHolder()
    assert store.allocator.num_blocks < 1000
    store.reserve(ours, 100)
    store.reserve(theirs, 30)
    holders = (ours, theirs, third, None)
    assert [store.num_reserved_blocks(holder) for holder in holders] == [30, 100, 130, 130]
    assert [store.num_obtainable_blocks(holder) for holder in holders] == [969, 899, 869, 869]
    table = fill(store, 3 * BLOCK_SIZE)
    assert [store.num_obtainable_blocks(holder) for holder in holders] == [966, 896, 866, 866]
    store.reserve(ours, 97)  # renewed once three were taken, not added
    assert [store.num_obtainable_blocks(holder) for holder in holders] == [966, 899, 869, 869]
    store.reserve(ours, 0)
    table.free()
    assert [store.num_obtainable_blocks(holder) for holder in holders] == [969, 999, 969, 969]


@pytest.mark.parametrize("ends", ["zero", "collected"])
def test_a_reserve_ends_by_zero_and_with_its_holder(ends: str) -> None:
    store, other = BlockStore(BLOCK_SIZE, 11), IdleHolder()
    holder: Any = IdleHolder()
    store.reserve(holder, 6)
    if ends == "zero":
        store.reserve(holder, 0)
    else:
        del holder
        gc.collect()
    assert store.num_obtainable_blocks(other) == 10


def test_cached_blocks_can_be_had_and_held_ones_cannot() -> None:
    store, holder = BlockStore(BLOCK_SIZE, 11), IdleHolder()
    table = fill(store, 3 * BLOCK_SIZE)
    assert store.num_obtainable_blocks(holder) == 7
    table.free()
    assert store.allocator.num_cached_blocks == 3
    assert store.num_obtainable_blocks(holder) == 10


def test_holders_are_known_as_long_as_they_live() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    holder: Any = IdleHolder()
    store.add_holder(holder)
    store.add_holder(holder)
    assert list(store.holders()) == [holder]
    del holder
    gc.collect()
    assert list(store.holders()) == []


# Budget


def test_without_a_number_the_budget_is_settled_once_a_forward_has_shown_what_a_block_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = BlockStore(BLOCK_SIZE)
    assert store.num_obtainable_blocks(IdleHolder()) == math.inf
    store.read_budget()
    store.settle_budget()  # nothing was written yet
    assert store.max_num_blocks is store.num_free_blocks is None
    table = fill(store, 10)
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device: 1000 * store.pool.bytes_per_block + 5)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == 1001  # and the null block
    assert store.num_free_blocks == 1000 - len(table.block_ids)
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device: 5)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == 1001


def test_a_budget_smaller_than_what_is_managed_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(BLOCK_SIZE)
    fill(store, 10)
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device: 0)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == store.allocator.num_blocks


def test_a_budget_leaves_what_the_first_call_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    store, holder = BlockStore(BLOCK_SIZE), IdleHolder()
    fill(store, 10)
    store.reserve(holder, 500)
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device: 0)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == store.allocator.num_blocks + 500
    assert store.num_obtainable_blocks(holder) >= 500


def test_a_number_that_was_given_is_the_budget() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    fill(store, 10)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == 11


# Copies, left-behind rows, reset


def test_copies_on_write_are_made_before_the_next_write_and_once() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    table = fill(store, 6)
    forked = table.fork()
    forked.append_tokens([7])
    store.make_copies()
    assert store.allocator.pending_copies == ()
    assert read(store, forked)[:6] == read(store, table) == [0, 1, 2, 3, 4, 5]
    assert forked.block_ids[1] != table.block_ids[1]


def test_rows_left_behind_are_ended_once_in_order() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    rows = [Rows(), Rows()]
    store.left_behind.extend(rows)
    store.settle()
    store.settle()
    assert [each.num_ended for each in rows] == [1, 1]


def test_rows_left_behind_are_not_lost_when_ending_them_is_interrupted() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    rows = [Rows(failing=True), Rows()]
    store.left_behind.extend(rows)
    with pytest.raises(KeyboardInterrupt):
        store.settle()
    store.settle()
    assert [each.num_ended for each in rows] == [1, 1]


def test_a_reset_forgets_every_block_and_gives_the_memory_back() -> None:
    store = BlockStore(BLOCK_SIZE, 3000)
    for i in range(10):
        fill(store, 100, first=1000 * i).free()
    store.reset_prefix_cache()
    assert (store.allocator.num_cached_blocks, store.pool.pool_bytes, store.num_free_blocks) == (0, 0, 2999)
    table = fill(store, 10)
    assert read(store, table) == list(range(10))
    store.allocator.check()


def test_a_reset_is_refused_while_somebody_holds_blocks_and_changes_nothing() -> None:
    store = BlockStore(BLOCK_SIZE, 100)
    table = fill(store, 10)
    with pytest.raises(BlockStateError, match="3 blocks are in use"):
        store.reset_prefix_cache()
    assert read(store, table) == list(range(10))
