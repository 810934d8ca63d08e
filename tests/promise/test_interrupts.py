"""A short run of `tests.interrupts`; the long one is a command."""

from __future__ import annotations

import pytest

from ..interrupts import interrupts


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finalizer
def test_after_each_of_many_interrupts_the_same_cache_makes_the_next_call_right() -> None:
    places = interrupts(60, seed=0)
    assert len(places) > 10
