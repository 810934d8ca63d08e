"""Locks come through a fork: the child finds each of them free, whoever held it."""

from __future__ import annotations

import os
import threading

import pytest

from hf_paged_cache import locks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_finds_a_lock_free_that_a_thread_of_its_parent_holds() -> None:
    lock, is_held, is_forked = locks.new_lock(), threading.Event(), threading.Event()

    def hold_until_a_fork_waits() -> None:
        with lock:
            is_held.set()
            while not is_forked.is_set() and locks._registering.acquire(blocking=False):
                locks._registering.release()

    thread = threading.Thread(target=hold_until_a_fork_waits)
    thread.start()
    is_held.wait()
    child = os.fork()
    if not child:
        os._exit(not lock.acquire(blocking=False))
    is_forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
