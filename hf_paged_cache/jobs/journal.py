"""The files of a job: its journal, which survives a killed process; its output, which follows from that; and the record of its end.

*OUT.journal* has a line a batch, appended and synced before the batch counts as done; the first line says what job it is. A line that
was being written when the process died has no end, and is cut off. *OUT* is written anew when a job resumes, and grows as batches are
done. *OUT.done* says what job it was, which bytes the output had, and what was counted: by it the same job, begun again, is found
done. An output without one, or with other bytes, is nobody's to take for done or to write over.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from filelock import FileLock, Timeout

from ..errors import CacheArgumentError
from .rows import COMPLETION, COMPRESSED, Row, json_line
from .summary import BatchSummary

Completion = str | list[str]  # several where `num_return_sequences` says so
Order = Literal["given", "done"]
ORDERS: tuple[Order, ...] = ("given", "done")

FORMAT = 2
_OTHER = "give another file, or overwrite it (overwrite, --overwrite)"


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
        path: of the file, which is made if it is not there; None: the journal ends with this object.
        job: name -> a JSON value, everything that shapes the results. Names are quoted to the user.
        num_rows: of the job.
        anew: forget a journal that is there.

    Raises:
        CacheArgumentError: a journal of another job that has begun is there; nothing has changed.
    """

    def __init__(self, path: Path | None, job: Mapping[str, Any], num_rows: int, *, anew: bool = False) -> None:
        self._path, self._num_rows = path, num_rows
        self._file = BytesIO() if path is None else _opened(path, {"format": FORMAT, **job}, anew)
        self._begin = self._end = self._file.tell()
        self._starts = array("q", [-1]) * num_rows  # row -> where its record begins in the file
        self.rows = array("q")  # that are done, in the order in which they were
        for start, record in self._read():
            self._note(record, start, self._file.tell())
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
        line = json.dumps(record._asdict(), ensure_ascii=False).encode() + b"\n"
        self._file.seek(self._end)
        if self._path is None:
            self._file.write(line)
        else:
            with naming(self._path):
                self._file.write(line)
                _sync(self._file)
        self._note(record, self._end, self._end + len(line))

    def completion(self, row: int) -> Completion:
        """Of a row that is done."""
        self._file.seek(self._starts[row])
        record = _record(self._file.readline(), self._num_rows)
        return record.completions[record.rows.index(row)]

    def records(self) -> Iterator[Record]:
        """All done batches, in the order in which they were done."""
        return (record for _, record in self._read())

    def remove(self) -> None:
        """The job is done, and its output written."""
        self._file.close()
        if self._path is not None:
            self._path.unlink()

    def _read(self) -> Iterator[tuple[int, Record]]:
        """Whole records, each with where it begins; ends at one that is torn or damaged."""
        end = self._begin
        while True:
            self._file.seek(end)
            line = self._file.readline()
            start, end = end, end + len(line)
            if not line.endswith(b"\n"):
                return
            try:
                record = _record(line, self._num_rows)
            except (ValueError, TypeError, RecursionError):
                return
            yield start, record

    def _note(self, record: Record, start: int, end: int) -> None:
        self.rows.extend(row for row in record.rows if row not in self)
        for row in record.rows:
            self._starts[row] = start
        self._end = end


class Output:
    """The input's rows with their completions, as JSON lines, as far as a journal has them. Open it with `with`.

    Args:
        path: of the file, which is written anew.
        rows: of the input.
        order: "given": as the input has them, as far as all before a row are done; "done": as batches are done.
    """

    def __init__(self, path: Path, journal: Journal, rows: Sequence[Row], order: Order) -> None:
        self._path, self._journal, self._rows = path, journal, rows
        self._order: Sequence[int] = journal.rows if order == "done" else range(len(rows))
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._num_written = 0
        self.write_on()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write_on(self) -> None:
        """Write what the journal has by now."""
        with naming(self._path):
            while self._num_written < len(self._order) and (row := self._order[self._num_written]) in self._journal:
                completed = {**self._rows[row], COMPLETION: self._journal.completion(row)}
                self._file.write(json_line(completed))
                self._num_written += 1
            self._file.flush()

    def finish(self) -> None:
        """Everything is done: it is on the disk when this returns."""
        os.fsync(self._file.fileno())


class Finished(NamedTuple):
    """A job that is done.

    Attributes:
        job: name -> a JSON value, everything that shapes the output.
        counts: what its summary says.
        output: of its bytes: how many, and their SHA-256.
        command: by which the output came; None: by no command.
    """

    job: dict[str, Any]
    counts: dict[str, Any]
    output: dict[str, Any]
    command: dict[str, Any] | None = None

    @property
    def summary(self) -> BatchSummary:
        """Of a run that found everything done."""
        return BatchSummary(**{**self.counts, "num_done_before": self.counts["num_prompts"]})


def record_of(out: Path) -> Path:
    """The file beside an output that says that it is finished."""
    return out.with_name(f"{out.name}.done")


def journal_of(out: Path) -> Path:
    """The file beside an output that says what is done."""
    return out.with_name(f"{out.name}.journal")


def note_finished(out: Path, job: Mapping[str, Any], summary: BatchSummary) -> None:
    """An output is written whole: note whose it is. Made whole or not at all."""
    record = Finished({"format": FORMAT, **job}, asdict(summary), _bytes_of(out))
    _write_whole(record_of(out), record._asdict())


def note_command(out: Path, command: Mapping[str, Any]) -> None:
    """Add to the record of a finished output by which command it came: the same one, given again, needs no model to know it."""
    record = json.loads(record_of(out).read_text("utf-8"))
    _write_whole(record_of(out), {**record, "command": command})


def finished_before(out: Path) -> Finished | None:
    """The record of the job that has finished an output; None: there is no output, or a job has begun it.

    Refuses an output that no job is known to have begun or finished. A job that has done nothing has written nothing, so an output
    with something in it is not its own. Changes nothing.

    Raises:
        CacheArgumentError: the output is nobody's, or not what was written; or what lies in the record's place is none.
    """
    path, journal = record_of(out), journal_of(out)
    if journal.exists() and _has_begun(journal):
        return None
    if not path.exists():
        if out.exists() and (out.stat().st_size or not journal.exists()):
            raise CacheArgumentError(f"{out} already exists: finished, or from another job; {_OTHER}")
        return None
    try:
        record = Finished(**json.loads(path.read_text("utf-8")))
        if record.job["format"] != FORMAT:
            raise ValueError("another format")
        _ = record.summary
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CacheArgumentError(
            f"{path} is no record of a finished job of this version, and would be lost: remove it, or {_OTHER}"
        ) from error
    if not out.exists():
        return None
    if _bytes_of(out) != record.output:
        raise CacheArgumentError(f"{out} already exists: it was finished, and has changed since; {_OTHER}")
    return record


def require_same(out: Path, record: Finished, job: Mapping[str, Any]) -> None:
    """Refuse an output that another job has finished.

    Raises:
        CacheArgumentError: it says what is different.
    """
    different = differences(record.job, {"format": FORMAT, **job})
    if different:
        raise CacheArgumentError(f"{out} already exists: finished, and from another job ({different}); {_OTHER}")


def require_writable(out: Path, prompts: object) -> None:
    """Refuse what a job cannot write."""
    if not out.parent.is_dir():
        raise CacheArgumentError(f"there is no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise CacheArgumentError(f"{out} is a folder; give a file to write into")
    if out.exists() and not out.is_file():
        raise CacheArgumentError(f"{out} is no regular file; give a file to write into")
    if out.suffix.lower() in (".csv", ".tsv", ".parquet", *COMPRESSED):
        raise CacheArgumentError(f"{out}: what is written are plain JSON lines; give a name that ends with .jsonl")
    if isinstance(prompts, str | PathLike) and out.exists() and Path(prompts).exists() and out.samefile(prompts):
        raise CacheArgumentError(f"{out} holds the prompts themselves, which would be lost; give another file")


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
        problem = f"another process is working on {out}: it holds {lock.lock_file}; wait for it, or give another file"
        if not Path(lock.lock_file).exists():
            problem = f"{out} cannot be written: no file can be made beside it"
        raise CacheArgumentError(problem) from None
    except OSError as error:
        raise CacheArgumentError(f"{out} cannot be written ({error})") from error
    try:
        yield
    finally:
        if not journal_of(out).exists():
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of writing to an open file, such as of a full disk, says which file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _opened(path: Path, job: Mapping[str, Any], anew: bool) -> BinaryIO:
    """The journal of this very job, at its first record. One of another job, in which nothing is done, is written anew."""
    if anew or not path.exists() or not path.stat().st_size or _differences_from(path, job):
        _write_whole(path, job)
    file = path.open("r+b")
    file.readline()
    return file


def _has_begun(path: Path) -> bool:
    """Whether something is done by a journal: it has a whole line after its first one."""
    with path.open("rb") as file:
        file.readline()
        return file.readline().endswith(b"\n")


def _differences_from(path: Path, job: Mapping[str, Any]) -> str:
    """In what the job of a journal differs from this one.

    Raises:
        CacheArgumentError: it differs, and has begun; or it is no journal.
    """
    with path.open("rb") as file:
        line = file.readline()
    try:
        before = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        before = None
    anew = "begin anew with overwrite (--overwrite)"
    if not isinstance(before, dict) or before.get("format") != FORMAT:
        raise CacheArgumentError(f"{path} is no journal of this version; remove it, or {anew}")
    different = differences(before, job)
    if different and _has_begun(path):
        raise CacheArgumentError(
            f"{path} is of another job: {different}. Resume it as it was begun, give another output file, or {anew}"
        )
    return different


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> str:
    """In which of their names two jobs differ, for the user; empty where they are one.

    Args:
        now: may hold what is JSON only when it is written.
        within: the name of both.
    """
    now = json.loads(json.dumps(now))
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return "; ".join(_difference(f"{within}{name}", before.get(name), now.get(name)) for name in names)


def _difference(name: str, before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        return differences(before, now, f"{name} ")
    if isinstance(before, str) and isinstance(now, str) and len(before) == len(now) == 64:  # digests
        return f"other {name}"
    if isinstance(before, dict | list) or isinstance(now, dict | list):
        return f"{name} has changed"
    return f"{name} was {json.dumps(before)} and is {json.dumps(now)}"


def _record(line: bytes, num_rows: int) -> Record:
    record = Record(**json.loads(line))
    if len(record.rows) != len(record.completions) or not all(row in range(num_rows) for row in record.rows):
        raise ValueError("a damaged record")
    if not all(isinstance(number, int | float) for number in {**record.counts}.values()):
        raise ValueError("a damaged record")
    return record


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """A file with a line of JSON: on the disk as a whole, or not there."""
    unfinished = path.with_name(f"{path.name}.new")
    with naming(path), unfinished.open("wb") as file:
        file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
        _sync(file)
    unfinished.replace(path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes_of(out: Path) -> dict[str, Any]:
    with out.open("rb") as file:
        return {"num_bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
