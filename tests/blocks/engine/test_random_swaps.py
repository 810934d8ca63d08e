"""A short run of `random_swaps`; the long one is a command."""

from __future__ import annotations

import pytest

from .random_swaps import NUM_BLOCKS, run_operations


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_random_swaps_agree_with_naive_models(num_blocks: tuple[int, int]) -> None:
    counts = run_operations(num_blocks, 5_000, str(num_blocks)).counts
    assert min(counts[what] for what in ("OK", "found", "copied", "shared")) > 30
    assert counts["LATER"] or num_blocks == (30, 60)
