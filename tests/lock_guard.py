"""Locks under test: what a store's lock guards is used only while it is held, and no forward runs while it is.

Active for the whole suite (`conftest.py`), for the store of every `PrefixStore`: a method of allocator, pool, pins, leases, tiers or
store, a count of a call, or a write to the store fails with `LockError` where the calling thread does not own that store's lock.
So a `with ...lock:` that is missing fails a test without a second thread; `test_lock_guard.py` takes each away in turn.
Objects of unit tests, which have no `PrefixStore`, and what a test does by itself to a store are not guarded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_paged_cache
from hf_paged_cache.blocks import PrefixCachingBlockAllocator
from hf_paged_cache.integration.calls import Calls
from hf_paged_cache.kv.block_pool import BlockPool, GroupTensors
from hf_paged_cache.prefix_store import PrefixStore
from hf_paged_cache.rows.rows import Rows
from hf_paged_cache.store.block_store import BlockStore
from hf_paged_cache.store.leases import Leases
from hf_paged_cache.store.lower_tiers import LowerTiers
from hf_paged_cache.store.pins import Pins

PACKAGE = f"{Path(hf_paged_cache.__file__).parent}/"
# Folders whose functions ask nobody's leave: who called them must hold the lock.
GUARDED_FOLDERS = tuple(f"{PACKAGE}{folder}/" for folder in ("blocks", "kv", "store"))

# May be used without the lock: class -> name -> why that is right.
EXEMPT: dict[type, dict[str, str]] = {
    PrefixCachingBlockAllocator: {},
    BlockPool: {
        "layer": "one look into dicts that only grow, or are replaced as a whole",
        "release": "looks at streams, of which there are only ever more; the tensors are the caller's",
    },
    GroupTensors: {},
    Pins: {},
    Leases: {},
    LowerTiers: {
        "load": "takes the lock, but for the time in which it reads files",
    },
    BlockStore: {
        "bytes_to_come": "takes the lock",
        "bytes_left_of": "takes the lock",
        "windows_now": "takes the lock",
        "is_settled": "one look at what is written once",
        "may_write": "one look at what is replaced as a whole",
        "measure_for": "takes the lock, but for the forward that it runs",
        "read_budget": "takes the lock, but for the time in which it reads files",
    },
}
# Read and written only under the lock: what is looked through, or counted up.
GUARDED_ATTRIBUTES = ("currents", "sharing", "_num_resets")


class LockError(AssertionError):
    """What a lock guards was used without it, or a model or a user was called while it was held."""


def guard(store: BlockStore) -> None:
    """From here on, this store and the calls on it are guarded."""
    with store.lock:
        parts = (store.allocator, store.pool, *store.pool.groups.values(), store.pins, store.leases, store.tiers)
        for part in (store, *parts):
            vars(part)["_lock_under_test"] = store.lock


def install() -> None:
    """Guard every store of a `PrefixStore`, from its beginning; again: nothing."""
    if "_is_guarded" in vars(PrefixStore):
        return
    PrefixStore._is_guarded = True  # type: ignore[attr-defined]
    for cls in EXEMPT:
        _guard_members(cls)
    _guard_writes(BlockStore)
    for name in GUARDED_ATTRIBUTES:
        _guard_attribute(BlockStore, name)
    # A model runs between these, or files are read, and users' callbacks, or what they call writes to a log.
    for cls, names in [
        (Rows, ("before_forward", "after_forward")),
        (Calls, ("begin", "close")),
        (LowerTiers, ("load",)),
        (BlockStore, ("measure_for", "read_budget")),
    ]:
        for name in names:
            _wrap(cls, name, _require_free, at_end=True)
    _guard_new(PrefixStore, lambda made: guard(made.blocks))
    _guard_new(Calls, _guard_counters)
    _wrap(Calls, "count_with", lambda calls, what: _guard_counters(calls), at_end=True)


def lock_of(held: Any) -> Any:
    """The lock of the guarded store that an object belongs to; None: it is not guarded."""
    attributes = getattr(held, "__dict__", {})
    lock = attributes.get("_lock_under_test")
    of = attributes.get("calls") or attributes.get("store")  # of rows, and of the calls that run them
    return lock if lock is not None or of is None else lock_of(of)


def _require_owned(held: Any, what: str) -> None:
    lock = lock_of(held)
    if lock is not None and not lock._is_owned() and _is_ours():
        raise LockError(f"{what} without the store's lock")


def _require_free(held: Any, what: str) -> None:
    lock = lock_of(held)
    if lock is not None and lock._is_owned():
        raise LockError(f"the store's lock is held at {what}, where a model or a user is called")


def _is_ours() -> bool:
    """Whether the package, and not a test, uses what is guarded: the first frame above those that ask nobody's leave."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*GUARDED_FOLDERS, __file__)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _wrap(cls: type, name: str, check: Callable[[Any, str], None], *, at_end: bool = False) -> None:
    setattr(cls, name, _checked(vars(cls)[name], f"{cls.__name__}.{name}", check, at_end=at_end))


def _checked(function: Any, what: str, check: Callable[[Any, str], None], *, at_end: bool = False) -> Any:
    @functools.wraps(function)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, what)
        result = function(self, *args, **kwargs)
        if at_end:
            check(self, f"the end of {what}")
        return result

    return checked


def _guard_members(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        what = f"{cls.__name__}.{name}"
        if name.startswith("__") or name in EXEMPT[cls]:
            continue
        if isinstance(member, property):
            setattr(cls, name, property(_checked(member.fget, what, _require_owned)))
        elif callable(member) and not isinstance(member, type):
            setattr(cls, name, _checked(member, what, _require_owned))


def _guard_writes(cls: type) -> None:
    def write(self: Any, name: str, value: Any) -> None:
        if sys._getframe(1).f_code.co_name != "__init__":
            _require_owned(self, f"{cls.__name__}.{name} is written")
        object.__setattr__(self, name, value)

    cls.__setattr__ = write  # type: ignore[method-assign, assignment]


def _guard_attribute(cls: type, name: str) -> None:
    def read(self: Any) -> Any:
        _require_owned(self, f"{cls.__name__}.{name} is read")
        return vars(self)[name]

    def write(self: Any, value: Any) -> None:
        vars(self)[name] = value

    setattr(cls, name, property(read, write))


def _guard_new(cls: type, begin: Callable[[Any], None]) -> None:
    init: Any = vars(cls)["__init__"]

    @functools.wraps(init)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        begin(self)

    cls.__init__ = guarded  # type: ignore[misc]


def _guard_counters(calls: Calls) -> None:
    lock = lock_of(calls)
    if lock is not None:
        vars(calls.counters)["_lock_under_test"] = lock
