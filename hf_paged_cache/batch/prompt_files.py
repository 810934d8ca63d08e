"""The rows of a file of prompts as they were written: no value is taken for a date, for a number or for nothing.

Owns which kinds of files are read. JSON lines are read from the file itself, one by one where they are needed; CSV and Parquet go
through `datasets`.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, overload

import fsspec

from ..errors import CacheArgumentError

Row = Mapping[str, Any]

_KINDS = {".jsonl": "JSON lines", ".json": "JSON", ".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_rows(path: Path, folder: Path) -> Sequence[Row]:
    """The rows of a file; a CSV's values are texts, also those that look like numbers.

    Args:
        folder: for what is made of a CSV, of Parquet and of a compressed file; rows are read from there until it is removed.

    Raises:
        CacheArgumentError: no such file, of no kind that is read, or not readable. Of JSON lines a row that cannot be read raises it
            when it is asked for.
    """
    is_compressed = path.suffix.lower() in _COMPRESSED and len(path.suffixes) > 1
    suffix = path.suffixes[-2].lower() if is_compressed else path.suffix.lower()
    kind = _KINDS.get(suffix)
    if kind is None:
        raise CacheArgumentError(
            f"{path} is of no kind of file that is read: its name must end with {', '.join(_KINDS)}; prompts themselves are given as a list"
        )
    if not path.is_file():
        raise CacheArgumentError(f"there is no file {path}")
    if not path.stat().st_size:
        raise CacheArgumentError(f"{path} is empty")
    if kind in ("CSV", "Parquet") and find_spec("datasets") is None:
        raise CacheArgumentError(f"reading {kind} needs datasets: pip install datasets, or '.[batch]'")
    try:
        plain = _decompressed(path, folder / f"rows{suffix}") if is_compressed else path
        if kind in ("CSV", "Parquet"):
            return _table(plain, folder, suffix)
        if kind == "JSON" and plain.read_bytes()[:1024].removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
            rows: list[Row] = json.loads(plain.read_text("utf-8-sig"))
            return rows
        return _JsonLines(path, plain)
    except Exception as error:  # of pyarrow, pandas and datasets, each with kinds of its own
        cause = error.__cause__ or error
        said = shorten(f"{type(cause).__name__}: {cause}", 200, placeholder=" ...")
        raise CacheArgumentError(f"{path} cannot be read as {kind} ({said})") from error


def _decompressed(path: Path, plain: Path) -> Path:
    with fsspec.open(path, "rb", compression="infer") as file, plain.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    return plain


def _table(path: Path, folder: Path, suffix: str) -> Sequence[Row]:
    """Rows of a CSV or of Parquet, mapped from the disk."""
    import datasets
    import pandas as pd

    link = folder / f"table{suffix}"  # a path as the user has it may be a pattern to `datasets`
    link.symlink_to(path.resolve())
    how: dict[str, Any] = {}
    if suffix != ".parquet":
        separator = "\t" if suffix == ".tsv" else ","
        beginning = pd.read_csv(link, sep=separator, nrows=1)
        if beginning.empty:
            return []
        texts = datasets.Features({name: datasets.Value("string") for name in beginning.columns})
        how = {"sep": separator, "features": texts, "keep_default_na": False, "na_filter": False}
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        reader = "parquet" if suffix == ".parquet" else "csv"
        rows: Sequence[Row] = datasets.load_dataset(
            reader, data_files=str(link), split="train", cache_dir=str(folder), **how
        )
        return rows
    finally:
        if had_bars:
            datasets.enable_progress_bars()


class _JsonLines(Sequence[Row]):
    """Objects, one a line; blank lines are none.

    Args:
        name: of the file, for errors.
        path: of the lines.
    """

    def __init__(self, name: Path, path: Path) -> None:
        self._name = name
        self._file = path.open("rb")
        self._starts, self._numbers = array("q"), array("q")  # of the lines that are not blank
        start = 0
        for number, line in enumerate(self._file):
            if line.removeprefix(_BYTE_ORDER_MARK).strip():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)

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
        where = f"{self._name} cannot be read: line {self._numbers[row] + 1}"
        try:
            found = json.loads(self._file.readline().removeprefix(_BYTE_ORDER_MARK))
        except (ValueError, RecursionError) as error:
            raise CacheArgumentError(f"{where} is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise CacheArgumentError(f"{where} is no JSON object, which a row is")
        return found
