"""A short run of `random_snapshots`; the long one is a command."""

from __future__ import annotations

import pytest

from .random_snapshots import WORLDS, World, run_operations


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_snapshots_agree_with_a_naive_model(world: World) -> None:
    driver = run_operations(world, 2_500, "short")
    if world.settles:  # all of it was seen
        assert driver.num_hits
        assert driver.num_gone
        assert driver.num_evicted or world.most > 10
