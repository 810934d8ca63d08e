"""Holds a cache's rows between calls: of the last call, of a loop, or of a `generate` before its first forward."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol
from weakref import WeakMethod

from ..errors import CacheBusyError
from ..rows.rows import Rows
from ..store.block_store import BlockStore


class ClosesRows(Protocol):
    """`ClosesRows` keeps what rows have computed, and closes the rows."""

    store: BlockStore
    salt: bytes

    def close(self, rows: Rows) -> None: ...


class Current:
    """`Current` holds the rows of a cache's last call, or of its running loop.

    Args:
        calls: keeps what rows have computed.
        show: method of the cache that is told which rows the cache has.

    Attributes:
        is_in_unseen_generate: True if a `generate` has begun that was looked up before the cache was attached.
    """

    def __init__(self, calls: ClosesRows, show: WeakMethod[Callable[[Rows | None], None]]) -> None:
        self._calls, self._show = calls, show
        self._rows: Rows | None = None
        self.is_in_unseen_generate = False
        self._aside: Rows | None = None  # rows of the call before a `generate` that has not opened its rows yet
        self._around: list[int] = []  # idents of the threads in which functions run in the place of `generate`
        self._is_by_hand = False  # whether such a function runs in which no `generate` has begun
        self._by_hand: Rows | None = None  # rows that such a function's own forwards have begun
        with calls.store.lock:
            calls.store.currents.add(self)

    @property
    def salt(self) -> bytes:
        """Salt of the cache."""
        return self._calls.salt

    def end(self) -> None:
        """End the rows; what a loop has completed is kept."""
        rows = self.take()
        if rows is not None:
            self._calls.close(rows)

    @property
    def rows(self) -> Rows | None:
        """Rows of the cache; None: before the first call, and after `reset()`."""
        return self._rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._rows = rows
        if rows is not None:
            rows.is_lent = False
        if (show := self._show()) is not None:
            show(rows)

    def set_aside(self) -> None:
        """Set the rows aside as a `generate` begins of which nothing is known yet: it may go on where they stop."""
        self._aside, self.is_in_unseen_generate = self.take(), True
        if self._aside is not None:
            self._calls.close(self._aside)

    def begin_unseen_generate(self) -> None:
        """Begin a `generate` without a bracket: on new rows, or on those of forwards that its function ran by hand."""
        by_hand, self._by_hand, self._is_by_hand = self._by_hand, None, False
        if by_hand is None or by_hand is not self._rows:
            self.set_aside()

    def begin(self, rows: Rows) -> None:
        """Take the rows of a loop of forwards, or of a `generate` without a bracket, that has begun."""
        self.rows, self._by_hand = rows, rows if self._is_by_hand else None

    @property
    def is_around(self) -> bool:
        """True if a function runs in the place of `generate`."""
        return bool(self._around)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Enclose a function in the place of `generate`: what it runs is taken for a `generate` unless shown otherwise.

        Raises:
            CacheBusyError: another call is running on this cache.
        """
        here = threading.get_ident()
        with self._calls.store.lock:
            if self._around and (self._around[-1] != here or self._rows is not None):
                where = "" if self._around[-1] == here else " in another thread"
                raise CacheBusyError(
                    f"a generate call is running on this cache{where}; use another cache on the same store for this one: "
                    "PagedPrefixCache(cache.store)"
                )
            self._around.append(here)
        try:
            self.set_aside()
            self._is_by_hand = True
            yield
        finally:
            self.is_in_unseen_generate = self._is_by_hand = False
            self._by_hand = None
            self._around.remove(here)
            rows = self._rows
            if rows is not None and not self.is_loop:
                self._calls.close(rows)
            elif rows is None and self._aside is not None:  # the function has run no forward
                self.rows, self._aside = self._aside, None

    @property
    def is_loop(self) -> bool:
        """True if the rows are those of a loop of forwards, which may go on."""
        rows = self._rows
        return rows is not None and rows.is_open and rows.state is not None and rows.state.kind == "forward"

    @property
    def aside(self) -> Rows | None:
        """Rows of the call before a `generate` that has not run a forward yet."""
        return self._aside

    def take(self) -> Rows | None:
        """Return the rows, and hold them no longer."""
        with self._calls.store.lock:  # of two calls that begin at once, only one gets the rows
            rows = self._aside if self._rows is None else self._rows
            self._rows = self._aside = None
        if (show := self._show()) is not None:
            show(None)  # also if an interrupt came between these two statements before
        return rows

    def lose_threads(self, idents: Collection[int]) -> None:
        """Forget threads that ended with a fork, and drop rows that one of them ran: these may be half written."""
        self._around = [ident for ident in self._around if ident not in idents]
        rows = self._rows if self._rows is not None else self._aside
        if rows is not None and rows.is_lost(idents):
            self.take()

    def take_previous(self) -> Rows | None:
        """Return the rows of the call before one that begins, and hold them no longer.

        None: there are none, or they are those of a loop in another thread, which goes on.
        """
        with self._calls.store.lock:
            rows = None if self._is_loop_elsewhere else self.take()
            if rows is not None:
                rows.is_lent = True  # until the new call's rows have opened, or have ended
            return rows

    def put(self, rows: Rows) -> None:
        """Take the rows of a `generate` that has ended, unless a loop in another thread has begun meanwhile."""
        with self._calls.store.lock:
            if not self._is_loop_elsewhere:
                self.rows = rows

    @property
    def _is_loop_elsewhere(self) -> bool:
        rows = self._rows
        if rows is None or not self.is_loop or rows.thread == threading.get_ident():
            return False
        return any(thread.ident == rows.thread for thread in threading.enumerate())

    def end_left(self) -> None:
        """Keep what a loop has computed, after the cache was collected."""
        rows = self.take()
        if rows is not None and rows.is_source:
            size = self._calls.store.block_size
            if any(rows.n - prompt.pad - prompt.kept >= size for prompt in rows.prompts):
                self._calls.close(rows)


def bytes_of_rows(held: Sequence[Rows | None], running: Sequence[Rows]) -> int:
    """Return the bytes of the last rows of caches, and of running rows as of their last forward of a prompt."""
    ended = [rows for rows in held if rows is not None and rows not in running]
    begun = [rows.state for rows in running if rows.state is not None]
    num_bytes: int = sum(state.kv_bytes for state in begun)
    return num_bytes + sum(rows.kv_bytes for rows in ended)


def drain(store: BlockStore) -> None:
    """Keep what the rows of collected caches had computed."""
    left = store.left
    while left:
        with contextlib.suppress(IndexError):  # another thread has taken the last rows
            left.popleft().end_left()


def begin_to_forget(store: BlockStore, salt: bytes | None) -> Sequence[Current]:
    """Begin to forget blocks: rows of calls that are over hold none from here on.

    Args:
        salt: salt of the blocks; None: all salts.

    Returns:
        the `Current` of each cache of this salt; its rows end once all is forgotten.

    Raises:
        CacheBusyError: rows of one of these caches are those of a loop, which may go on; nothing has changed.
    """
    drain(store)
    with store.lock:
        currents = [each for each in store.currents if salt in (None, each.salt)]
        sharing = [rows for rows in store.sharing if salt in (None, rows.calls.salt)]
    if any(current.is_loop for current in currents):
        where = "on this store" if salt is None else "on a cache of this salt" if salt else "on a cache without a salt"
        raise CacheBusyError(
            f"rows of plain forwards may resume {where}; reset the prefix cache when they have ended (rows of plain forwards "
            "end with their cache's reset())"
        )
    for rows in sharing:  # also rows that a call has returned
        if not (rows.in_generate or rows.is_running or rows.is_lent):
            rows.make_dense()
    return currents
