"""The folder of files that are one process's alone: in another folder, read by its user only, and gone with the store.

What a process has left that died is removed by the next one that begins.
"""

import contextlib
import os
import shutil
from itertools import count
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

_PREFIX, _LOCK = "hf-paged-cache-", "lock"


class OwnFolder:
    """A folder of this process.

    Args:
        parent: where; it is there.

    Attributes:
        pid: of the process; a forked child has none.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        _remove_left_behind(parent)
        self.pid = os.getpid()
        self.path = parent / f"{_PREFIX}{self.pid}-{uuid4().hex[:8]}"
        self.path.mkdir(mode=0o700)  # prompts can be told from what is in it
        self._numbers = count()
        self._lock = FileLock(self.path / _LOCK)
        self._lock.acquire(timeout=0)

    def new_path(self) -> Path:
        """Of a file that is not there yet."""
        return self.path / f"{next(self._numbers)}.safetensors"

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = FileLock(folder / _LOCK)
        with contextlib.suppress(OSError, Timeout), lock.acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
