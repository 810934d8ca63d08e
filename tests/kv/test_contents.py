"""Rows of bytes: what a block holds goes out and comes back to the bit, whatever layers it has."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache.blocks import PrefixCachingBlockAllocator, WindowBlocks
from hf_paged_cache.blocks.sight import Window
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.kv.contents import (
    parts_of_pool,
    parts_of_states,
    rows_of_blocks,
    rows_of_states,
    runs,
    states_of_row,
    to_device,
    write_blocks,
)
from hf_paged_cache.kv.states import StateKey


def filled(pool: BlockPool, num_blocks: int) -> BlockPool:
    """A pool whose layers differ in heads, head sizes and dtypes."""
    pool.all.ensure_capacity(num_blocks)
    for layer_idx, (heads, size, dtype) in enumerate(
        ((2, 8, torch.float32), (1, 3, torch.bfloat16), (3, 5, torch.float16))
    ):
        new = torch.randn(num_blocks, heads, pool.block_size, size).to(dtype)
        for name, states in (("key", new), ("value", new[..., :2] * 2)):
            tensor = pool.tensor_for(layer_idx, name, states)
            tensor.copy_(states[: len(tensor)])
    return pool


def test_blocks_come_back_as_they_went() -> None:
    pool = filled(BlockPool(block_size=4), 7)
    (part,) = parts_of_pool(pool)
    before = {key: tensor.clone() for key, tensor in pool.all.named().items()}
    rows = rows_of_blocks(pool, part, [5, 2, 6])
    assert rows.shape == (3, part.num_bytes)
    for tensor in pool.all.named().values():
        tensor.zero_()
    write_blocks(pool, part, [1, 2, 4], to_device(part, [rows[:1], rows[1:]]))
    for key, tensor in pool.all.named().items():
        assert tensor[[1, 2, 4]].equal(before[key][[5, 2, 6]])
        assert not tensor[[0, 3, 5, 6]].any()


def test_blocks_of_windows_are_a_part_of_their_own() -> None:
    allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=4)
    group = WindowBlocks(allocator, Window(5), num_blocks=4)
    pool = BlockPool(4, lambda: torch.device("cpu"), {1: group.sight}, [group])
    pool.groups[5].ensure_capacity(4)
    group.places.update({2: 3, 3: 1})
    filled(pool, 8)
    of_blocks, of_window = parts_of_pool(pool)
    assert (of_blocks.kind, of_window.kind, of_window.window) == ("blocks", "window", 5)
    rows = rows_of_blocks(pool, of_window, [3])
    before = pool.layer(1)["key"][3].clone()
    write_blocks(pool, of_window, [1], rows)
    assert pool.layer(1)["key"][1].equal(before)


def test_states_come_back_as_they_went() -> None:
    states = {
        StateKey(0, "conv", 0): torch.randn(1, 6, 3),
        StateKey(2, "recurrent", 0): torch.randn(1, 2, 5, 5).to(torch.bfloat16),
    }
    (part,) = parts_of_states(states)
    rows = rows_of_states(part, [states, {key: held * 2 for key, held in states.items()}])
    for number, factor in ((0, 1), (1, 2)):
        found = states_of_row([(part, rows[number])])
        assert found.keys() == states.keys()
        assert all(found[key].equal(states[key] * factor) for key in states)


def test_a_layout_changes_with_the_tensors() -> None:
    pool = BlockPool(block_size=4)
    before = pool.num_layouts
    filled(pool, 3)
    assert pool.num_layouts != before
    now = pool.num_layouts
    pool.all.ensure_capacity(9)
    assert pool.num_layouts == now


@pytest.mark.parametrize(
    ("numbers", "found"),
    [([], []), ([4], [(0, 1)]), ([1, 2, 3, 7, 9, 10], [(0, 3), (3, 1), (4, 2)]), ([3, 2], [(0, 1), (1, 1)])],
    ids=str,
)
def test_runs_are_the_stretches_of_following_numbers(numbers: list[int], found: list[tuple[int, int]]) -> None:
    assert list(runs(numbers)) == found
