"""Where snapshots may be taken, and how many there can be."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, resumable, root_hash
from hf_paged_cache.kv.states import StateKey
from hf_paged_cache.store.state_snapshots import StateRules, StateSnapshots

KEY = StateKey(0, "conv", 0)


@pytest.fixture
def allocator() -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(num_blocks=64, block_size=4)


def test_they_take_as_many_bytes_as_the_most_blocks(allocator: PrefixCachingBlockAllocator) -> None:
    snapshots = StateSnapshots(allocator, StateRules(num_bytes=1000), bytes_per_block=64)
    snapshots.limit(None)
    assert snapshots.kept.most > 0, "before the most blocks are known"
    snapshots.limit(100)
    assert snapshots.kept.most == 6
    cpu = torch.device("cpu")
    assert snapshots.with_snapshots({cpu: 64}, None) == {cpu: 128}


def test_there_may_be_8_where_a_number_of_blocks_was_given(allocator: PrefixCachingBlockAllocator) -> None:
    snapshots = StateSnapshots(allocator, StateRules(num_bytes=1000), bytes_per_block=64, has_least=True)
    snapshots.limit(100)
    assert snapshots.kept.most == 8


def test_where_blocks_take_no_memory_snapshots_take_all(allocator: PrefixCachingBlockAllocator) -> None:
    snapshots = StateSnapshots(allocator, StateRules(num_bytes=1000), bytes_per_block=0)
    snapshots.limit(80)
    assert snapshots.kept.most == 10
    device = torch.device("cpu")
    assert snapshots.with_snapshots({}, device) == {device: 125}


@pytest.mark.parametrize(("chunk", "align"), [(1, 4), (64, 64), (6, 12), (2, 4)])
def test_places_are_multiples_of_blocks_and_of_what_kernels_compute_in(
    chunk: int, align: int, allocator: PrefixCachingBlockAllocator
) -> None:
    snapshots = StateSnapshots(allocator, StateRules(num_bytes=1000, chunk=chunk), bytes_per_block=64)
    assert snapshots.align == align
    assert snapshots.grid % align == 0
    assert snapshots.grid >= 512


def test_the_grid_is_as_wide_as_a_snapshot_costs(allocator: PrefixCachingBlockAllocator) -> None:
    assert StateSnapshots(allocator, StateRules(num_bytes=64_000, chunk=64), bytes_per_block=64).grid == 4032


def test_a_copy_is_kept_where_a_block_that_can_be_hit_ends(allocator: PrefixCachingBlockAllocator) -> None:
    snapshots = StateSnapshots(allocator, StateRules(num_bytes=8), bytes_per_block=64)
    table = BlockTable(allocator, root_hash(b"model"))
    table.allocate(range(11))
    states = {KEY: torch.ones(1, 2)}
    assert not snapshots.keep(table.block_ids, 8, states), "not committed"
    table.commit_full_blocks(11)
    assert not snapshots.keep(table.block_ids, 7, states), "no block ends there"
    assert not snapshots.keep(table.block_ids, 12, states), "that block is not full"
    assert not snapshots.keep(table.block_ids, 0, states)
    assert snapshots.keep(table.block_ids, 8, states)
    assert not snapshots.keep(table.block_ids, 8, states), "there is one"
    states[KEY].zero_()
    assert snapshots.use(table.block_ids, 8)[KEY].tolist() == [[1, 1]]
    assert [resumable((snapshots.kept,), table.block_ids, number) for number in (11, 8, 7, 0)] == [8, 8, 0, 0]
    assert [snapshots.has(table.block_ids, number) for number in (4, 6, 8, 12)] == [False, False, True, False]
    snapshots.drop(table.block_ids, 8)
    assert len(snapshots.kept) == 0


def test_a_store_without_states_has_none(allocator: PrefixCachingBlockAllocator) -> None:
    snapshots = StateSnapshots(allocator, None, bytes_per_block=64)
    assert not snapshots
    snapshots.limit(10)
    assert len(snapshots.kept) == snapshots.kept.num_of(b"a") == 0
