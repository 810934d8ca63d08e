"""Which thread runs the forward that a call has announced. A thread that has ended runs nothing, whatever it left open."""

import threading


class ForwardThread:
    """The thread that announced a call's last forward."""

    def __init__(self) -> None:
        self._ident = 0  # of a thread; 0: none

    def start(self) -> None:
        """This thread announces one."""
        self._ident = threading.get_ident()

    def is_another(self) -> bool:
        """Whether another thread than this one announced it, and is still alive."""
        if self._ident == threading.get_ident():
            return False
        return any(thread.ident == self._ident for thread in threading.enumerate())
