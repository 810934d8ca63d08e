"""A short run of `random_tiers`; the long one is a command."""

from __future__ import annotations

import pytest

from .random_tiers import WORLDS, World, run_operations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_store_with_tiers_agrees_with_a_naive_model(world: World) -> None:
    driver = run_operations(world, 450, "short")
    assert driver.num_hits
    assert driver.num_from, "nothing came up"
    assert driver.num_interrupted
