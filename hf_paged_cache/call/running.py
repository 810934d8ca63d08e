"""Who runs a call now: open brackets of `generate`, and forwards on the stack of some thread.

Both follow from what an interrupt cannot leave half done: whether a frame is there.
"""

import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple
from weakref import ref

from ..stacks import caller_of, current_frames


class Bracket:
    """One running `generate`. A variable of its frame alone holds it; all others get a weak reference.

    The frame's `finally` begins with `del bracket`. The interpreter takes signals at calls and jumps, and there is neither before
    that; so the bracket goes however the frame is left, also where a traceback keeps the frame.
    """

    __slots__ = ("__weakref__",)


class _Open(NamedTuple):
    bracket: ref[Bracket]
    thread: int
    is_round: bool


class Brackets:
    """The brackets open on one cache, one inside the other, all of one thread."""

    def __init__(self) -> None:
        self._open: tuple[_Open, ...] = ()

    def thread(self) -> int | None:
        """Where a `generate` runs; None where none does."""
        for held in self._open:
            if held.bracket() is not None:
                return held.thread
        return None

    def __bool__(self) -> bool:
        """Whether a `generate` runs."""
        for held in self._open:  # noqa: SIM110 - asked for every token, where `any` takes three times as long
            if held.bracket() is not None:
                return True
        return False

    def __contains__(self, bracket: ref[Bracket]) -> bool:
        return any(held.bracket is bracket for held in self._open)

    @property
    def innermost_is_round(self) -> bool:
        """Whether what runs is no `generate` of transformers, but a function that may call it, or may not."""
        for held in reversed(self._open):
            if held.bracket() is not None:
                return held.is_round
        return False

    def open(self, bracket: ref[Bracket], *, is_round: bool = False) -> None:
        """A `generate` begins, or a function round it."""
        self._open = (*self._still_open(), _Open(bracket, threading.get_ident(), is_round))

    def close(self, bracket: ref[Bracket]) -> None:
        """It is left; one that was never opened is ignored."""
        self._open = tuple(held for held in self._still_open() if held.bracket is not bracket)

    @property
    def were_left_open(self) -> bool:
        """Whether a `generate` is gone that never closed its bracket: its rows do not resume."""
        return bool(self._open) and not self

    def forget_closed(self) -> None:
        """A bracket that is gone without having been closed counts as closed."""
        self._open = tuple(self._still_open())

    def are_of_another_thread(self) -> bool:
        """Whether a `generate` runs in another thread than this one."""
        return self.thread() not in (None, threading.get_ident())

    def lose_threads(self, idents: Iterable[int]) -> bool:
        """Close those of threads that are not there, as after a fork; whether there were any."""
        kept = tuple(held for held in self._open if held.thread not in idents)
        are_lost, self._open = len(kept) < len(self._open), kept
        return are_lost

    def _still_open(self) -> list[_Open]:
        return [held for held in self._open if held.bracket() is not None]


def is_on_a_stack(wanted: Callable[[FrameType], bool], *, of_other_threads: bool = False) -> bool:
    """Whether any thread runs a frame that is `wanted`; or any thread but this one.

    Cost: looks at every frame of every thread, so it is asked where an answer of yes refuses something.
    """
    frame: FrameType | None = None
    frames = current_frames()
    if of_other_threads:
        del frames[threading.get_ident()]
    try:
        while frames:
            _, frame = frames.popitem()
            while frame is not None:
                if wanted(frame):
                    return True
                frame = caller_of(frame)
        return False
    finally:
        frame = None  # this function's own would be a cycle, and keep its callers' variables
        frames.clear()
