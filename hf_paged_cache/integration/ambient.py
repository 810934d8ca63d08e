"""Finds the cache for a `generate` that brings none: the cache of the innermost `with cache:` block of the model.

A scope is seen in the context that opened it, a thread's or an asyncio task's, and in copies of that context; a scope
for all threads is also seen where no other scope is. Caches are held weakly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import ref

from torch import nn

from ..errors import CacheBusyError
from ..locks import new_lock


class AmbientScope:
    """`AmbientScope` is one `with cache:` block, or one block of `in_all_threads`."""

    def __init__(self, cache: Any, *, in_all_threads: bool = False) -> None:
        self.cache: Callable[[], Any] = ref(cache)  # gives None where nobody holds the cache, or the block was left
        self.in_all_threads = in_all_threads


_opening = new_lock()  # held to replace `_open`; reading `_open` needs no lock
_open: tuple[AmbientScope, ...] = ()  # open scopes of all contexts
_here: ContextVar[tuple[AmbientScope, ...]] = ContextVar("hf_paged_cache_scopes", default=())  # innermost last


def ambient_cache(model: nn.Module) -> Any:
    """Return the cache for a `generate` that is called here and brings none; None: no scope gives one."""
    for scope in (*reversed(_here.get()), *(scope for scope in _open if scope.in_all_threads)):
        if (cache := scope.cache()) is not None and cache.store.model is model:
            return cache
    return None


def open_scope(scope: AmbientScope) -> None:
    """Open a scope. Raises CacheBusyError if another cache has one for all threads of the model."""
    global _open
    cache = scope.cache()
    with _opening:
        _open = _of_those_open(_open)
        caches = [each.cache() for each in _open if each.in_all_threads and scope.in_all_threads]
        if any(each not in (None, cache) and each.store.model is cache.store.model for each in caches):
            raise CacheBusyError(
                "another cache is this model's in all threads; leave its `with cache.in_all_threads():` block first, "
                "or use `with cache:`, which is for this thread"
            )
        _open = (*_open, scope)
    _here.set((*_of_those_open(_here.get()), scope))


def close_scope(scope: AmbientScope) -> None:
    """End a scope in every context. Scopes may end in any order, in any thread."""
    global _open
    scope.cache = lambda: None  # this comes first: in every context, however the rest is interrupted, it is over
    with _opening:
        _open = _of_those_open(_open)
    _here.set(_of_those_open(_here.get()))


def _of_those_open(scopes: tuple[AmbientScope, ...]) -> tuple[AmbientScope, ...]:
    return tuple(scope for scope in scopes if scope.cache() is not None)


def scope_to_close(cache: Any) -> AmbientScope | None:
    """Return the scope of a `with cache:` block that ends here, or None if it is over: the innermost of this context,
    or else the one that was opened last, since a generator may be closed in another context than it was begun in.
    """
    scopes = [scope for scope in _open if scope.cache() is cache and not scope.in_all_threads]
    here = _here.get()
    return max(scopes, key=lambda scope: (scope in here, scopes.index(scope)), default=None)
