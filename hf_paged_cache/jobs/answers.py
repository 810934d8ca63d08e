"""Owns the output of a job: OUT, a line of JSON for each row, and OUT.job.json, which says of what job OUT is.

Lines are written as batches are done. A job that begins again skips the rows that OUT has. A line that was being
written when a process died has no end: it is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CacheArgumentError
from .options import How
from .prompts import Row, RowError

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

INDEX, COMPLETION = "index", "completion"  # columns that a job adds
_ANEW = "give another file, or begin anew with overwrite (--overwrite)"


class Answers:
    """`Answers` is the output of a job, with the numbers of the rows that are `done`.

    A file that cannot be written, or is another job's, is refused and stays as it is. Nothing is written before the
    first rows are done.
    """

    def __init__(self, prompts: object, rows: Iterable[Row], how: How) -> None:
        path = self._path = Path(str(how.out))
        self._job_path = Path(f"{path}.job.json")
        job = {**how.model, "input": digest_of(rows), "column": how.column, "seed": how.seed, **how.generation}
        self._job: dict[str, Any] = json.loads(json.dumps(job, default=str))
        self.done, self._end = set[int](), 0  # `_end`: bytes of whole lines
        if path.exists() and not path.is_file():
            raise CacheArgumentError(f"{path} is no regular file; give a file")
        if path.exists() and isinstance(prompts, str | PathLike) and os.path.samefile(prompts, path):
            raise CacheArgumentError(f"{path} holds the prompts themselves, which would be lost; give another file")
        if not path.resolve().parent.is_dir():
            raise CacheArgumentError(f"{path} cannot be written: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise CacheArgumentError(f"{path} cannot be written: you have no permission")
        self._size = path.stat().st_size if path.exists() else 0
        if self._size and not how.overwrite:
            self._require_same_job()
            self._read()

    def add(self, rows: Iterable[Row]) -> None:
        """Write the lines of rows that are done."""
        lines = b"".join(map(json_line, rows))
        with self._path.open("ab") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) != self._size:
                advice = "start this job again when it has ended, or give another file"
                raise CacheArgumentError(f"another process is writing {self._path}; {advice}")
            if not self._end:
                self._job_path.write_text(json.dumps(self._job, indent=1, ensure_ascii=False) + "\n", "utf-8")
            file.truncate(self._end)
            file.write(lines)
        self._end = self._size = self._end + len(lines)

    def _require_same_job(self) -> None:
        try:
            before: dict[str, Any] = json.loads(self._job_path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            problem = f"{self._path} already exists, and no {self._job_path.name} says of which job it is"
            raise CacheArgumentError(f"{problem}; {_ANEW}") from error
        changed = [
            "the input has other rows than when this job began"
            if name == "input"
            else f"{name}: {json.dumps(before.get(name))} then, {json.dumps(self._job.get(name))} now"
            for name in {**before, **self._job}
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


def digest_of(rows: Iterable[Row]) -> str:
    """Return hex digits of all that the rows hold; refuse what JSON cannot say, and columns that the job adds."""
    digest = hashlib.sha256()
    for number, row in enumerate(rows):
        if held := {INDEX, COMPLETION} & {*row}:
            raise RowError(number, f"it has a column {held.pop()!r} already, which would be lost: rename it")
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
