"""Who runs a call now: open brackets of `generate`, and the thread of the forward that is scheduled.

Both follow from what an interrupt cannot leave half done: whether a frame, or a thread, lives.
"""

import threading
from weakref import ref


class Bracket:
    """One running `generate`. Its frame alone holds it, so it is gone however that frame is left."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Brackets:
    """The brackets open on one cache, one inside the other, all of one thread."""

    def __init__(self) -> None:
        self._open: tuple[ref[Bracket], ...] = ()

    def __bool__(self) -> bool:
        """Whether a `generate` runs."""
        return any(bracket() is not None for bracket in self._open)

    def __contains__(self, bracket: Bracket) -> bool:
        return any(held() is bracket for held in self._open)

    def open(self, bracket: Bracket) -> None:
        """A `generate` begins."""
        self._open = (*(held for held in self._open if held() is not None), ref(bracket))

    def close(self, bracket: Bracket) -> None:
        """It is left; one that was never opened is ignored."""
        self._open = tuple(held for held in self._open if held() not in (None, bracket))

    def are_of_another_thread(self) -> bool:
        """Whether a `generate` runs in another thread than this one."""
        thread = threading.get_ident()
        return any((bracket := held()) is not None and bracket.thread != thread for held in self._open)


class ForwardThread:
    """The thread that scheduled a call's last forward. A thread that has ended runs nothing, whatever it left open."""

    def __init__(self) -> None:
        self._ident = 0  # of a thread; 0: none

    def start(self) -> None:
        """This thread schedules one."""
        self._ident = threading.get_ident()

    def is_another(self) -> bool:
        """Whether another thread than this one scheduled it, and is still alive."""
        if self._ident == threading.get_ident():
            return False
        return any(thread.ident == self._ident for thread in threading.enumerate())
