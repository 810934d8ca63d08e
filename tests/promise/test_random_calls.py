"""A short run of `random_calls`; the long one is a command."""

from __future__ import annotations

import torch

from ..random_calls import random_calls


def test_random_calls_give_what_a_fresh_cache_gives_and_lose_no_block() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        counts = random_calls(300, seed=0)
    finally:
        torch.set_num_threads(before)
    assert counts["reused tokens"] > 1000
    assert counts["evictions"] > 0
