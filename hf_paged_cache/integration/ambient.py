"""Which cache a `generate` runs on that brings none: the one of the innermost `with cache:` block of its model.

Owns the blocks that are open. A block is seen in the context that opened it, a thread's or an asyncio task's, and in copies
of that context (tasks, `asyncio.to_thread`); one opened for all threads, also where no other is. Caches and models are held
weakly, by the `with` statement alone.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import ref

from torch import nn

from ..errors import CacheBusyError
from ..locks import new_lock


class AmbientBlock:
    """One open `with cache:` block, or one of `in_all_threads`. Ended, it is over in every context that still lists it."""

    __slots__ = ("_cache", "_model", "in_all_threads", "is_open", "opener")

    def __init__(self, model: nn.Module, cache: Any, opener: int, *, in_all_threads: bool) -> None:
        self._model, self._cache = ref(model), ref(cache)
        self.opener = opener  # id of the frame of the `with` statement, which lives until the block is left
        self.in_all_threads = in_all_threads
        self.is_open = True

    def cache_of(self, model: nn.Module) -> Any:
        """The cache, if the block is open and is this model's; else None."""
        return self._cache() if self.is_open and self._model() is model else None

    def is_of(self, cache: Any) -> bool:
        """Whether it gives this cache."""
        return self.is_open and self._cache() is cache

    def is_over(self) -> bool:
        """Whether it was left, or nobody holds its cache any more."""
        return not self.is_open or self._cache() is None


_opening = new_lock()  # held to replace `_open`; a look at it needs no lock
_open: tuple[AmbientBlock, ...] = ()  # of all contexts
_here: ContextVar[tuple[AmbientBlock, ...]] = ContextVar("hf_paged_cache_blocks", default=())  # innermost last


def ambient_cache(model: nn.Module) -> Any:
    """The cache for a `generate` that is called here and brings none; None: there is none."""
    for block in reversed(_here.get()):
        if (cache := block.cache_of(model)) is not None:
            return cache
    for block in _open:
        if block.in_all_threads and (cache := block.cache_of(model)) is not None:
            return cache
    return None


def open_block(model: nn.Module, cache: Any, *, opener: int = 0, in_all_threads: bool = False) -> AmbientBlock:
    """From here on, calls of `generate` that bring no cache run on this one.

    Raises:
        CacheBusyError: another cache is the model's in all threads; nothing has changed.
    """
    global _open
    block = AmbientBlock(model, cache, opener, in_all_threads=in_all_threads)
    with _opening:
        others = tuple(other for other in _open if not other.is_over())
        caches = [other.cache_of(model) for other in others if other.in_all_threads]
        if in_all_threads and any(other is not None and other is not cache for other in caches):
            raise CacheBusyError(
                "another cache is this model's in all threads; leave its `with cache.in_all_threads():` block first, or "
                "use `with cache:`, which is for this thread"
            )
        _open = (*others, block)
    _here.set((*(other for other in _here.get() if not other.is_over()), block))
    return block


def close_block(block: AmbientBlock) -> None:
    """No longer, in any context; blocks may end in any order, in any thread."""
    global _open
    block.is_open = False  # first: however the rest is interrupted, the block is over
    with _opening:
        _open = tuple(other for other in _open if not other.is_over())
    _here.set(tuple(other for other in _here.get() if not other.is_over()))


def block_to_close(cache: Any, opener: int) -> AmbientBlock | None:
    """The block that a `with cache:` in frame `opener` opened; None: it is over.

    A generator may be closed in another context than it was begun in. Of an `ExitStack`, whose frame is none, it is the
    innermost block of the context, or else the last one opened.
    """
    blocks = [block for block in _open if block.is_of(cache) and not block.in_all_threads]
    here = _here.get()
    return max(blocks, key=lambda block: (block.opener == opener, block in here, blocks.index(block)), default=None)
