"""Holds a cache's rows between calls: those of the last call, or of a loop of forwards."""

from collections.abc import Callable, Collection, Sequence
from threading import enumerate as enumerate_threads
from threading import get_ident

from ..errors import CacheBusyError
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from ..wording import where_of


class Current:
    """`Current` holds the rows of a cache's last call, or of its running loop; `close` keeps and closes rows."""

    def __init__(self, store: BlockStore, salt: bytes, close: Callable[[Rows], None]) -> None:
        self._store, self.salt, self._close = store, salt, close
        self.rows: Rows | None = None  # None: before the first call, and after `reset()`
        self.is_unseen = False  # the next forward is the first of a `generate` that no bracket has seen
        with store.lock:
            store.currents.add(self)

    def take(self, *, unless_elsewhere: bool = False) -> Rows | None:
        """Return the rows, and hold them no longer.

        With `unless_elsewhere`, rows of a loop stay in which another thread goes on; None is returned.
        """
        with self._store.lock:  # of two calls that begin at once, only one gets the rows
            rows = self.rows
            if unless_elsewhere and rows is not None and rows.thread != get_ident() and self._is_loop_elsewhere():
                return None
            self.rows, self.is_unseen = None, False
        return rows

    def put(self, rows: Rows) -> None:
        """Take the rows of a `generate` that has ended, unless a loop in another thread has begun meanwhile."""
        with self._store.lock:
            held = self.rows
            if held is None or held.thread == get_ident() or not self._is_loop_elsewhere():
                self.rows, self.is_unseen, rows.is_lent = rows, False, False  # lent also if an interrupt left it so

    def end(self) -> None:
        """End the rows; what a loop has completed is kept."""
        rows = self.take()
        if rows is not None:
            self._close(rows)

    @property
    def is_loop(self) -> bool:
        """True if the rows are those of a loop of forwards, which may go on."""
        rows = self.rows
        return rows is not None and rows.is_open and rows.state is not None and rows.state.kind == "forward"

    def _is_loop_elsewhere(self) -> bool:
        """Return whether the thread that ran the rows last runs, and has a loop on them."""
        rows = self.rows
        return rows is not None and self.is_loop and any(thread.ident == rows.thread for thread in enumerate_threads())

    def lose_threads(self, idents: Collection[int]) -> None:
        """Forget threads that ended with a fork, and drop rows that one of them ran: these may be half written."""
        if self.rows is not None and self.rows.is_lost(idents):
            self.take()


def bytes_of_rows(held: Sequence[Rows | None], running: Sequence[Rows]) -> int:
    """Return the bytes of the last rows of caches, and of running rows as of their last forward of a prompt."""
    of_running: int = sum(rows.state.kv_bytes for rows in running if rows.state is not None)
    return of_running + sum(rows.kv_bytes for rows in held if rows is not None and rows not in running)


def forget(store: BlockStore, salt: bytes | None) -> None:
    """Forget the blocks and pins of a salt, or of all if it is None, and end the rows of its calls that are over.

    Where rows of a loop may resume, CacheBusyError is raised, and nothing has changed.
    """
    with store.lock:
        currents = [each for each in store.currents if salt in (None, each.salt)]
        if any(current.is_loop for current in currents):
            raise CacheBusyError(
                f"rows of plain forwards may resume {where_of(salt)}; reset the prefix cache when they have ended "
                "(rows of plain forwards end with their cache's reset())"
            )
        for rows in [*store.sharing]:  # also rows that a call has returned
            is_busy = rows.in_generate or rows.is_running or rows.is_lent
            if salt in (None, rows.calls.salt) and not is_busy:
                rows.make_dense()
        store.settle()
        store.begin_to_forget(salt)
        if salt is None:
            store.reset_prefix_cache()
        else:
            store.forget(salt)
    for each in currents:
        each.end()
