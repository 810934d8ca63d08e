"""What of a job is done, in a file beside its output that survives a killed process.

A line a batch, appended and synced before the batch counts as done; the first line says what job it is. A line that was being
written when the process died has no end, and is cut off. Owns no order of rows: that is the output's.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from ..errors import CacheArgumentError

Completion = str | list[str]  # several where `num_return_sequences` says so

FORMAT = 2


class Record(NamedTuple):
    """A batch that is done.

    Attributes:
        rows: numbers of its rows in the input.
        completions: of each row.
        counts: name -> what was counted and timed.
    """

    rows: list[int]
    completions: list[Completion]
    counts: dict[str, float]


class Journal:
    """The done batches of one job. Open it with `with`, in a process that has the output (`claimed`).

    Args:
        path: of the file, which is made if it is not there.
        job: name -> a JSON value, everything that shapes the results. Names are quoted to the user.
        num_rows: of the job.
        anew: forget a journal that is there.

    Raises:
        CacheArgumentError: a journal of another job that has begun is there; nothing has changed.
    """

    def __init__(self, path: Path, job: Mapping[str, Any], num_rows: int, *, anew: bool = False) -> None:
        self.path, self._num_rows = path, num_rows
        self._file = _opened(path, {"format": FORMAT, **json.loads(json.dumps(job))}, anew)
        self._starts = array("q", [-1]) * num_rows  # row -> where its record begins in the file
        self.num_done = 0
        self._end = self._file.tell()
        for start, record in _records(self._file, num_rows):
            self._note(record.rows, start)
            self._end = self._file.tell()
        self._file.truncate(self._end)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def __contains__(self, row: int) -> bool:
        """Whether a row is done."""
        return self._starts[row] >= 0

    def add(self, record: Record) -> None:
        """Note a batch as done: it is on the disk when this returns."""
        start, line = self._end, json.dumps(record._asdict(), ensure_ascii=False).encode() + b"\n"
        with naming(self.path):
            self._file.seek(start)
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        self._end = start + len(line)
        self._note(record.rows, start)

    def completion(self, row: int) -> Completion:
        """Of a row that is done, read from the file."""
        self._file.seek(self._starts[row])
        record = _record(self._file.readline(), self._num_rows)
        return record.completions[record.rows.index(row)]

    def records(self) -> Iterator[Record]:
        """All done batches, in the order in which they were done."""
        self._file.seek(0)
        self._file.readline()
        for _, record in _records(self._file, self._num_rows):
            end = self._file.tell()
            yield record
            self._file.seek(end)

    def remove(self) -> None:
        """The job is done, and its output written."""
        self._file.close()
        self.path.unlink()

    def _note(self, rows: Sequence[int], start: int) -> None:
        for row in rows:
            self.num_done += self._starts[row] < 0
            self._starts[row] = start


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of writing to an open file, such as of a full disk, says which file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Have an output and its journal to this process alone.

    Raises:
        CacheArgumentError: another process has them.
    """
    lock = FileLock(f"{journal_of(out)}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        if not Path(lock.lock_file).exists():
            raise CacheArgumentError(f"{out} cannot be written: no file can be made beside it") from None
        raise CacheArgumentError(
            f"another process is working on {out}: it holds {lock.lock_file}; wait for it, or give another file"
        ) from None
    except OSError as error:
        raise CacheArgumentError(f"{out} cannot be written ({error})") from error
    try:
        yield
    finally:
        if not journal_of(out).exists():
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def journal_of(out: Path) -> Path:
    """The file beside an output that says what is done."""
    return out.with_name(f"{out.name}.journal")


def _opened(path: Path, job: Mapping[str, Any], anew: bool) -> BinaryIO:
    """The journal of this very job, at its first record; made whole or not at all."""
    if anew or not path.exists() or not _is_of(job, path):
        unfinished = path.with_name(f"{path.name}.new")
        with unfinished.open("wb") as begun:
            begun.write(json.dumps(job, ensure_ascii=False).encode() + b"\n")
            begun.flush()
            os.fsync(begun.fileno())
        unfinished.replace(path)
    file = path.open("r+b")
    file.readline()
    return file


def _is_of(job: Mapping[str, Any], path: Path) -> bool:
    """Whether the journal is of this job; one of another job in which nothing is done is of none.

    Raises:
        CacheArgumentError: it is of another job, and says what is different; or it is no journal.
    """
    with path.open("rb") as file:
        line, has_begun = file.readline(), bool(file.readline())
    if not line:
        return False
    try:
        before = json.loads(line)
    except ValueError:
        before = None
    if not isinstance(before, dict) or before.get("format") != FORMAT:
        raise CacheArgumentError(
            f"{path} is no journal of this version; remove it, or begin anew with overwrite (--overwrite)"
        )
    different = differences(before, job)
    if different and has_begun:
        raise CacheArgumentError(
            f"{path} is of another job: {different}. Go on as it was begun, give another output file, or begin anew with overwrite "
            "(--overwrite)"
        )
    return not different


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In which of their names two jobs differ, for the user; empty where they are one.

    Args:
        now: may hold what is JSON only when it is written.
    """
    now = json.loads(json.dumps(now))
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return "; ".join(_difference(name, before.get(name), now.get(name)) for name in names)


def _difference(name: str, before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [each for each in {**before, **now} if before.get(each) != now.get(each)]
        return "; ".join(_difference(f"{name} {each}", before.get(each), now.get(each)) for each in names)
    are_short = all(value is None or isinstance(value, int | float | bool | str) for value in (before, now))
    are_digests = isinstance(before, str) and isinstance(now, str) and len(before) == len(now) == 64
    if are_digests or not are_short:
        return f"other {name}" if are_digests else f"{name} has changed"
    return f"{name} was {json.dumps(before)} and is {json.dumps(now)}"


def _records(file: BinaryIO, num_rows: int) -> Iterator[tuple[int, Record]]:
    """Whole records from the file's position on, each with where it begins; ends at one that is torn or damaged."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            return
        try:
            yield start, _record(line, num_rows)
        except (ValueError, TypeError, RecursionError):
            return


def _record(line: bytes, num_rows: int) -> Record:
    record = Record(**json.loads(line))
    if len(record.rows) != len(record.completions) or not all(row in range(num_rows) for row in record.rows):
        raise ValueError("a damaged record")
    if not isinstance(record.counts, dict) or not all(isinstance(n, int | float) for n in record.counts.values()):
        raise ValueError("a damaged record")
    return record
