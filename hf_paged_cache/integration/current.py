"""The rows of a cache between its calls: of the last call, of a running loop, or of a `generate` that has not run a forward yet."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol
from weakref import WeakMethod

from ..errors import CacheBusyError
from ..rows.rows import Rows
from ..store.block_store import BlockStore


class ClosesRows(Protocol):
    """Who keeps what rows have computed."""

    store: BlockStore
    salt: bytes

    def close(self, rows: Rows) -> None: ...


class Current:
    """The rows of a cache's last call, or of its running loop; and what was counted of it.

    Args:
        calls: keeps what rows have computed.
        show: the cache's method that is told which rows it has.
    """

    def __init__(self, calls: ClosesRows, show: WeakMethod[Callable[[Rows | None], None]]) -> None:
        self._calls, self._show = calls, show
        self._rows: Rows | None = None
        self.is_in_unseen_generate = False  # one that was looked up before the cache was attached has begun
        self._aside: Rows | None = None  # of the call before one that has not opened its rows yet
        self._around: list[int] = []  # idents of the threads in which functions run in the place of `generate`
        self._is_by_hand = False  # no `generate` has begun in such a function
        self._by_hand: Rows | None = None  # that forwards of such a function's own have begun
        with calls.store.lock:
            calls.store.currents.add(self)

    @property
    def salt(self) -> bytes:
        """Of the cache."""
        return self._calls.salt

    def end(self) -> None:
        """The rows end; what a loop has completed is kept."""
        rows = self.take()
        if rows is not None:
            self._calls.close(rows)

    @property
    def rows(self) -> Rows | None:
        """None before the first call, and after `reset()`."""
        return self._rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._rows = rows
        if rows is not None:
            rows.is_lent = False
        if (show := self._show()) is not None:
            show(rows)

    def set_aside(self) -> None:
        """A `generate` begins of which nothing is known yet: its rows may go on where these stop."""
        self._aside, self.is_in_unseen_generate = self.take(), True
        if self._aside is not None:
            self._calls.close(self._aside)

    def begin_unseen_generate(self) -> None:
        """A `generate` begins that has no bracket: on rows of its own, or in a function that has run forwards by hand, on theirs."""
        by_hand, self._by_hand, self._is_by_hand = self._by_hand, None, False
        if by_hand is None or by_hand is not self._rows:
            self.set_aside()

    def begin(self, rows: Rows) -> None:
        """A loop of forwards has begun, or a `generate` without a bracket."""
        self.rows, self._by_hand = rows, rows if self._is_by_hand else None

    @property
    def is_around(self) -> bool:
        """Whether a function runs in the place of `generate`."""
        return bool(self._around)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """The span of such a function; what it runs is a `generate` as long as it tells nothing else.

        Raises:
            CacheBusyError: another one runs in another thread.
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
            elif rows is None and self._aside is not None:  # it has run no forward
                self.rows, self._aside = self._aside, None

    @property
    def is_loop(self) -> bool:
        """Whether the rows are a loop's of forwards, which may go on."""
        rows = self._rows
        return rows is not None and rows.is_open and rows.state is not None and rows.state.kind == "forward"

    @property
    def aside(self) -> Rows | None:
        """The rows of the call before a `generate` that has not run a forward yet."""
        return self._aside

    def take(self) -> Rows | None:
        """The rows, which are somebody else's from here on."""
        with self._calls.store.lock:  # of two calls that begin at once, one gets them
            rows = self._aside if self._rows is None else self._rows
            self._rows = self._aside = None
        if (show := self._show()) is not None:
            show(None)  # also where an interrupt has come between these two before
        return rows

    def lose_threads(self, idents: Collection[int]) -> None:
        """These threads ended with a fork: rows that one of them ran may be in the middle of anything, and are nobody's."""
        self._around = [ident for ident in self._around if ident not in idents]
        rows = self._rows if self._rows is not None else self._aside
        if rows is not None and rows.is_lost(idents):
            self.take()

    def take_previous(self) -> Rows | None:
        """The rows of the call before one that begins, which are somebody else's from here on; not those of a loop in another thread,
        which goes on.
        """
        with self._calls.store.lock:
            rows = None if self._is_loop_elsewhere else self.take()
            if rows is not None:
                rows.is_lent = True  # until its rows have opened, or have ended
            return rows

    def put(self, rows: Rows) -> None:
        """A `generate` has ended: its rows are the cache's, unless a loop in another thread has begun meanwhile."""
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
        """The cache was collected: keep what a loop has computed."""
        rows = self.take()
        if rows is not None and rows.is_source:
            size = self._calls.store.block_size
            if any(rows.n - prompt.pad - prompt.kept >= size for prompt in rows.prompts):
                self._calls.close(rows)


def bytes_of_rows(held: Sequence[Rows | None], running: Sequence[Rows]) -> int:
    """Bytes of the last rows of caches, and of those that run, as of their last forward of a prompt."""
    ended = [rows for rows in held if rows is not None and rows not in running]
    begun = [rows.state for rows in running if rows.state is not None]
    num_bytes: int = sum(state.kv_bytes for state in begun)
    return num_bytes + sum(rows.kv_bytes for rows in ended)


def drain(store: BlockStore) -> None:
    """Keep what the rows of collected caches had computed."""
    left = store.left
    while left:
        with contextlib.suppress(IndexError):  # another thread has it
            left.popleft().end_left()


def begin_to_forget(store: BlockStore, salt: bytes | None) -> Sequence[Current]:
    """Refuse to forget what a loop of forwards may go on with; from then on rows of calls that are over hold no block.

    Args:
        salt: None: of all.

    Returns:
        the rows of the caches of this salt; they end once all is forgotten.

    Raises:
        CacheBusyError: some of these caches' rows are a loop's; nothing has changed.
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
    for rows in sharing:  # also those that a call has returned
        if not (rows.in_generate or rows.is_running or rows.is_lent):
            rows.make_dense()
    return currents
