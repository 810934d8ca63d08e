"""Owns the locks of this package, and brings them through a fork. It does not know what a lock guards.

In a forked child a lock that another thread held would be held for ever, and what it guards be half changed. So all
locks are taken before a fork, in the order in which they were made, and given back after it. A thread that holds one
waits only for locks that were made after it. No lock is held while a forward runs or a user's code is called.
"""

import contextlib
import os
import threading
from itertools import count
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet


class Survivor(Protocol):
    """`Survivor` is told, in a forked child and while all locks are held, which threads of the parent are gone."""

    def lose_threads(self, idents: frozenset[int]) -> None: ...


_registering = threading.RLock()
_locks: WeakKeyDictionary[threading.RLock, int] = WeakKeyDictionary()  # lock -> number of locks made before it
_numbers = count()
_survivors: WeakSet[Survivor] = WeakSet()
_taken: list[threading.RLock] = []  # locks taken for the fork that is under way
_others: set[int] = set()  # threads that lived when the fork began, without the one that forks


def new_lock(survivor: Survivor | None = None) -> threading.RLock:
    """Make a lock that is free in a forked child; `survivor` is told of the fork, and not kept alive."""
    lock = threading.RLock()
    with _registering:
        _locks[lock] = next(_numbers)
        if survivor is not None:
            _survivors.add(survivor)
    return lock


def _before_fork() -> None:
    _registering.acquire()
    for lock, _ in sorted(_locks.items(), key=lambda item: item[1]):
        _taken.append(lock)
        lock.acquire()
    _others.update(thread.ident or 0 for thread in threading.enumerate())
    _others.discard(threading.get_ident())


def _after_fork() -> None:
    _others.clear()
    while _taken:
        with contextlib.suppress(RuntimeError):  # the fork was interrupted before the lock was taken
            _taken.pop().release()
    _registering.release()


def _after_fork_in_child() -> None:
    try:
        for survivor in list(_survivors):
            survivor.lose_threads(frozenset(_others))
    finally:
        _after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
