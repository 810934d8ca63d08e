"""The rows of a file of prompts as they were written: no value is taken for a date, for a number or for nothing.

Owns which kinds of files are read. Rows come from a copy that is made when the job begins, so that a file which is written anew
meanwhile changes nothing. Parquet is read with `datasets`.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, overload

from fsspec.implementations.local import LocalFileSystem

from ..errors import CacheArgumentError
from ..wording import counted

Row = Mapping[str, Any]

_KINDS = {".jsonl": "JSON lines", ".json": "JSON", ".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_rows(path: Path, folder: Path) -> Sequence[Row]:
    """The rows of a file; a CSV's values are texts, also those that look like numbers.

    Args:
        folder: for what is made of Parquet; rows are read from there until it is removed.

    Raises:
        CacheArgumentError: no such file, of no kind that is read, or not readable. Of JSON lines a row that cannot be read raises it
            when it is asked for.
    """
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
    if kind == "Parquet" and find_spec("datasets") is None:
        raise CacheArgumentError("reading Parquet needs datasets: pip install datasets, or '.[batch]'")
    try:
        with LocalFileSystem().open(str(path.absolute()), "rb", compression="infer") as file:
            if kind == "Parquet":
                return _parquet(file, folder)
            if kind == "CSV":
                return _csv(file, path, "\t" if suffix == ".tsv" else ",")
            return _json(file, path, is_lines=kind == "JSON lines")
    except CacheArgumentError:
        raise
    except UnicodeDecodeError as error:
        raise CacheArgumentError(f"{path} is not UTF-8 ({error.reason}); save it so") from error
    except Exception as error:  # of pyarrow and datasets, each with kinds of its own
        cause = error.__cause__ or error
        said = shorten(f"{type(cause).__name__}: {cause}", 200, placeholder=" ...")
        raise CacheArgumentError(f"{path} cannot be read as {kind} ({said})") from error


class Lines(Sequence[Row]):
    """Rows that were written on lines of a file, in a copy with an object of JSON on each line.

    Args:
        path: of the file, for errors.
        rows: the line on which each begins, counted from 1, and its object of JSON.
    """

    def __init__(self, path: Path, rows: Iterable[tuple[int, bytes]]) -> None:
        self._path = path
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # gone with this process, however that ends
        self._starts, self._lines = array("q"), array("q")
        for line, text in rows:
            self._starts.append(self._file.tell())
            self._lines.append(line)
            self._file.write(text.rstrip() + b"\n")

    def place(self, row: int) -> str:
        """Where a row is, for errors."""
        return f"{self._path}, line {self._lines[row]}"

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        self._file.seek(self._starts[row])
        try:
            found = json.loads(self._file.readline().rstrip())
        except UnicodeDecodeError as error:
            raise CacheArgumentError(
                f"{self.place(row)} is no JSON: it is not UTF-8 ({error.reason}); save the file so"
            ) from error
        except json.JSONDecodeError as error:
            raise CacheArgumentError(
                f"{self.place(row)} is no JSON ({error.msg}, at character {error.colno})"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists in lists
            raise CacheArgumentError(f"{self.place(row)} cannot be read ({error})") from error
        if not isinstance(found, dict):
            raise CacheArgumentError(f"{self.place(row)} is no JSON object, which a row is")
        return found


def _json(file: BinaryIO, path: Path, *, is_lines: bool) -> Sequence[Row]:
    beginning = file.read(1024).removeprefix(_BYTE_ORDER_MARK).lstrip()
    file.seek(0)
    if beginning.startswith(b"[") and not is_lines:
        rows: list[Row] = json.loads(file.read().decode("utf-8-sig"))
        return rows
    lines = ((number, line.removeprefix(_BYTE_ORDER_MARK)) for number, line in enumerate(file, 1))
    return Lines(path, ((number, line) for number, line in lines if line.strip()))


def _csv(file: BinaryIO, path: Path, delimiter: str) -> Sequence[Row]:
    """Rows as long as the first one, which names the columns; what is empty behind the last name is left out."""
    with _values_of_any_length():
        reader = csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        return Lines(path, _csv_rows(reader, path))


def _csv_rows(reader: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    names: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise CacheArgumentError(
                f"{path}, line {line} is no CSV ({error}); a value with quotes or line breaks in it is put in quotes, its own doubled"
            ) from error
        if values is None:
            return
        if not values:  # a blank line
            continue
        if names is None:
            if len(values) == 1 and (others := [each for each in ";\t|" if each in values[0]]):
                raise CacheArgumentError(
                    f"{path} has {others[0]!r} between its columns; write it with commas, or with tabs as .tsv"
                )
            names = _without_empty_end(values, 1)
            if twice := {name for name in names if names.count(name) > 1}:
                raise CacheArgumentError(f"{path} has two columns {min(twice)!r}; rename one")
            continue
        values = _without_empty_end(values, len(names))
        if len(values) != len(names):
            raise CacheArgumentError(
                f"{path}, line {line} has {counted(len(values), 'value')} for {counted(len(names), 'column')}; a value with a delimiter "
                "or a line break in it is put in quotes"
            )
        yield line, json.dumps(dict(zip(names, values, strict=True))).encode()


def _without_empty_end(values: list[str], least: int) -> list[str]:
    while len(values) > least and not values[-1]:
        values = values[:-1]
    return values


@contextmanager
def _values_of_any_length() -> Iterator[None]:
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet(file: BinaryIO, folder: Path) -> Sequence[Row]:
    """Rows mapped from the disk."""
    import datasets
    import pyarrow.parquet

    copy = folder / "table.parquet"  # a path as the user has it may be a pattern to `datasets`
    with copy.open("wb") as written:
        shutil.copyfileobj(file, written)
    pyarrow.parquet.read_schema(copy)  # of a damaged file `datasets` logs an error, besides raising one
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows: Sequence[Row] = datasets.load_dataset(
            "parquet", data_files=str(copy), split="train", cache_dir=str(folder)
        )
        return rows
    finally:
        if had_bars:
            datasets.enable_progress_bars()
