"""Owns the output of a job: OUT, a line of JSON for each row, and OUT.job.json, which says of what job OUT is.

Lines are written as batches are done. A job that begins again skips the rows that OUT has. A line that was being
written when a process died has no end: it is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CacheArgumentError
from .prompts import Row, RowError

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

INDEX, COMPLETION = "index", "completion"  # columns that a job adds
_ANEW = "give another file, or begin anew with overwrite (--overwrite)"


class Answers:
    """`Answers` is the output of a job. Open it with `with`: no other process has the file meanwhile.

    A file that cannot be written, or is another job's, is refused and stays as it is. One that was not there before is
    removed again if no row was written.

    Args:
        job: name -> what the answers depend on. Names are quoted to the user.

    Attributes:
        done: numbers of the rows that are there.
    """

    def __init__(self, path: Path, prompts: object, job: Mapping[str, Any], overwrite: bool) -> None:
        self._path, self._job_path = path, Path(f"{path}.job.json")
        self._job: dict[str, Any] = json.loads(json.dumps(job, default=str))
        self.done, self._end = set[int](), 0  # `_end`: bytes of whole lines
        self._was_there, self._has_begun = path.exists(), False
        if self._was_there and not path.is_file():
            raise CacheArgumentError(f"{path} is no regular file; give a file")
        if self._was_there and isinstance(prompts, str | PathLike) and os.path.samefile(prompts, path):
            raise CacheArgumentError(f"{path} holds the prompts themselves, which would be lost; give another file")
        self._file = _claimed(path)
        try:
            if path.stat().st_size and not overwrite:
                self._require_same_job()
                self._read()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *raised: object) -> None:
        is_empty = not os.fstat(self._file.fileno()).st_size  # else another job has begun and ended since
        if is_empty and not self._was_there and not self._has_begun:
            self._path.resolve().unlink(missing_ok=True)  # a link stays
        self._file.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Write the lines of rows that are done."""
        if not self._has_begun:
            self._has_begun = True
            self._file.truncate(self._end)
            if not self._end:
                self._job_path.write_text(json.dumps(self._job, indent=1, ensure_ascii=False) + "\n", "utf-8")
        lines = memoryview(b"".join(map(json_line, rows)))
        while lines:
            lines = lines[self._file.write(lines) :]

    def _require_same_job(self) -> None:
        try:
            before: dict[str, Any] = json.loads(self._job_path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            problem = f"{self._path} already exists, and no {self._job_path.name} says of which job it is"
            raise CacheArgumentError(f"{problem}; {_ANEW}") from error
        names = {**before, **self._job}
        changed = [
            f"{name}: {json.dumps(before.get(name))} then, {json.dumps(self._job.get(name))} now"
            for name in names
            if before.get(name) != self._job.get(name)
        ]
        if changed:
            raise CacheArgumentError(f"{self._path} already exists, of another job ({'; '.join(changed)}); {_ANEW}")

    def _read(self) -> None:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(line)[INDEX])
                except (ValueError, TypeError, KeyError) as error:
                    problem = f"{self._path}, line {number} is no answer of a job"
                    raise CacheArgumentError(f"{problem}; remove it, and its row runs again, or {_ANEW}") from error
                self._end += len(line)


def _claimed(path: Path) -> FileIO:
    """Open a file to write at its end, and lock it against other processes."""
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise CacheArgumentError(f"{path} cannot be written ({error.strerror})") from error
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino != path.stat().st_ino:  # another process had the file, and has removed it
            raise BlockingIOError
    except OSError as error:
        file.close()
        raise CacheArgumentError(f"another process is writing {path}; wait for it, or give another file") from error
    return file


def digest_of(rows: Iterable[Row]) -> str:
    """Return hex digits of all that the rows hold; refuse what JSON cannot say, and columns that the job adds."""
    digest = hashlib.sha256()
    for number, row in enumerate(rows):
        for name in (INDEX, COMPLETION):
            if name in row:
                raise RowError(number, f"it has a column {name!r} already, which would be lost: rename it")
        try:
            digest.update(json_line(row))
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(number, f"it cannot be written as JSON ({error}); leave that out") from error
    return digest.hexdigest()[:16]


def json_line(row: Row) -> bytes:
    """Return a row as JSON: NaN and infinity become null, arrays lists, and what JSON does not have becomes a text."""
    text = json.dumps(dict(row), default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
    plain = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(plain, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
