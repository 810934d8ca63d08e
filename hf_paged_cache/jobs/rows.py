"""Reads the rows of a job from a file or from memory, finds the prompt in each, and writes a row as JSON.

JSON lines and CSV are read as they were written: no value is taken for a date, a number or nothing. `datasets` reads
Parquet.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..errors import CacheArgumentError

Row = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]

INDEX, COMPLETION = "index", "completion"  # columns that a job adds
_FORM = "give a text, or a chat as a list of messages with a role and a content"
_NO_TEXT = ("image", "image_url", "video", "video_url", "audio")  # kinds of parts of a message


class RowError(CacheArgumentError):
    """Raised for a row, by its number from 0, that a job cannot run with: the arguments are number and problem."""

    def __str__(self) -> str:
        number, problem = self.args
        return f"row {number}, counted from 0: {problem}"


def read_rows(prompts: Any, column: str) -> Sequence[Row]:
    """Return the rows, each with a prompt, of a file or of a list of texts, of chats or of rows, such as a `datasets.Dataset`."""
    rows = _of_file(prompts) if isinstance(prompts, str | PathLike) else _in_memory(prompts, column)
    for number, row in enumerate(rows):
        prompt_of(row, number, column)
    return rows


def _of_file(prompts: str | PathLike[str]) -> list[Row]:
    path, readers = Path(prompts), {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}
    if path.is_dir():
        raise CacheArgumentError(f"{path} is a folder; give a file")
    if not path.is_file():
        hint = "; prompts themselves are given as a list" if isinstance(prompts, str) else ""
        raise CacheArgumentError(f"there is no file {path}{hint}")
    if path.suffix.lower() not in readers:
        raise CacheArgumentError(f"{path} is of no kind of file that is read: give {', '.join(readers)}")
    try:
        rows = [*readers[path.suffix.lower()](path)]
    except CacheArgumentError:
        raise
    except Exception as error:  # datasets and pyarrow have errors of their own
        said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise CacheArgumentError(f"{path} cannot be read ({said})") from error
    if not rows:
        raise CacheArgumentError(f"{path} holds no rows")
    return rows


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                said = getattr(error, "msg", error)
                raise CacheArgumentError(f"{path}, line {line} is no JSON ({said})") from error
            if not isinstance(row, dict):
                raise CacheArgumentError(f'{path}, line {line} is no JSON object, such as {{"prompt": "..."}}')
            yield row


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # for the whole process; the default is less than a long prompt
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for row in reader:
            if None in row or None in row.values():
                problem = f"{path}, line {reader.line_num} has not as many values as there are columns"
                raise CacheArgumentError(f"{problem}; put quotes round a value that has a comma in it")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    if find_spec("datasets") is None:
        raise CacheArgumentError("reading Parquet needs datasets: pip install datasets, or '.[batch]'")
    from datasets import load_dataset

    yield from load_dataset("parquet", data_files=escape(str(path.absolute())), split="train", streaming=True)


def _in_memory(prompts: Any, column: str) -> Sequence[Row]:
    kind = type(prompts).__name__
    if isinstance(prompts, Mapping) or hasattr(prompts, "columns"):
        how = "of a table, to_dict('records'); of a dataset, one of its splits"
        raise CacheArgumentError(f"prompts is of type {kind}; give a list of rows ({how})")
    if hasattr(prompts, "with_format"):  # a dataset that gives its rows as tensors, too
        prompts = prompts.with_format(None)
    if hasattr(prompts, "column_names") and hasattr(prompts, "__len__"):
        return prompts  # type: ignore[no-any-return]
    try:
        return [each if isinstance(each, Mapping) else {column: each} for each in prompts]
    except TypeError:
        raise CacheArgumentError(f"prompts is of type {kind}; give a file, or a list of texts, chats or rows") from None


def prompt_of(row: Any, number: int, column: str) -> Prompt:
    """Return the text or the chat of a row, as it was written. A table fills up with None what a message does not have."""
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise RowError(number, "it is no object with names and values")
    if column not in row:
        problem = f"it has no column {column!r}; there are {', '.join(map(repr, row)) or 'none'}"
        raise RowError(number, f"{problem}: mend it, or name another (column, --column)")
    value: Any = row[column]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list | tuple) or not value:
        problem = f"is of type {type(value).__name__}" if value else "is empty"
        raise RowError(number, f"{column!r} {problem}; {_FORM}")
    for at, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(number, f"message {at} of {column!r} has no role; {_FORM}")
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        if any(isinstance(part, dict) and part.get("type") in _NO_TEXT for part in parts):
            problem = f"message {at} of {column!r} is not of text alone"
            raise RowError(number, f"{problem}; give such chats to generate itself, with a PagedPrefixCache")
    return [{name: said for name, said in message.items() if said is not None} for message in value]


def digest_of(rows: Iterable[Row]) -> str:
    """Return hexadecimal digits of all that the rows hold; refuse what JSON cannot say, and columns that the job adds."""
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
