"""A short run of `random_windows`; the long one is a command."""

from __future__ import annotations

import pytest

from .random_windows import WORLDS, World, run_operations


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_tables_of_windows_agree_with_a_naive_model(world: World) -> None:
    drivers = [
        run_operations(world._replace(is_checked=is_checked), 8_500, f"{world.windows} {is_checked}")
        for is_checked in (True, False)
    ]
    for name in ("refused", "hits", "limited", "copies", "replaced"):  # all of it was seen
        assert sum(getattr(driver, f"num_{name}") for driver in drivers) or (name, world.block_size) == ("copies", 1), (
            name
        )
