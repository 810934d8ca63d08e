"""Owns the files of one folder in which several processes write, read and remove files at once.

It knows which files there are, keeps them within the budget, and decides which ones go first: those whose time of last
use, kept as the file's own time, is the oldest. It says nothing of what is in them. A file is whole as soon as it has
its name, and no other file ever gets this name.
"""

import contextlib
import math
import os
import time
from pathlib import Path
from uuid import uuid4

from filelock import FileLock

from ..blocks.arguments import OWNERS_ALONE
from .saved_file import own_paths, saved_paths

_LOCK = ".lock"  # name of the lock that whoever writes holds
_NS_OF_A_CLOCK = 2 * 10**9  # a younger change may be followed by another one at the same time
_NS_BETWEEN_USES = 10 * 10**9  # least time between two uses of a file that are told to others
_MOST_SECONDS = 30.0  # longest wait for others that write


class Folder:
    """`Folder` holds the files of one folder.

    Args:
        max_bytes: most bytes of all its files.
        mode: permissions of files that are written, whatever the umask is.
    """

    def __init__(self, path: Path, max_bytes: float = math.inf, mode: int = OWNERS_ALONE) -> None:
        self.path, self.max_bytes, self.mode = path, max_bytes, mode
        self._looked_at: int | None = None  # time of the folder's last change, as seen by the last look
        self._is_settled = False  # True if any later change shows in that time

    def make(self) -> None:
        """Make the folder if it is not there, for those who may read its files.

        A folder that is there stays as it is.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            kept = self.path.stat().st_mode & 0o7000  # such as the bit by which files get the folder's group
            self.path.chmod(kept | self.mode | (self.mode & 0o444) >> 2)

    def changed_paths(self) -> list[Path] | None:
        """Return all whole files; None if no file has come or gone since the last call.

        Cost: while others write, the names of all files; else one look at the folder.
        """
        changed = self.path.stat().st_mtime_ns
        if changed == self._looked_at and self._is_settled:
            return None
        self._looked_at, self._is_settled = changed, time.time_ns() - changed > _NS_OF_A_CLOCK
        return saved_paths(self.path)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file whole, or not at all. Other processes wait meanwhile.

        The least recently used files make room for it.

        Raises:
            OSError: the file cannot be written, or others write for too long; nothing is left of the file.
        """
        if not self.path.is_dir():
            raise FileNotFoundError(f"there is no folder {self.path} any more")
        with FileLock(self.path / _LOCK, timeout=_MOST_SECONDS, mode=self.mode):
            for left_behind in self.path.glob(".*.unfinished"):  # files of a process that died
                remove(left_behind)
            self._make_room(len(data))
            unfinished = self.path / f".{uuid4().hex}.unfinished"
            try:
                with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(unfinished, self.mode)
                os.replace(unfinished, path)
            except OSError as error:
                raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from error
            finally:
                remove(unfinished)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise OSError(f"a file of {num_bytes} bytes has no room in {self.max_bytes}")
        found = []
        for path in own_paths(self.path):
            with contextlib.suppress(OSError):  # the file has gone since
                state = path.stat()
                found.append((state.st_mtime_ns, path, state.st_size))
        taken = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if taken + num_bytes <= self.max_bytes:
                break
            remove(path)
            taken -= size

    def use(self, path: Path) -> None:
        """Note that a file is used now, so that all processes keep it longer than others."""
        with contextlib.suppress(OSError):
            if time.time_ns() - path.stat().st_mtime_ns > _NS_BETWEEN_USES:
                os.utime(path)


def remove(path: Path) -> None:
    """Remove a file, if it is still there."""
    with contextlib.suppress(OSError):
        path.unlink()
