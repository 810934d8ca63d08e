"""Owns the files of one folder in which several processes write, read and remove files at once.

It keeps them within a budget: those go first whose time of last use, kept as the file's own time, is the oldest. It
says nothing of what is in them. A file is whole as soon as it has its name, and no other file ever gets this name.
"""

import contextlib
import math
import os
import re
import shutil
import time
from pathlib import Path
from uuid import uuid4

from filelock import FileLock

from ..blocks.arguments import OWNERS_ALONE
from ..errors import CacheArgumentError

VERSION = 2  # of the format. It is part of the files' names, so that files of other versions are left alone
_OWN_NAME = re.compile(rf"[0-9a-f]{{32}}\.v{VERSION}\.safetensors")
_LOCK = ".lock"  # name of the lock that whoever writes holds
_NS_OF_A_CLOCK = 2 * 10**9  # a younger change may be followed by another one at the same time
_NS_BETWEEN_USES = 10 * 10**9  # least time between two uses of a file that are told to others
_MOST_SECONDS = 30.0  # longest wait for others that write
_DEFAULT_SHARE = 0.5  # share of what the folder's disk has free


class Folder:
    """`Folder` holds the files of one folder.

    Args:
        max_bytes: most bytes of all its files; files with other names, such as weights, neither count nor go.
        mode: permissions of files that are written, whatever the umask is.
    """

    def __init__(self, path: Path, max_bytes: float = math.inf, mode: int = OWNERS_ALONE) -> None:
        self.path, self.max_bytes, self.mode = path, max_bytes, mode
        self.looked_at: int | None = None  # time of the folder's last change; None: another change may not show in it

    def make(self) -> None:
        """Make the folder, for those who may read its files. A folder that is there stays as it is."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            kept = self.path.stat().st_mode & 0o7000  # such as the bit by which files get the folder's group
            self.path.chmod(kept | self.mode | (self.mode & 0o444) >> 2)

    def new_path(self) -> Path:
        """Return the path of a file that is not there yet."""
        return self.path / f"{uuid4().hex}.v{VERSION}.safetensors"

    def changed_paths(self) -> list[Path] | None:
        """Return all whole files; None if no file has come or gone since the last call."""
        changed = self.path.stat().st_mtime_ns
        if changed == self.looked_at:
            return None
        self.looked_at = changed if time.time_ns() - changed > _NS_OF_A_CLOCK else None
        return saved_paths(self.path)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file whole, or not at all; the least recently used files make room. Other processes wait meanwhile.

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
        for path in filter(is_own, saved_paths(self.path)):
            with contextlib.suppress(OSError):  # the file has gone since
                state = path.stat()
                found.append((state.st_mtime_ns, path, state.st_size))
        taken = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if taken + num_bytes <= self.max_bytes:
                break
            remove(path)
            taken -= size


def writable_folder(folder: str | os.PathLike[str], max_bytes: int | None) -> Folder:
    """Make a user's `disk_folder`, which may take half of what is free there if no size is given.

    Raises:
        CacheArgumentError: the folder cannot be made or written.
    """
    path = Path(folder).expanduser().absolute()
    try:
        Folder(path).make()
        (path / _LOCK).touch(0o600)  # raises if the folder cannot be written
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise CacheArgumentError(f"disk_folder is {os.fspath(folder)!r}, which cannot be written: {error}") from error
    return Folder(path, int(free * _DEFAULT_SHARE) if max_bytes is None else max_bytes)


def folder_of(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a user names.

    Raises:
        CacheArgumentError: `folder` is no path, or is a file, or lies in one.
    """
    if not isinstance(folder, str | os.PathLike):
        raise CacheArgumentError(f"folder is {folder!r}; give a folder's path")
    path = Path(folder).expanduser().absolute()
    if file := next((each for each in (path, *path.parents) if each.is_file()), None):
        raise CacheArgumentError(f"{file} is a file; give a folder")
    return path


def use(path: Path) -> None:
    """Note that a file is used now, so that all processes keep it longer than others."""
    with contextlib.suppress(OSError):
        if time.time_ns() - path.stat().st_mtime_ns > _NS_BETWEEN_USES:
            os.utime(path)


def saved_paths(folder: Path) -> list[Path]:
    """Return the files that may hold saved blocks, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and not path.name.startswith("."))


def is_own(path: Path) -> bool:
    """Return whether a file is named as this version names its files. Others are never removed."""
    return _OWN_NAME.fullmatch(path.name) is not None


def remove(path: Path) -> None:
    """Remove a file, if it is still there."""
    with contextlib.suppress(OSError):
        path.unlink()
