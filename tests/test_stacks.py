"""Stacks of other threads are read so that no frame ends meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest

from hf_paged_cache.stacks import current_frames, idents, locals_of


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Each begin and end of the collector, which runs at every tenth object."""
    seen, threshold = list[str](), gc.get_threshold()

    def note(phase: str, _info: Any) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    gc.set_threshold(10)
    yield seen
    gc.set_threshold(*threshold)
    gc.callbacks.remove(note)


class Frame:
    """As a frame: what is asked of it takes memory."""

    def __init__(self, collections: list[str]) -> None:
        self._collections = collections
        self.num_collections = -1  # while it was read

    @property
    def f_locals(self) -> list[Any]:
        before = len(self._collections)
        made: list[Any] = [[] for _ in range(1000)]
        self.num_collections = len(self._collections) - before
        return made


def test_no_collection_ends_a_frame_while_it_is_read(collections: list[str]) -> None:
    """It would run other threads: in Python 3.11 a walk over their stacks crashed."""
    frame: Any = Frame(collections)
    assert len(frame.f_locals) == 1000
    assert frame.num_collections > 0
    assert len(locals_of(frame)) == 1000
    assert frame.num_collections == 0
    assert gc.isenabled()
    gc.disable()
    try:
        locals_of(frame)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_again_where_there_is_no_memory_for_what_is_read() -> None:
    class Unreadable:
        @property
        def f_locals(self) -> Any:
            raise MemoryError

    frame: Any = Unreadable()
    with pytest.raises(MemoryError):
        locals_of(frame)
    assert gc.isenabled()


class Thing:
    """What a variable of a caller holds."""


@pytest.mark.parametrize("ask", [idents, lambda: current_frames().clear()])
def test_who_asks_for_stacks_keeps_no_variables_of_its_callers(ask: Callable[[], Any]) -> None:
    def call() -> ref[Thing]:
        thing = Thing()
        ask()
        return ref(thing)

    assert call()() is None
