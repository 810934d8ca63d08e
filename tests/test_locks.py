"""Locks come through a fork: each is taken before it, so that nobody holds one meanwhile, and given back on both sides."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hf_paged_cache import locks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


class NotedLock:
    """Says what was done with it."""

    def __init__(self) -> None:
        self.deeds: list[str] = []

    def acquire(self) -> None:
        self.deeds.append("taken")

    def release(self) -> None:
        self.deeds.append("given back")

    def _is_owned(self) -> bool:
        return self.deeds[-1:] == ["taken"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_lock_is_taken_before_a_fork_and_given_back_in_parent_and_child() -> None:
    lock: Any = NotedLock()
    locks._locks.add(lock)
    child = os.fork()
    if not child:
        os._exit(lock.deeds != ["taken", "given back"])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.deeds == ["taken", "given back"]
