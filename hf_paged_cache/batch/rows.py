"""The rows of a job: a file read with `datasets`, or what a caller has in memory; and the prompt in each.

Owns which files are read and what a prompt may be. Refuses, with the number of the row, what is none.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..errors import CacheArgumentError
from .output import COMPLETION

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]
Prompt = str | Messages

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@contextmanager
def opened(prompts: Any, column: str) -> Iterator[Sequence[Row]]:
    """The rows of a file, or of what is in memory: a list of texts, of chats or of rows, or a `datasets.Dataset`.

    What `datasets` makes of a file lies in a folder that is removed at the end; its rows are read from there one by one.

    Raises:
        CacheArgumentError: no such file, of no kind that is read, not readable, without rows, or without the column.
    """
    if isinstance(prompts, str | PathLike):
        with tempfile.TemporaryDirectory(prefix="hf-paged-cache-", ignore_cleanup_errors=True) as folder:
            rows = _read(Path(fspath(prompts)), folder)
            yield _checked(rows, rows.column_names, str(prompts), column)
        return
    given = prompts if hasattr(prompts, "column_names") else list(prompts)
    if not len(given):
        yield given
        return
    if hasattr(given, "column_names"):
        yield _checked(given, given.column_names, "the dataset", column)
    elif isinstance(given[0], Mapping):
        yield _checked(given, list(given[0]), "the first row", column)
    else:
        yield [{column: each} for each in given]


def _checked(rows: Any, names: Sequence[str], where: str, column: str) -> Any:
    if column not in names:
        raise CacheArgumentError(
            f"{where} has no column {column!r}; there are {', '.join(map(repr, names))}: say which one with column"
        )
    if COMPLETION in names:
        raise CacheArgumentError(f"{where} has a column {COMPLETION!r} already, which would be lost: rename it")
    return rows


def _read(path: Path, folder: str) -> Any:
    suffix = path.suffixes[-2] if path.suffix in _COMPRESSED and len(path.suffixes) > 1 else path.suffix
    reader = _READERS.get(suffix.lower())
    if reader is None:
        raise CacheArgumentError(f"{path} is of no kind that is read: its name must end with {', '.join(_READERS)}")
    if not path.is_file():
        raise CacheArgumentError(f"there is no file {path}")
    if not path.stat().st_size:
        raise CacheArgumentError(f"{path} is empty")
    if find_spec("datasets") is None:
        raise CacheArgumentError("reading a file of prompts needs datasets: pip install datasets, or '.[batch]'")
    import datasets

    how: dict[str, Any] = {"sep": "\t"} if suffix.lower() == ".tsv" else {}
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(reader, data_files=fspath(path), split="train", cache_dir=folder, **how)
    except Exception as error:  # of pyarrow, pandas and datasets, each with kinds of its own
        cause = error.__cause__ or error
        said = shorten(f"{type(cause).__name__}: {cause}", 200, placeholder=" ...")
        raise CacheArgumentError(f"{path} cannot be read as {reader} ({said})") from error
    finally:
        if had_bars:
            datasets.enable_progress_bars()


def prompt_of(row: Row, number: int, column: str) -> Prompt:
    """The text or the chat of a row, as it was written: a table fills up with None what a message has not.

    Raises:
        CacheArgumentError: neither of them, or empty.
    """
    value: Any = row.get(column)
    if isinstance(value, str) and value:
        return value
    are_messages = (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and value
        and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in value)
    )
    if are_messages:
        return [{name: said for name, said in message.items() if said is not None} for message in value]
    what = "is empty" if value in ("", [], None) else f"is of type {type(value).__name__}"
    raise CacheArgumentError(
        f"row {number}: {column!r} {what}; give a text, or a chat as a list of messages with a role and a content"
    )


def digest_of(rows: Sequence[Row], to_json: Callable[[Any], Any] = str) -> str:
    """Of all that the rows hold, whatever file they came from: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(dict(row), default=to_json, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()
