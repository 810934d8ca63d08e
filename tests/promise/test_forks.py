"""A short run of `tests.forks`; the long one is a command."""

from __future__ import annotations

import os

import pytest

from ..forks import failed, forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.mark.usefixtures("one_thread")
def test_a_child_that_is_forked_while_threads_generate_is_right_or_refuses_clearly() -> None:
    outcomes = forks(16, seconds=60, seed=0)
    assert not failed(outcomes), outcomes
