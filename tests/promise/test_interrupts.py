"""A short run of `tests.interrupts`; the long one is a command.

And the lines that a random one rarely meets, one by one.
"""

from __future__ import annotations

import contextlib
from types import FrameType
from typing import Any

import pytest

from ..interrupts import interrupts
from ..reference import run
from ..tiny_models import tiny
from .test_interrupted_calls import CALLS, Interrupter, assert_all_accounted_for, prepared

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # an interrupt inside a finalizer
]


def test_after_each_of_many_interrupts_the_same_cache_makes_the_next_call_right() -> None:
    places = interrupts(24, seed=0)
    assert len(places) > 6


class InterrupterIn(Interrupter):
    """Interrupts only in functions of these names."""

    def __init__(self, names: tuple[str, ...], at_line: int = 0) -> None:
        super().__init__(at_line)
        self._names = names

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        return super()._enter_frame(frame, event, arg) if frame.f_code.co_name in self._names else None


def test_wherever_the_end_of_generate_is_interrupted_the_store_can_be_reset() -> None:
    model = tiny("llama")
    with InterrupterIn(("end", "close")) as counter:
        run(model, prepared(), max_new_tokens=2, **CALLS["greedy"])
    assert counter.num_lines > 10
    for at_line in range(1, counter.num_lines + 1):
        cache = prepared()
        with InterrupterIn(("end", "close"), at_line), contextlib.suppress(KeyboardInterrupt):
            run(model, cache, max_new_tokens=2, **CALLS["greedy"])
        cache.store.reset_prefix_cache()
        assert_all_accounted_for(cache)
