"""A short run of `random_operations`; the long one is a command."""

from __future__ import annotations

import pytest

from .random_operations import run_operations


@pytest.mark.parametrize(("num_blocks", "num_operations"), [(9, 60_000), (17, 40_000), (2, 4_000)])
def test_random_operations_agree_with_a_naive_model(num_blocks: int, num_operations: int) -> None:
    driver = run_operations(num_blocks, num_operations, str(num_blocks))
    assert driver.num_refused > 100  # refusals were seen, too
    assert driver.model.evictions > 100 or num_blocks == 2
    assert driver.num_overwritten > 100 or num_blocks == 2  # rings ran round
