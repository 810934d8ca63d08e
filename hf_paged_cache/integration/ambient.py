"""Which cache a `generate` runs on that brings none: the one of the innermost `with cache:` block of its model.

Owns the scopes that are open. A scope is seen in the context that opened it, a thread's or an asyncio task's, and in copies
of that context (tasks, `asyncio.to_thread`); one for all threads, also where no other is. Caches and models are held weakly.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import ref

from torch import nn

from ..errors import CacheBusyError
from ..locks import new_lock


class AmbientScope:
    """One `with cache:` block, or one of `in_all_threads`. Ended, it is over in every context that still lists it."""

    __slots__ = ("_cache", "_model", "in_all_threads", "is_open")

    def __init__(self, model: nn.Module, cache: Any, *, in_all_threads: bool = False) -> None:
        self._model, self._cache = ref(model), ref(cache)
        self.in_all_threads = in_all_threads
        self.is_open = True

    @property
    def cache(self) -> Any:
        """The cache that it gives; None: it was left, or nobody holds its cache any more."""
        return self._cache() if self.is_open else None

    def is_of(self, model: nn.Module | None) -> bool:
        """Whether it is for calls of this model."""
        return self._model() is model

    def stands_in_the_way_of(self, other: AmbientScope) -> bool:
        """Whether this one, too, is for all threads of the model, and of another cache."""
        is_rival = self.in_all_threads and other.in_all_threads and self.is_of(other._model())
        return is_rival and self.cache is not other.cache


_opening = new_lock()  # held to replace `_open`; a look at it needs no lock
_open: tuple[AmbientScope, ...] = ()  # of all contexts
_here: ContextVar[tuple[AmbientScope, ...]] = ContextVar("hf_paged_cache_scopes", default=())  # innermost last


def ambient_cache(model: nn.Module) -> Any:
    """The cache for a `generate` that is called here and brings none; None: there is none."""
    for scope in (*reversed(_here.get()), *(scope for scope in _open if scope.in_all_threads)):
        if scope.is_of(model) and (cache := scope.cache) is not None:
            return cache
    return None


def open_scope(scope: AmbientScope) -> None:
    """From here on, calls of `generate` that bring no cache run on this one.

    Raises:
        CacheBusyError: another cache is the model's in all threads; nothing has changed.
    """
    global _open
    with _opening:
        others = _of_those_open(_open)
        if any(other.stands_in_the_way_of(scope) for other in others):
            raise CacheBusyError(
                "another cache is this model's in all threads; leave its `with cache.in_all_threads():` block first, or "
                "use `with cache:`, which is for this thread"
            )
        _open = (*others, scope)
    _here.set((*_of_those_open(_here.get()), scope))


def close_scope(scope: AmbientScope) -> None:
    """No longer, in any context; scopes may end in any order, in any thread."""
    global _open
    scope.is_open = False  # first: however the rest is interrupted, the scope is over
    with _opening:
        _open = _of_those_open(_open)
    _here.set(_of_those_open(_here.get()))


def _of_those_open(scopes: tuple[AmbientScope, ...]) -> tuple[AmbientScope, ...]:
    return tuple(scope for scope in scopes if scope.cache is not None)


def scope_to_close(cache: Any) -> AmbientScope | None:
    """The scope of a `with cache:` that ends here; None: it is over.

    That is the innermost one of this context; a generator may be closed in another context than it was begun in, so else the
    last one opened.
    """
    scopes = [scope for scope in _open if scope.cache is cache and not scope.in_all_threads]
    here = _here.get()
    return max(scopes, key=lambda scope: (scope in here, scopes.index(scope)), default=None)
