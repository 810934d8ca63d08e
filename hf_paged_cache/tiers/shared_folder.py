"""Files of blocks that several processes write, read and remove at once, in one folder with one budget.

Owns which files there are, that all of them take no more than the budget, and which go first: those whose time of last use, kept as
the file's own, is the oldest. Says nothing of what is in them.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from ..blocks.arguments import OWNERS_ALONE
from .saved_file import SUFFIX, remove_unfinished

logger = logging.getLogger("hf_paged_cache")

LOCK = ".lock"  # whoever writes into the folder holds it
_NS_OF_A_CLOCK = 2 * 10**9  # a change that is younger may be followed by one at the same time
_NS_BETWEEN_USES = 10 * 10**9  # that are told to others
_MOST_SECONDS = 5.0  # that the end of a process waits for the others


class Entry(NamedTuple):
    """A file as it is in the folder."""

    path: Path
    num_bytes: int
    used_ns: int  # when it was used last


class SharedFolder:
    """The files of one folder.

    Args:
        path: it is there.
        max_bytes: of all its files.
        mode: permissions of files.

    Attributes:
        num_beside: bytes that count as well, in files of this process alone.
    """

    def __init__(self, path: Path, max_bytes: int, mode: int = OWNERS_ALONE) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.mode = mode
        self.num_beside = 0
        self._looked_at: int | None = None  # when the folder had changed last
        self._is_settled = False  # nothing that has happened since looks as if it had not

    def __repr__(self) -> str:
        return f"SharedFolder({str(self.path)!r})"

    def look(self, known: Collection[Path]) -> tuple[set[Path], list[Entry]] | None:
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
        there = self._paths()
        return there, _entries(there.difference(known))

    def _paths(self) -> set[Path]:
        return {self.path / name for name in os.listdir(self.path) if name.endswith(SUFFIX) and name[0] != "."}

    def write(self, num_bytes: int, write: Callable[[], int], *, may_wait: bool = True) -> bool:
        """Have a file written when there is room for it; what was used least goes for it. Others wait meanwhile.

        Args:
            num_bytes: of the file, at most.
            write: writes it, and returns its bytes.
            may_wait: for others that write; else for some seconds.

        Returns:
            Whether it was.

        Raises:
            OSError: it could not be.
        """
        try:
            with FileLock(self.path / LOCK, timeout=-1 if may_wait else _MOST_SECONDS, mode=self.mode):
                remove_unfinished(self.path)
                if not self._make_room(num_bytes):
                    return False
                write()
                return True
        except Timeout:
            return False

    def _make_room(self, num_bytes: int) -> bool:
        entries = _entries(self._paths())
        most = self.max_bytes - self.num_beside - num_bytes
        taken = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if taken <= most:
                break
            remove(entry.path)
            taken -= entry.num_bytes
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


def _entries(paths: Iterable[Path]) -> list[Entry]:
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # gone since
            state = path.stat()
            found.append(Entry(path, state.st_size, state.st_mtime_ns))
    return sorted(found, key=lambda entry: (entry.used_ns, entry.path))


def remove(path: Path) -> None:
    """Remove a file, if it is still there."""
    with contextlib.suppress(OSError):
        path.unlink()
