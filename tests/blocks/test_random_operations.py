"""A run of `random_operations` in each world, with and without a check after each operation."""

from __future__ import annotations

import pytest

from .random_operations import WORLDS, World, run_operations


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_allocator_tables_and_groups_agree_with_a_naive_model(world: World) -> None:
    counts = run_operations(world, 1_200, "short").counts
    counts += run_operations(world._replace(is_checked=False), 1_200, "short").counts
    wanted = ["refused"] * (world.num_blocks < 33) + ["limited"] * bool(world.windows)  # all of it was seen
    wanted += ["copies"] * (world.block_size > 1) + ["hits"] + ["replaced"] * (not world.windows)
    assert [name for name in wanted if not counts[name]] == [] or world.num_blocks == 2
