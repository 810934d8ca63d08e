"""Allocator and pool grow together, within a budget, and give their memory back."""

from __future__ import annotations

import math
from weakref import WeakSet

import pytest
import torch

from hf_paged_cache import CacheArgumentError, OutOfBlocksError
from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.store import block_store, memory_budget
from hf_paged_cache.store.block_store import BlockStore

from ..kv.through_slabs import read as read_blocks
from ..kv.through_slabs import write as write_blocks

ROOT = root_hash(b"model")
BLOCK_SIZE = 4


def fill(store: BlockStore, num_tokens: int, first: int = 0, *, commit: bool = True) -> BlockTable:
    """A table of tokens that were written, as a forward would."""
    table = BlockTable(store.allocator, ROOT)
    tokens = range(first, first + num_tokens)
    store.make_room(table.num_new_blocks_for_append(num_tokens))
    table.append_tokens(tokens)
    store.make_copies()
    write_blocks(store.pool, 0, {"key": torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)}, table.block_ids)
    if commit:
        table.commit_full_blocks(num_tokens)
    return table


def read(store: BlockStore, table: BlockTable) -> list[float]:
    return read_blocks(store.pool, 0, table.block_ids, table.num_tokens)["key"].flatten().tolist()


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_fewer_than_two_blocks_are_refused(num_blocks: int) -> None:
    with pytest.raises(CacheArgumentError, match=f"num_blocks is {num_blocks}; it must be at least 2"):
        BlockStore(BLOCK_SIZE, num_blocks)


def test_growth_keeps_every_row_and_the_pool_holds_at_least_what_the_allocator_manages() -> None:
    store = BlockStore(BLOCK_SIZE, 3000)
    first = store.max_num_blocks
    assert (first, store.allocator.num_blocks < 3000) == (3000, True)
    tables = [fill(store, 100, first=1000 * i) for i in range(20)]
    assert store.pool.all.capacity >= store.allocator.num_blocks
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
    assert store.allocator.num_blocks == first * 8
    store.make_room(50_000)
    assert store.allocator.num_free_blocks == 50_000


# What can be had


def test_blocks_that_are_not_managed_yet_can_be_had() -> None:
    store = BlockStore(BLOCK_SIZE, 1000)
    assert store.allocator.num_blocks < 1000
    assert store.num_obtainable_blocks() == store.num_free_blocks == 999
    table = fill(store, 3 * BLOCK_SIZE)
    assert store.num_obtainable_blocks() == store.num_free_blocks == 996
    table.free()
    assert (store.num_obtainable_blocks(), store.num_free_blocks) == (999, 996)


def test_cached_blocks_can_be_had_and_held_ones_cannot() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    table = fill(store, 3 * BLOCK_SIZE)
    assert store.num_obtainable_blocks() == 7
    table.free()
    assert store.allocator.num_cached_blocks == 3
    assert store.num_obtainable_blocks() == 10


# Budget


def test_without_a_number_the_budget_is_settled_once_a_forward_has_shown_what_a_block_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = BlockStore(BLOCK_SIZE)
    assert store.num_obtainable_blocks() == math.inf
    store.read_budget()
    store.settle_budget()  # nothing was written yet
    assert store.max_num_blocks is store.num_free_blocks is None
    table = fill(store, 10)
    monkeypatch.setattr(
        block_store, "default_budget_bytes", lambda device, store: 1000 * store.pool.all.bytes_per_block + 5
    )
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == 1001  # and the null block
    assert store.num_free_blocks == 1000 - len(table.block_ids)
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device, store: 5)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == 1001


def test_a_budget_smaller_than_what_is_managed_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(BLOCK_SIZE)
    fill(store, 10)
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device, store: 0)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == store.allocator.num_blocks


def test_each_device_holds_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {torch.device("cpu"): 1000, torch.device("meta"): 10_000}
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device, store: free[device])
    store = BlockStore(BLOCK_SIZE)
    store.pool.all.ensure_capacity(4)
    write_blocks(store.pool, 0, {"key": torch.ones(1, 1, 4, 1)}, [1])  # 16 bytes a block
    write_blocks(store.pool, 1, {"key": torch.ones(1, 3, 4, 1, device="meta")}, [1])  # 48
    store.read_budget()
    assert store.affordable_blocks() == 1 + 1000 // 16
    free[torch.device("meta")] = 960
    store.read_budget()
    assert store.affordable_blocks() == 1 + 960 // 48


def test_a_store_tells_others_what_it_may_still_take() -> None:
    store, device = BlockStore(BLOCK_SIZE, 100), torch.device("cpu")
    assert store.bytes_to_come(device) == 0  # not known yet
    with fill(store, 3 * BLOCK_SIZE):
        assert store.bytes_to_come(device) == (100 - 4) * store.pool.all.bytes_per_block  # with the null block
        assert store.bytes_to_come(torch.device("meta")) == 0


def test_of_two_stores_in_a_process_one_leaves_what_the_other_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "_stores", WeakSet())
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 1000 * 16)
    most = []
    stores = [BlockStore(BLOCK_SIZE) for _ in range(3)]
    for store in stores:
        with fill(store, BLOCK_SIZE):
            store.read_budget()
            store.settle_budget()
            most.append(store.max_num_blocks)
    assert most == [501, 1 + (1000 - 499) // 2, 1 + 1000 // 3 // 2]


# Another dtype


@pytest.mark.parametrize("has_budget", [True, False])
def test_a_wider_dtype_leaves_fewer_blocks_of_a_budget_in_bytes_and_as_many_as_were_given(has_budget: bool) -> None:
    store = BlockStore(BLOCK_SIZE, 200, has_budget=has_budget, dtype=torch.bfloat16)
    table = fill(store, 10)
    for narrow in (torch.bfloat16, torch.float16):
        assert store.follow_dtype(narrow)
    assert store.follow_dtype(torch.float32) is not has_budget  # somebody holds blocks
    assert (store.max_num_blocks, read(store, table)) == (200, list(range(10)))
    table.free()
    assert store.follow_dtype(torch.float32)
    assert store.max_num_blocks == (100 if has_budget else 200)
    assert store.allocator.num_cached_blocks == (0 if has_budget else 2)
    assert store.follow_dtype(torch.float32)
    assert store.max_num_blocks == (100 if has_budget else 200)


def test_wider_blocks_are_fewer_once_nobody_holds_one() -> None:
    store = BlockStore(BLOCK_SIZE, 200, has_budget=True)
    table = fill(store, 10)
    num_bytes = store.pool.all.bytes_per_block
    assert not store.begin_wider(2 * num_bytes)
    assert (store.max_num_blocks, read(store, table)) == (200, list(range(10)))
    table.free()
    assert store.begin_wider(2 * num_bytes)
    assert (store.max_num_blocks, store.allocator.num_cached_blocks, store.pool.pool_bytes) == (100, 0, 0)


# On an accelerator, for which "meta" stands: every block is taken when it is asked for


def on_accelerator(num_blocks: int | None = None) -> BlockStore:
    """A store on a device with memory of its own, whose first forward has written a layer."""
    store = BlockStore(BLOCK_SIZE, num_blocks, lambda: torch.device("meta"))
    store.make_room(5)
    write_blocks(store.pool, 0, {"key": torch.ones(1, 1, 20, 1, device="meta")}, range(1, 6))
    return store


@pytest.mark.parametrize("num_blocks", [None, 20_000])
def test_on_an_accelerator_a_short_prompt_takes_few_blocks(num_blocks: int | None) -> None:
    store = on_accelerator(num_blocks)
    assert store.pool.all.capacity == store.allocator.num_blocks == 64
    assert store.pool.pool_bytes == 64 * store.pool.all.bytes_per_block


def test_on_an_accelerator_a_store_grows_by_what_is_missing_and_by_an_eighth_at_least() -> None:
    store, tables = on_accelerator(20_000), []

    def take(num_tokens: int) -> int:
        table = BlockTable(store.allocator, ROOT)
        store.make_room(table.num_new_blocks_for_append(num_tokens))
        table.append_tokens(range(num_tokens))
        tables.append(table)
        assert store.pool.all.capacity == store.allocator.num_blocks
        return store.pool.all.capacity

    assert take(62 * BLOCK_SIZE) == 64
    assert take(3 * BLOCK_SIZE) == 64 + 8  # an eighth; 2 are missing
    assert take(57 * BLOCK_SIZE) == 72 + 51  # missing
    assert take(1 * BLOCK_SIZE) == 123 + 123 // 8
    assert store.allocator.num_evictions == 0


class NoMemory:
    """No memory for a larger pool from here on, as long as it is set."""

    def __init__(self, patch: pytest.MonkeyPatch, store: BlockStore) -> None:
        self.is_set, self._grow = True, store.pool.all.ensure_capacity
        patch.setattr(store.pool.all, "ensure_capacity", self)

    def __call__(self, num_blocks: int) -> None:
        if self.is_set and num_blocks > 64:
            raise torch.OutOfMemoryError("on purpose")
        self._grow(num_blocks)


def test_where_memory_runs_out_what_is_managed_is_the_most_there_is_until_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = BlockStore(BLOCK_SIZE, 1000, lambda: torch.device("meta"))
    memory = NoMemory(monkeypatch, store)
    fill(store, 50 * BLOCK_SIZE).free()
    assert (store.max_num_blocks, store.num_obtainable_blocks()) == (1000, 999)
    with fill(store, 40 * BLOCK_SIZE, first=1000) as table:  # evicts
        assert (store.max_num_blocks, store.ran_out_of_memory) == (64, True)
        assert (store.allocator.num_blocks, store.allocator.num_evictions) == (64, 27)
        assert store.num_obtainable_blocks() == 63 - 40
        assert read(store, table)[:3] == [1000, 1001, 1002]
        with pytest.raises(OutOfBlocksError, match="need 24 blocks: 0 free \\+ 23 cached of 63"):
            fill(store, 24 * BLOCK_SIZE, first=5000)
    store.allocator.check()
    memory.is_set = False
    store.reset_prefix_cache()
    assert (store.max_num_blocks, store.ran_out_of_memory) == (1000, False)
    with fill(store, 100 * BLOCK_SIZE) as table:
        assert read(store, table) == list(range(100 * BLOCK_SIZE))


def test_a_budget_is_settled_also_where_memory_has_run_out_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(BLOCK_SIZE)
    fill(store, 10).free()
    store.stop_growing()
    assert store.max_num_blocks == 64
    monkeypatch.setattr(block_store, "default_budget_bytes", lambda device, store: 1000 * 16)
    store.read_budget()
    store.settle_budget()
    assert store.max_num_blocks == 64
    store.reset_prefix_cache()
    assert store.max_num_blocks == 1001


def test_a_pool_makes_way_for_a_model_where_nobody_holds_a_block_and_is_smaller_from_then_on() -> None:
    store = BlockStore(BLOCK_SIZE, 1000)
    table = fill(store, 100 * BLOCK_SIZE)
    managed = store.allocator.num_blocks
    store.make_way()
    assert (store.max_num_blocks, store.ran_out_of_memory) == (managed, True)
    assert read(store, table) == list(range(100 * BLOCK_SIZE))  # somebody holds it
    table.free()
    store.make_way()
    assert (store.pool.pool_bytes, store.allocator.num_blocks) == (0, 64)
    assert (store.max_num_blocks, store.ran_out_of_memory) == (managed - managed // 4, True)
    store.make_way()  # there is no more to give
    assert store.allocator.num_blocks == store.max_num_blocks == 64


def test_an_accelerator_that_tells_that_it_has_too_little_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    store = on_accelerator(1000)
    asked = []
    monkeypatch.setattr(block_store, "lacks_room", lambda needed: asked.append(needed) or True)
    store.make_room(100)
    assert asked == [{torch.device("meta"): (101 - 64 + 64) * store.pool.all.bytes_per_block}]
    assert (store.pool.all.capacity, store.max_num_blocks) == (64, 64)


# Copies, reset


def test_copies_on_write_are_made_before_the_next_write_and_once() -> None:
    store = BlockStore(BLOCK_SIZE, 11)
    table = fill(store, 6)
    forked = table.fork()
    forked.append_tokens([7])
    store.make_copies()
    assert store.allocator.pending_copies == ()
    assert read(store, forked)[:6] == read(store, table) == [0, 1, 2, 3, 4, 5]
    assert forked.block_ids[1] != table.block_ids[1]


def test_a_reset_forgets_every_block_and_gives_the_memory_back() -> None:
    store = BlockStore(BLOCK_SIZE, 3000)
    for i in range(10):
        fill(store, 100, first=1000 * i).free()
    store.reset_prefix_cache()
    assert (store.allocator.num_cached_blocks, store.pool.pool_bytes, store.num_free_blocks) == (0, 0, 2999)
    table = fill(store, 10)
    assert read(store, table) == list(range(10))
    store.allocator.check()
