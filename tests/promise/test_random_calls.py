"""A short run of `random_calls`; the long one is a command."""

from __future__ import annotations

import pytest

from ..random_calls import random_calls


@pytest.mark.usefixtures("one_thread")
def test_random_calls_give_what_a_fresh_cache_gives_and_lose_no_block() -> None:
    counts = random_calls(300, seed=0)
    assert counts["reused tokens"] > 1000
    assert counts["evictions"] > 0
    assert counts["bypassed calls"] > 0
