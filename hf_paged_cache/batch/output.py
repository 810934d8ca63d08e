"""The output file of a job: input rows with their completions, as JSON lines, in the order asked for.

It follows from the journal, so it is written anew when a job goes on, and grows as batches are done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ..errors import CacheArgumentError
from .journal import Completion, Journal, Record, naming
from .json_rows import json_line
from .prompt_files import COMPRESSED
from .rows import COMPLETION

Order = Literal["given", "done"]
ORDERS: tuple[Order, ...] = ("given", "done")


class Output:
    """Writes what the journal says is done. Open it with `with`.

    Args:
        path: of the file, which is written anew.
        row: number -> the input's row.
        order: "given": as the input has them, as far as all before a row are done; "done": as batches are done.
    """

    def __init__(
        self, path: Path, journal: Journal, row: Callable[[int], Mapping[str, Any]], num_rows: int, order: Order
    ) -> None:
        self._path = path
        self._journal, self._row, self._num_rows, self._order = journal, row, num_rows, order
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._num_written = 0
        with naming(path):
            if order == "done":
                for record in journal.records():
                    self._write(record)
            else:
                self._write_on()
            self._file.flush()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def take(self, record: Record) -> None:
        """A batch is done, and in the journal."""
        with naming(self._path):
            if self._order == "done":
                self._write(record)
            else:
                self._write_on()
            self._file.flush()

    def finish(self) -> None:
        """Everything is done: it is on the disk when this returns."""
        os.fsync(self._file.fileno())

    def _write(self, record: Record) -> None:
        for row, completion in zip(record.rows, record.completions, strict=True):
            self._write_row(row, completion)

    def _write_on(self) -> None:
        while self._num_written < self._num_rows and self._num_written in self._journal:
            self._write_row(self._num_written, self._journal.completion(self._num_written))

    def _write_row(self, row: int, completion: Completion) -> None:
        self._file.write(json_line({**self._row(row), COMPLETION: completion}))
        self._num_written += 1


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
