"""Owns the output of a job: OUT, a line of JSON for each row, and OUT.job.json, which says of what job OUT is.

Lines are written as batches are done. A job that begins again skips the rows that OUT has. A line that was being
written when a process died has no end: it is cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CacheArgumentError
from .rows import INDEX, Row, json_line

_ANEW = "give another file, or begin anew with overwrite (--overwrite)"


class Answers:
    """`Answers` is the output of a job. Open it with `with`: no other process has the file meanwhile.

    A file that was not there before is removed again if no row was written.

    Args:
        job: name -> what the answers depend on. Names are quoted to the user.
        overwrite: forget answers that are there.

    Attributes:
        done: numbers of the rows that are there.

    Raises:
        CacheArgumentError: OUT cannot be written, another process has it, or it is not this job's; nothing has changed.
    """

    def __init__(self, path: Path, prompts: object, job: Mapping[str, Any], overwrite: bool) -> None:
        self._path, self._job_path = path, Path(f"{path}.job.json")
        self._job, self.done, self._end = json.loads(json.dumps(job, default=str)), set[int](), 0
        self._was_there, self._has_begun = path.exists(), False
        if self._was_there and not path.is_file():
            raise CacheArgumentError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}; give a file")
        if path.suffix.lower() in (".csv", ".parquet", ".gz"):
            raise CacheArgumentError(f"{path}: JSON lines are written; give a name that ends with .jsonl")
        if self._was_there and isinstance(prompts, str | PathLike) and os.path.samefile(prompts, path):
            raise CacheArgumentError(f"{path} holds the prompts themselves, which would be lost; give another file")
        self._file = _claimed(path)
        try:
            if path.stat().st_size and not overwrite:
                self._read()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._was_there and not self._has_begun:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Write the lines of rows that are done."""
        if not self._has_begun:
            self._has_begun = True
            self._file.truncate(self._end)
            if not self._end:
                self._job_path.write_text(json.dumps(self._job, indent=1, ensure_ascii=False) + "\n", "utf-8")
        lines = memoryview(b"".join(map(json_line, rows)))
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError as error:  # such as a full disk
            error.filename = str(self._path)
            raise

    def _read(self) -> None:
        path = self._path
        try:
            before = _by_name(json.loads(self._job_path.read_text("utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            problem = f"{path} already exists, and no {self._job_path.name} says of which job it is"
            raise CacheArgumentError(f"{problem}; {_ANEW}") from error
        now = _by_name(self._job)
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            told = "; ".join(f"{n}: {json.dumps(before.get(n))} then, {json.dumps(now.get(n))} now" for n in changed)
            raise CacheArgumentError(f"{path} already exists, of another job ({told}); {_ANEW}")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(line)[INDEX])
                except (ValueError, TypeError, KeyError) as error:
                    problem = f"{path}, line {number} is no answer of a job"
                    raise CacheArgumentError(f"{problem}; remove it, and its row runs again, or {_ANEW}") from error
                self._end += len(line)


def _by_name(job: Mapping[str, Any]) -> dict[str, Any]:
    options = {f"option {name}": value for name, value in job.get("options", {}).items()}
    return {**{name: value for name, value in job.items() if name != "options"}, **options}


def _claimed(path: Path) -> FileIO:
    """Open a file to write at its end, and lock it against other processes. On Windows nothing is locked."""
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise CacheArgumentError(f"{path} cannot be written ({error.strerror})") from error
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino != path.stat().st_ino:  # another process had the file, and has removed it
                raise BlockingIOError
        except OSError as error:
            file.close()
            problem = f"another process is writing {path}; wait for it, or give another file"
            raise CacheArgumentError(problem) from error
    return file
