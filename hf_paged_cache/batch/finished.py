"""The record of a finished job, in a file beside its output: by it the same job, begun again, is found done.

It says what job it was, which bytes the output had, and what was counted. An output without one, or with other bytes, is nobody's
to take for done or to write over.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CacheArgumentError
from .journal import FORMAT, differences, journal_of

_OTHER = "give another file, or overwrite it (overwrite, --overwrite)"


class Finished(NamedTuple):
    """A job that is done.

    Attributes:
        job: name -> a JSON value, everything that shapes the output.
        counts: what its summary says.
        output: of its bytes: how many, and their SHA-256.
    """

    job: dict[str, Any]
    counts: dict[str, Any]
    output: dict[str, Any]


def record_of(out: Path) -> Path:
    """The file beside an output that says that it is finished."""
    return out.with_name(f"{out.name}.done")


def note_finished(out: Path, job: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """An output is written whole: note whose it is. Made whole or not at all."""
    record = Finished({"format": FORMAT, **job}, dict(counts), _bytes_of(out))
    path = record_of(out)
    unfinished = path.with_name(f"{path.name}.new")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(record._asdict(), file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def finished_before(out: Path) -> Finished | None:
    """The record of the job that has finished an output; None: there is no output, or a job has begun it.

    Refuses an output that no job is known to have begun or finished. Changes nothing.

    Raises:
        CacheArgumentError: the output is nobody's, or not what was written; or what lies in the record's place is none.
    """
    path = record_of(out)
    if journal_of(out).exists():
        return None
    if not path.exists():
        if out.exists():
            raise CacheArgumentError(f"{out} already exists: finished, or from another job; {_OTHER}")
        return None
    try:
        record = Finished(**json.loads(path.read_text("utf-8")))
        if record.job["format"] != FORMAT or not isinstance(record.counts, dict):
            raise ValueError("another format")
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


def _bytes_of(out: Path) -> dict[str, Any]:
    with out.open("rb") as file:
        return {"num_bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
