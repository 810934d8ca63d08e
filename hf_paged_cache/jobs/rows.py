"""The rows of a job: of a file as they were written, or what a caller has in memory; the prompt in each; and a row as JSON.

Owns which kinds of files are read, and what a prompt may be. No value of a file is taken for a date, for a number or for nothing.
Rows of a file come from a copy that is made when the job begins, so that a file which is written anew meanwhile changes nothing.
Refuses what is no row or holds no prompt, with its place.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import pickle
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOSPC
from importlib.util import find_spec
from io import TextIOWrapper
from os import PathLike, fspath
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, overload

from fsspec.implementations.local import LocalFileSystem

from ..errors import CacheArgumentError
from ..wording import counted

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]
Prompt = str | Messages

COMPLETION = "completion"  # the column that a job adds
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_KINDS = {".jsonl": "JSON lines", ".json": "JSON", ".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_LINE = 0  # of a row that stands on no line of its own
_QUOTES = "a value with quotes, a delimiter or a line break in it is put in quotes, its own doubled"
_CHAT = "a chat as a list of messages with a role and a content"


class RowError(CacheArgumentError):
    """A row that a job cannot run with.

    Args:
        number: of the row, from 0.
        problem: what is wrong, and what to do.
    """

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"row {number}, counted from 0: {problem}")
        self.number, self.problem = number, problem


@contextmanager
def opened(prompts: Any, column: str) -> Iterator[Sequence[Row]]:
    """The rows of a file, or of what is in memory: a list of texts, of chats or of rows, or a `datasets.Dataset`.

    A `RowError` inside comes out with the place of its row.

    Raises:
        CacheArgumentError: a file or a row of it that cannot be read, or nothing that holds rows.
    """
    if not isinstance(prompts, str | PathLike):
        yield _in_memory(prompts, column)
        return
    if isinstance(prompts, str) and not Path(prompts).exists():
        raise CacheArgumentError(f"there is no file {prompts!r}; prompts themselves are given as a list")
    rows = _read(Path(fspath(prompts)))
    try:
        yield rows
    except RowError as error:
        raise CacheArgumentError(f"{rows.place(error.number)}: {error.problem}") from error


class _CopiedRows(Sequence[Row]):
    """Rows of a file, in a copy that goes with this process, however that ends.

    Args:
        path: of the file, for errors.
        rows: the line on which each begins, counted from 1, or `_NO_LINE`; and the row.
    """

    def __init__(self, path: Path, rows: Iterable[tuple[int, Any]]) -> None:
        self._path = path
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with its last reference
        self._starts, self._lines = array("q"), array("q")
        for line, row in rows:
            self._starts.append(self._file.tell())
            self._lines.append(line)
            if not isinstance(row, dict):
                raise CacheArgumentError(
                    f'{self.place(len(self) - 1)} is no JSON object; a row is one, such as {{"prompt": "..."}}'
                )
            pickle.dump(row, self._file)  # JSON would make texts of dates and of bytes

    def place(self, row: int) -> str:
        """Where a row is, for errors."""
        line = self._lines[row]
        return f"{self._path}, row {row}, counted from 0" if line == _NO_LINE else f"{self._path}, line {line}"

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        self._file.seek(self._starts[row])
        found: Row = pickle.load(self._file)
        return found


def _read(path: Path) -> _CopiedRows:
    """The rows of a file; a CSV's values are texts, also those that look like numbers."""
    is_compressed = path.suffix.lower() in COMPRESSED and len(path.suffixes) > 1
    suffix = path.suffixes[-2].lower() if is_compressed else path.suffix.lower()
    kind = _KINDS.get(suffix)
    if path.is_dir():
        raise CacheArgumentError(f"{path} is a folder; give a file")
    if not path.is_file():
        raise CacheArgumentError(f"there is no file {path}")
    if kind is None:
        raise CacheArgumentError(
            f"{path} is of no kind of file that is read: its name must end with {', '.join(_KINDS)}"
        )
    if not path.stat().st_size:
        raise CacheArgumentError(f"{path} is empty")
    if kind == "Parquet" and find_spec("pyarrow") is None:
        raise CacheArgumentError("reading Parquet needs pyarrow: pip install pyarrow, or '.[batch]'")
    try:
        with LocalFileSystem().open(str(path.absolute()), "rb", compression="infer") as file:
            if kind == "Parquet":
                return _CopiedRows(path, _parquet(file))
            if kind == "CSV":
                return _CopiedRows(path, _csv(file, path, "\t" if suffix == ".tsv" else ","))
            return _CopiedRows(path, _json(file, path, is_lines=kind == "JSON lines"))
    except CacheArgumentError:
        raise
    except UnicodeDecodeError as error:
        raise CacheArgumentError(f"{path} is not UTF-8 ({error.reason}); save it so") from error
    except OSError as error:
        if error.errno != ENOSPC:
            raise _unreadable(path, kind, error) from error
        raise CacheArgumentError(
            f"{path} is copied to {tempfile.gettempdir()} to be read, and there is no room for it; name another folder by TMPDIR"
        ) from error
    except Exception as error:  # of pyarrow and of what decompresses, each with kinds of its own
        raise _unreadable(path, kind, error) from error


def _unreadable(path: Path, kind: str, error: Exception) -> CacheArgumentError:
    said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
    return CacheArgumentError(f"{path} cannot be read as {kind} ({said})")


def _json(file: BinaryIO, path: Path, *, is_lines: bool) -> Iterator[tuple[int, Any]]:
    beginning = file.read(1024).removeprefix(_BYTE_ORDER_MARK).lstrip()
    file.seek(0)
    if beginning.startswith(b"[") and not is_lines:
        yield from ((_NO_LINE, row) for row in json.loads(file.read().decode("utf-8-sig")))
        return
    for number, line in enumerate(file, 1):
        text = line.removeprefix(_BYTE_ORDER_MARK).strip()
        if not text:
            continue
        try:
            yield number, json.loads(text)
        except UnicodeDecodeError as error:
            problem = f"is no JSON: it is not UTF-8 ({error.reason}); save the file so"
            raise CacheArgumentError(f"{path}, line {number} {problem}") from error
        except json.JSONDecodeError as error:
            problem = f"is no JSON ({error.msg}, at character {error.colno})"
            raise CacheArgumentError(f"{path}, line {number} {problem}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists in lists
            raise CacheArgumentError(f"{path}, line {number} cannot be read ({error})") from error


def _csv(file: BinaryIO, path: Path, delimiter: str) -> Iterator[tuple[int, Row]]:
    """Rows as long as the first one, which names the columns; what is empty after the last name is left out."""
    longest = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        lines = _csv_lines(
            path, csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        )
        _, names = next(lines, (1, []))
        if len(names) == 1 and (others := [each for each in ";\t|" if each in names[0]]):
            raise CacheArgumentError(
                f"{path} has {others[0]!r} between its columns; write it with commas, or with tabs as .tsv"
            )
        names = _without_empty_end(names, 1)
        if twice := {name for name in names if names.count(name) > 1}:
            raise CacheArgumentError(f"{path} has two columns {min(twice)!r}; rename one")
        for line, values in lines:
            values = _without_empty_end(values, len(names))
            if len(values) != len(names):
                found = f"has {counted(len(values), 'value')} for {counted(len(names), 'column')}"
                raise CacheArgumentError(f"{path}, line {line} {found}; {_QUOTES}")
            yield line, dict(zip(names, values, strict=True))
    finally:
        csv.field_size_limit(longest)


def _csv_lines(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Values that stand together, each with the line on which they begin; a blank line has none."""
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise CacheArgumentError(f"{path}, line {line} is no CSV ({error}); {_QUOTES}") from error
        if values is None:
            return
        if values:
            yield line, values


def _without_empty_end(values: list[str], least: int) -> list[str]:
    while len(values) > least and not values[-1]:
        values = values[:-1]
    return values


def _parquet(file: BinaryIO) -> Iterator[tuple[int, Row]]:
    from pyarrow.parquet import ParquetFile

    with tempfile.TemporaryFile() as copy:  # not all that decompresses can seek
        shutil.copyfileobj(file, copy)
        for batch in ParquetFile(copy).iter_batches(batch_size=1024):
            yield from ((_NO_LINE, row) for row in batch.to_pylist())


def _in_memory(prompts: Any, column: str) -> Sequence[Row]:
    kind = type(prompts).__name__
    if isinstance(prompts, Mapping) and all(hasattr(each, "column_names") for each in prompts.values()) and prompts:
        raise CacheArgumentError(f"prompts is of type {kind}; give one of its splits: {', '.join(map(repr, prompts))}")
    if isinstance(prompts, Mapping) or (hasattr(prompts, "to_dict") and hasattr(prompts, "columns")):
        how = ", to_dict('records')" if hasattr(prompts, "to_dict") else ""
        raise CacheArgumentError(f"prompts is of type {kind}, a table; give a list of its rows{how}")
    if hasattr(prompts, "with_format"):  # a dataset that gives its rows as tensors, too
        prompts = prompts.with_format(None)
    if hasattr(prompts, "column_names") and hasattr(prompts, "__len__"):
        return prompts  # type: ignore[no-any-return]
    try:
        given = list(prompts)
    except TypeError:
        raise CacheArgumentError(f"prompts is of type {kind}; give a file, or a list of texts, chats or rows") from None
    if given and all(isinstance(each, Mapping) and "role" in each and column not in each for each in given):
        raise CacheArgumentError("prompts is one chat, a list of messages; give a list of chats: [chat]")
    return [each if isinstance(each, Mapping) else {column: each} for each in given]


def prompt_of(row: Any, number: int, column: str) -> Prompt:
    """The text or the chat of a row, as it was written: a table fills up with None what a message has not.

    Raises:
        RowError: neither of them, or empty; or a row that cannot be written with its completion.
    """
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise RowError(number, "it is no object with names and values")
    if column not in row:
        problem = f"it has no column {column!r}; there are {', '.join(map(repr, row)) or 'none'}"
        raise RowError(number, f"{problem}: mend it, or name another (column, --column)")
    value: Any = row[column]
    if isinstance(value, str) and value:
        return value
    form = f"give a text, or {_CHAT}"
    if value is None or (isinstance(value, str | list) and not value):
        raise RowError(number, f"{column!r} is empty; {form}")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise RowError(number, f"{column!r} is of type {type(value).__name__}; {form}")
    if all(isinstance(each, int) for each in value):
        raise RowError(number, f"{column!r} is a list of numbers; give a text, and the tokenizer its token ids")
    for at, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(number, f"message {at} of {column!r} has no role; give {_CHAT}")
    return [{name: said for name, said in message.items() if said is not None} for message in value]


def require_room(rows: Iterable[Row]) -> None:
    """Refuse rows that have a column of the completion's name.

    Raises:
        RowError: of the first.
    """
    for number, row in enumerate(rows):
        if COMPLETION in row:
            raise RowError(number, f"it has a column {COMPLETION!r} already, which would be lost: rename it")


def require_prompts(path: Path, column: str, *, with_room: bool = False) -> None:
    """Refuse a file without rows, or with one that has no prompt, before a model is loaded.

    Args:
        with_room: also one with a row that has a completion; see `require_room`.

    Raises:
        CacheArgumentError: naming the first.
    """
    with opened(path, column) as rows:
        if not len(rows):
            raise CacheArgumentError(f"{path} holds no rows")
        for number in range(len(rows)):
            prompt_of(rows[number], number, column)
        if with_room:
            require_room(rows)


def digest_of(rows: Iterable[Row]) -> str:
    """Of all that the rows hold and JSON can say, whatever file they came from: 64 hexadecimal digits.

    Raises:
        RowError: a row that JSON cannot say.
    """
    digest = hashlib.sha256()
    for number, row in enumerate(rows):
        try:
            text = json.dumps(dict(row), default=_name_or_value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(number, f"it cannot be written as JSON ({error}); leave that out") from error
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON, which knows no NaN and no infinity: they are written as null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_json)
    except ValueError:
        text = json.dumps(_finite(json.loads(json.dumps(row, default=_as_json))), ensure_ascii=False)
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        text = json.dumps(json.loads(text))  # half of a surrogate pair has no bytes of its own
    return text + "\n"


def _as_json(value: Any) -> Any:
    """What a column may hold besides JSON: arrays and tensors, sets, bytes (as base64), dates and times, decimals."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # their own order is another one in each process
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _name_or_value(value: Any) -> Any:
    told = _as_json(value)
    return type(value).__name__ if isinstance(told, str) and " at 0x" in told else told  # an address is of this process


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
