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
    calls = run_calls(Calls(BlockStore(**SHAPES[name]), random.Random(name)), 1_000)
    assert calls.num_admitted > 20
    assert calls.num_refused > 10
    assert calls.num_plain > 10


@pytest.mark.parametrize("share", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("layers", [range(2), range(3)], ids=["all have a window", "one has none"])
def test_a_budget_in_bytes_is_kept_to(share: float, layers: range) -> None:
    store = BlockStore(2, window_of={0: 16, 1: 3}, layers=layers, window_share=share)
    calls = Calls(store, random.Random(f"{share} {layers}"), budget_bytes=20_000 * len(layers))
    run_calls(calls, 500)
    assert calls.num_admitted > 20
    assert store.is_settled
    assert store.max_num_blocks is not None
    assert store.max_num_blocks > 64  # as the budget says


def test_what_was_admitted_before_the_budget_was_known_is_kept_to() -> None:
    for seed in range(5):
        store = BlockStore(2, window_of={0: 33}, layers=range(2), window_share=0.1)
        calls = Calls(store, random.Random(seed), max_tokens=60)
        for _ in range(4):
            calls.begin()
        admitted = [max(reserved) for reserved in store.windows._reserved.values()]
        calls.budget_bytes = 16
        calls.advance()
        assert store.is_settled
        assert store.windows.groups[0].most < 1 + 2 * sum(admitted) + 64
        calls.budget_bytes = None
        run_calls(calls, 300)
