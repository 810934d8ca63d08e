"""Folders that files of blocks are written into: one that several processes write, read and remove in at once, and one of a process alone.

Owns which files there are, that all of them take no more than the budget, and which go first: those whose time of last use, kept as
the file's own, is the oldest. Says nothing of what is in them.
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from ..blocks.arguments import OWNERS_ALONE
from .saved_file import remove_unfinished, saved_paths

_OWN_PREFIX, _OWN_LOCK = "hf-paged-cache-", "lock"
_LOCK = ".lock"  # whoever writes into a shared folder holds it
_NS_OF_A_CLOCK = 2 * 10**9  # a change that is younger may be followed by one at the same time
_NS_BETWEEN_USES = 10 * 10**9  # that are told to others
_MOST_SECONDS = 5.0  # that the end of a process waits for the others


class OwnFolder:
    """A folder of this process in another one: read by its user only, and gone with the store.

    What a process has left that died is removed by the next one that begins.

    Args:
        parent: where; it is there.

    Attributes:
        pid: of the process; a forked child has none.

    Raises:
        OSError: it cannot be made.
    """

    is_shared = False
    mode = OWNERS_ALONE

    def __init__(self, parent: Path) -> None:
        for left_behind in parent.glob(f"{_OWN_PREFIX}*"):
            lock = FileLock(left_behind / _OWN_LOCK)
            with contextlib.suppress(OSError, Timeout), lock.acquire(timeout=0):
                shutil.rmtree(left_behind, ignore_errors=True)
        self.pid = os.getpid()
        self.path = parent / f"{_OWN_PREFIX}{self.pid}-{uuid4().hex[:8]}"
        self.path.mkdir(mode=0o700)  # prompts can be told from what is in it
        self._lock = FileLock(self.path / _OWN_LOCK)
        self._lock.acquire(timeout=0)

    def write(self, num_bytes: int, write: Callable[[], object], *, may_wait: bool = True) -> bool:
        """Have a file written; the budget is seen to by whoever counts what is in here."""
        write()
        return True

    def use(self, path: Path) -> None:
        """Nothing: nobody else asks when a file was used."""

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


class SharedFolder:
    """The files of one folder.

    Args:
        path: it is there.
        max_bytes: of all its files.
        mode: permissions of files.

    Attributes:
        num_beside: bytes that count as well, in files of this process alone.
    """

    is_shared = True

    def __init__(self, path: Path, max_bytes: float = math.inf, mode: int = OWNERS_ALONE) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.mode = mode
        self.num_beside = 0
        self._looked_at: int | None = None  # when the folder had changed last
        self._is_settled = False  # nothing that has happened since looks as if it had not

    def __repr__(self) -> str:
        return f"SharedFolder({str(self.path)!r})"

    def look(self, known: Collection[Path]) -> tuple[set[Path], list[Path]] | None:
        """All whole files; and those that are not known, the least recently used first. None where none has come or gone since
        this was asked last.

        Cost: while others write, the names of all files; else one look at the folder.

        Raises:
            OSError: the folder cannot be read.
        """
        changed = self.path.stat().st_mtime_ns
        if changed == self._looked_at and self._is_settled:
            return None
        self._looked_at, self._is_settled = changed, time.time_ns() - changed > _NS_OF_A_CLOCK
        there = set(saved_paths(self.path))
        return there, [*_by_use(there.difference(known))]

    @contextlib.contextmanager
    def locked(self, seconds: float = -1) -> Iterator[None]:
        """Nobody else writes into the folder meanwhile, and what dead processes have not finished is gone.

        Args:
            seconds: that are waited for others; below 0: as long as they take.

        Raises:
            filelock.Timeout: they took longer.
        """
        with FileLock(self.path / _LOCK, timeout=seconds, mode=self.mode):
            remove_unfinished(self.path)
            yield

    def write(self, num_bytes: int, write: Callable[[], object], *, may_wait: bool = True) -> bool:
        """Have a file written when there is room for it; what was used least goes for it. Others wait meanwhile.

        Args:
            num_bytes: of the file, at most.
            write: writes it.
            may_wait: for others that write; else for some seconds.

        Returns:
            Whether it was.

        Raises:
            OSError: it could not be.
        """
        try:
            with self.locked(-1 if may_wait else _MOST_SECONDS):
                if not self._make_room(num_bytes):
                    return False
                write()
                return True
        except Timeout:
            return False

    def _make_room(self, num_bytes: int) -> bool:
        bytes_of = _by_use(saved_paths(self.path))
        most, taken = self.max_bytes - self.num_beside - num_bytes, sum(bytes_of.values())
        for path, of_file in bytes_of.items():
            if taken <= most:
                break
            remove(path)
            taken -= of_file
        return taken <= most

    def use(self, path: Path) -> None:
        """A file is used now: all processes are to keep it longer than others."""
        with contextlib.suppress(OSError):
            if time.time_ns() - path.stat().st_mtime_ns > _NS_BETWEEN_USES:
                os.utime(path)


def make_folder(path: Path, mode: int) -> None:
    """Make a folder where it is not there: open to those for whom its files are.

    Args:
        mode: permissions of files. Whoever may read files may enter the folder; one that is there keeps its own.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    kept = path.stat().st_mode & 0o7000  # such as that files are of the folder's group
    path.chmod(kept | mode | (mode & 0o444) >> 2)


def _by_use(paths: Iterable[Path]) -> dict[Path, int]:
    """Files -> their bytes, the least recently used first."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # gone since
            state = path.stat()
            found.append((state.st_mtime_ns, path, state.st_size))
    return {path: num_bytes for _, path, num_bytes in sorted(found)}


def remove(path: Path) -> None:
    """Remove a file, if it is still there."""
    with contextlib.suppress(OSError):
        path.unlink()
