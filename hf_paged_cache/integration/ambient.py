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
    """One `with cache:` block, or one of `in_all_threads`. Ended, it is over in every context that still lists it.

    Args:
        opener: id of the frame of the `with` statement, which lives until the block is left.
    """

    __slots__ = ("_cache", "_model", "in_all_threads", "is_open", "opener")

    def __init__(self, model: nn.Module, cache: Any, *, opener: int = 0, in_all_threads: bool = False) -> None:
        self._model, self._cache = ref(model), ref(cache)
        self.opener = opener
        self.in_all_threads = in_all_threads
        self.is_open = True

    def cache_of(self, model: nn.Module) -> Any:
        """The cache, if the scope is open and is this model's; else None."""
        return self._cache() if self.is_open and self._model() is model else None

    def is_of(self, cache: Any) -> bool:
        """Whether it gives this cache."""
        return self.is_open and self._cache() is cache

    def gives_another_cache(self, other: AmbientScope) -> bool:
        """Whether this one, too, is for all threads of the model, and of another cache."""
        return self.in_all_threads and self._model() is other._model() and self._cache() is not other._cache()

    def is_over(self) -> bool:
        """Whether it was left, or nobody holds its cache any more."""
        return not self.is_open or self._cache() is None


_opening = new_lock()  # held to replace `_open`; a look at it needs no lock
_open: tuple[AmbientScope, ...] = ()  # of all contexts
_here: ContextVar[tuple[AmbientScope, ...]] = ContextVar("hf_paged_cache_scopes", default=())  # innermost last


def ambient_cache(model: nn.Module) -> Any:
    """The cache for a `generate` that is called here and brings none; None: there is none."""
    for scope in reversed(_here.get()):
        if (cache := scope.cache_of(model)) is not None:
            return cache
    for scope in _open:
        if scope.in_all_threads and (cache := scope.cache_of(model)) is not None:
            return cache
    return None


def open_scope(scope: AmbientScope) -> None:
    """From here on, calls of `generate` that bring no cache run on this one.

    Raises:
        CacheBusyError: another cache is the model's in all threads; nothing has changed.
    """
    global _open
    with _opening:
        others = tuple(other for other in _open if not other.is_over())
        if scope.in_all_threads and any(other.gives_another_cache(scope) for other in others):
            raise CacheBusyError(
                "another cache is this model's in all threads; leave its `with cache.in_all_threads():` block first, or "
                "use `with cache:`, which is for this thread"
            )
        _open = (*others, scope)
    _here.set((*(other for other in _here.get() if not other.is_over()), scope))


def close_scope(scope: AmbientScope) -> None:
    """No longer, in any context; scopes may end in any order, in any thread."""
    global _open
    scope.is_open = False  # first: however the rest is interrupted, the scope is over
    with _opening:
        _open = tuple(other for other in _open if not other.is_over())
    _here.set(tuple(other for other in _here.get() if not other.is_over()))


def scope_to_close(cache: Any, opener: int) -> AmbientScope | None:
    """The scope that a `with cache:` in frame `opener` opened; None: it is over.

    A generator may be closed in another context than it was begun in. Of an `ExitStack`, whose frame is none, it is the
    innermost scope of the context, or else the last one opened.
    """
    scopes = [scope for scope in _open if scope.is_of(cache) and not scope.in_all_threads]
    here = _here.get()
    return max(scopes, key=lambda scope: (scope.opener == opener, scope in here, scopes.index(scope)), default=None)
