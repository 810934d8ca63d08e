"""A short run of `random_state_calls`; the long one is a command."""

from __future__ import annotations

import pytest

from ..model.test_support import FROM_5_23
from ..random_state_calls import random_state_calls

pytestmark = FROM_5_23


@pytest.mark.usefixtures("one_thread")
def test_random_calls_of_models_with_states_give_what_a_fresh_cache_gives_and_lose_no_block() -> None:
    counts = random_state_calls(range(10), calls_a_store=20)
    assert counts["reused tokens"] > 1000
    assert counts["evictions"] > 0
    assert counts["plain forwards"] > 0
