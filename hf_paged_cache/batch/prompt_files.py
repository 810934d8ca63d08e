"""The rows of a file of prompts, read with `datasets` and as they were written: no value is taken for a date, a number or nothing.

Owns which kinds of files are read. Rows are read one by one where they are needed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from os import fspath
from pathlib import Path
from textwrap import shorten
from typing import Any, overload

from ..errors import CacheArgumentError

Row = Mapping[str, Any]

_READERS = {".jsonl": "JSON lines", ".json": "JSON", ".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def read_rows(path: Path, folder: str) -> Sequence[Row]:
    """The rows of a file; a CSV's values are texts, also those that look like numbers.

    Args:
        folder: for what `datasets` makes of the file; rows are read from there until it is removed.

    Raises:
        CacheArgumentError: no such file, of no kind that is read, or not readable. Asking for a row raises it where that is no JSON object.
    """
    suffix = path.suffixes[-2] if path.suffix in _COMPRESSED and len(path.suffixes) > 1 else path.suffix
    kind = _READERS.get(suffix.lower())
    if kind is None:
        raise CacheArgumentError(f"{path} is of no kind that is read: its name must end with {', '.join(_READERS)}")
    if not path.is_file():
        raise CacheArgumentError(f"there is no file {path}")
    if not path.stat().st_size:
        raise CacheArgumentError(f"{path} is empty")
    if find_spec("datasets") is None:
        raise CacheArgumentError("reading a file of prompts needs datasets: pip install datasets, or '.[batch]'")
    import datasets

    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        if kind == "JSON" and (listed := _json_list(path)) is not None:
            return listed
        rows: Sequence[Row] = (
            _csv(path, folder, "\t" if suffix.lower() == ".tsv" else ",")
            if kind == "CSV"
            else _loaded("parquet", path, folder)
            if kind == "Parquet"
            else _JsonLines(path, _loaded("text", path, folder, encoding="utf-8-sig"))
        )
    except Exception as error:  # of pyarrow, pandas and datasets, each with kinds of its own
        cause = error.__cause__ or error
        said = shorten(f"{type(cause).__name__}: {cause}", 200, placeholder=" ...")
        raise CacheArgumentError(f"{path} cannot be read as {kind} ({said})") from error
    finally:
        if had_bars:
            datasets.enable_progress_bars()
    return rows


def _loaded(reader: str, path: Path, folder: str, **how: Any) -> Any:
    import datasets

    return datasets.load_dataset(reader, data_files=fspath(path), split="train", cache_dir=folder, **how)


def _csv(path: Path, folder: str, separator: str) -> Any:
    import datasets
    import pandas as pd

    names = pd.read_csv(path, sep=separator, nrows=0).columns
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return _loaded("csv", path, folder, sep=separator, features=features, keep_default_na=False, na_filter=False)


def _json_list(path: Path) -> list[Any] | None:
    """The elements of a file that is one JSON list; None: it is another one."""
    import fsspec

    with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
        if not file.read(1024).lstrip().startswith("["):
            return None
        file.seek(0)
        rows: list[Any] = json.load(file)
    return rows


class _JsonLines(Sequence[Row]):
    """Objects, one a line; blank lines are none.

    Args:
        lines: a `datasets.Dataset` with the column `text`.
    """

    def __init__(self, path: Path, lines: Any) -> None:
        self._path, self._lines = path, lines
        texts = (text for part in lines.iter(1000) for text in part["text"])
        self._numbers = array("q", (number for number, text in enumerate(texts) if text.strip()))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        number = self._numbers[row]
        try:
            found = json.loads(self._lines[number]["text"])
        except ValueError as error:
            raise CacheArgumentError(f"{self._path} cannot be read: line {number + 1} is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise CacheArgumentError(
                f"{self._path} cannot be read: line {number + 1} is no JSON object, which a row is"
            )
        return found
