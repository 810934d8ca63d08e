"""The window blocks of a store: who may have them, and how many there are."""

from __future__ import annotations

import random

import pytest

from hf_paged_cache.store.block_store import BlockStore

from .random_window_calls import Calls, run_calls

SHAPES = {
    "few window blocks": {
        "block_size": 2,
        "num_blocks": 300,
        "window_of": {1: 5, 2: 16},
        "layers": range(3),
        "window_share": 0.1,
    },
    "two windows": {
        "block_size": 4,
        "num_blocks": 400,
        "window_of": {0: 3, 1: 9, 2: 9},
        "layers": range(4),
        "window_share": 0.08,
    },
    "as many": {"block_size": 2, "num_blocks": 60, "window_of": {0: 7}, "layers": range(2), "window_share": 1.0},
    "all layers": {
        "block_size": 2,
        "num_blocks": 30,
        "window_of": {0: 7, 1: 2},
        "layers": range(2),
        "window_share": 0.5,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_that_was_admitted_gets_its_window_blocks(name: str) -> None:
    calls = run_calls(Calls(BlockStore(**SHAPES[name]), random.Random(name)), 2_500)
    assert calls.num_admitted > 50
    assert calls.num_refused > 20
    assert calls.num_plain > 20
