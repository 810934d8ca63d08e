"""Owns runs: rows of contents of one model that are one file, or become one.

The disk tier writes what was evicted as runs, and `save` what is cached. A run is found in memory until its file is
written, and in the file from then on. A file that others have written is a run, too.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.hashing import TOKEN_BYTES, BlockHash
from ..blocks.roots import RootFacts
from ..kv.contents import Kind, Part
from .folders import Folder, remove
from .saved_file import Identity, SavedContents, SavedFile, encoded, read_rows


class _Gathered(NamedTuple):
    """`_Gathered` has the contents of one kind that a file is to hold: the block of each, and its row of each part."""

    parts: tuple[Part, ...]
    contents: list[tuple[BlockHash, Sequence[Tensor]]]  # rows are [1, bytes] on the host


class Run:
    """`Run` has rows of contents of one model.

    Args:
        model: model that computed the contents; None: others have written the file.

    Attributes:
        file: what the file says of itself, once it is written.
        num_bytes: bytes of the file, or of the rows as long as the file is not written.
        is_ours: True if this process has written the file, or will write it.
        problem: why nothing of the run is found; None: there is no problem.
    """

    def __init__(self, path: Path, model: Identity | None = None) -> None:
        self.path, self.is_ours = path, model is not None
        self.file: SavedFile | None = None
        self.problem: str | None = None
        self.num_bytes = 0
        self._model = model
        self._roots: dict[RootFacts, None] = {}
        self._arrival: list[torch.Event] = []  # events of copies that are on the way
        self._gathered: dict[Kind, _Gathered] | None = {} if self.is_ours else None  # None: not in memory
        self._is_dropped = False

    @property
    def is_in_memory(self) -> bool:
        """True if the run has not been written yet."""
        return self._gathered is not None

    def add(self, kind: Kind, parts: Sequence[Part], block_hash: BlockHash, row: Sequence[Tensor]) -> int:
        """Add a content to a run that is not being written yet; return its number among the contents of its kind."""
        assert self._gathered is not None
        contents = self._gathered.setdefault(kind, _Gathered(tuple(parts), [])).contents
        contents.append((block_hash, row))
        self.num_bytes += sum(of_part.nbytes for of_part in row)
        return len(contents) - 1

    def note(self, roots: Iterable[RootFacts], arrival: Iterable[torch.Event] = ()) -> None:
        """Note the roots of sequences whose contents are added, and when these contents have arrived."""
        self._roots.update(dict.fromkeys(roots))
        self._arrival += arrival

    def write(self, folder: Folder) -> None:
        """Write the rows into the file.

        Raises:
            OSError: the file cannot be written; the rows are lost.
        """
        try:
            if self._gathered and not self._is_dropped:
                file, data = self._encoded(self._gathered)
                folder.write(self.path, data)
                self.file, self.num_bytes = file, len(data)
        except OSError as error:
            self.problem = str(error)
            raise
        finally:
            self._gathered = None
            if self._is_dropped:
                remove(self.path)

    def _encoded(self, gathered: dict[Kind, _Gathered]) -> tuple[SavedFile, bytes]:
        assert self._model is not None
        self._wait()
        numbers: dict[BlockHash, int] = {}
        contents, rows = [], {}
        for kind, (parts, of_kind) in gathered.items():
            at = tuple(numbers.setdefault(block_hash, len(numbers)) for block_hash, _ in of_kind)
            contents.append(SavedContents(kind, parts, at))
            rows[kind] = _joined(row for _, row in of_kind)
        size = len(next(iter(numbers)).token_bytes) // TOKEN_BYTES
        facts, settings = self._model.facts, self._model.settings
        said = SavedFile(self.path, 0, size, facts, settings, (*self._roots,), (*numbers,), (*contents,))
        return encoded(said, rows)

    def _wait(self) -> None:
        for event in [*self._arrival]:
            event.synchronize()

    def read(self, kind: Kind, numbers: Sequence[int]) -> list[Tensor]:
        """Return these rows of each part of a kind, on the host.

        Raises:
            OSError, DamagedFileError: the file is not there, or not what was written.
        """
        if (gathered := self._gathered) is not None:
            self._wait()
            return _joined(gathered[kind].contents[at][1] for at in numbers)
        if self.file is None:
            raise FileNotFoundError(f"{self.path} could not be written")
        return read_rows(self.file, kind, numbers)

    def drop(self) -> None:
        """Remove the file, written already or not: nobody asks for it any more."""
        self._is_dropped = True
        if self.file is not None:
            remove(self.path)


def _joined(rows: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Return for each part the rows of some contents as one tensor."""
    return [torch.cat(of_part) for of_part in zip(*rows, strict=True)]
