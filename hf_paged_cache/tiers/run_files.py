"""Owns runs: rows of contents that are one file, or become one.

The disk tier writes what was evicted as runs, and `save` what is cached. A run is found in memory until its file is
written, and in the file from then on. A file that others have written is a run, too.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.hashing import TOKEN_BYTES, BlockHash
from ..blocks.roots import RootFacts
from ..kv.contents import Part
from .base import Kind, Name
from .folders import Folder, remove
from .saved_file import Identity, SavedContents, SavedFile, encoded, read_rows


class _Chunk(NamedTuple):
    """`_Chunk` has rows of one kind that came in at once. Copies from a device may be on the way."""

    names: Sequence[Name]
    rows: Sequence[Tensor]  # rows of each part, [N, bytes]
    arrival: Sequence[torch.Event]


class Run:
    """`Run` has rows of contents of one model.

    Args:
        path: path of the file.
        model: model that computed the contents.
        is_there: True if others have written the file; else rows are added until it is written.

    Attributes:
        file: what the file says of itself, once it is written.
        num_bytes: bytes of the file, or of the rows as long as the file is not written.
        is_ours: True if this process has written the file, or will write it.
        problem: why nothing of the run is found; None: there is no problem.
    """

    def __init__(self, path: Path, model: Identity | None = None, *, is_there: bool = False) -> None:
        self.path, self.is_ours = path, not is_there
        self.file: SavedFile | None = None
        self.problem: str | None = None
        self.num_bytes = 0
        self._model = model
        self._parts: dict[Kind, tuple[Part, ...]] = {}
        self._roots: dict[RootFacts, None] = {}
        self._chunks: dict[Kind, list[_Chunk]] | None = None if is_there else {}  # None: the run is not in memory
        self._is_dropped = False

    @property
    def is_in_memory(self) -> bool:
        """True if the run has not been written yet."""
        return self._chunks is not None

    def add(
        self,
        kind: Kind,
        parts: Sequence[Part],
        names: Sequence[Name],
        rows: Sequence[Tensor],
        roots: Collection[RootFacts],
        arrival: Sequence[torch.Event] = (),
    ) -> int:
        """Add rows to a run that is not being written yet.

        Args:
            rows: rows of each part, [N, bytes].
            roots: roots of these contents' sequences.

        Returns:
            The number of the first row among the rows of its kind.
        """
        assert self._chunks is not None
        self._parts.setdefault(kind, tuple(parts))
        self._roots.update(dict.fromkeys(roots))
        self.num_bytes += sum(of_part.nbytes for of_part in rows)
        before = self._chunks.get(kind, [])
        self._chunks[kind] = [*before, _Chunk(names, rows, arrival)]
        return sum(len(chunk.names) for chunk in before)

    def write(self, folder: Folder) -> None:
        """Write the rows into the file.

        Raises:
            OSError: the file cannot be written; the rows are lost.
        """
        try:
            if self._chunks and not self._is_dropped:
                file, data = self._encoded(self._chunks)
                folder.write(self.path, data)
                self.file, self.num_bytes = file, len(data)
        except OSError as error:
            self.problem = str(error)
            raise
        finally:
            self._chunks = None
            if self._is_dropped:
                remove(self.path)

    def _encoded(self, chunks_of: dict[Kind, list[_Chunk]]) -> tuple[SavedFile, bytes]:
        assert self._model is not None
        numbers: dict[BlockHash, int] = {}
        contents, rows = [], {}
        for kind, chunks in chunks_of.items():
            names = [name for chunk in chunks for name in chunk.names]
            blocks = tuple(numbers.setdefault(name.block_hash, len(numbers)) for name in names)
            contents.append(SavedContents(kind, self._parts[kind], blocks))
            rows[kind] = _joined(chunks)
        size = len(next(iter(numbers)).token_bytes) // TOKEN_BYTES
        facts, settings = self._model.facts, self._model.settings
        said = SavedFile(self.path, 0, size, facts, settings, (*self._roots,), (*numbers,), (*contents,))
        return encoded(said, rows)

    def read(self, kind: Kind, rows: Sequence[int]) -> list[Tensor]:
        """Return these rows of each part of a kind, on the host.

        Raises:
            OSError, DamagedFileError: the file is not there, or not what was written.
        """
        if (chunks := self._chunks) is not None:
            return [of_part[list(rows)] for of_part in _joined(chunks[kind])]
        if self.file is None:
            raise FileNotFoundError(f"{self.path} could not be written")
        return read_rows(self.file, kind, rows)

    def drop(self) -> None:
        """Remove the file, written already or not: nobody asks for it any more."""
        self._is_dropped = True
        if self.file is not None:
            remove(self.path)


def _joined(chunks: Sequence[_Chunk]) -> list[Tensor]:
    """Return the rows of each part, once all have arrived."""
    for chunk in chunks:
        for event in chunk.arrival:
            event.synchronize()
    return [torch.cat(of_part) for of_part in zip(*(chunk.rows for chunk in chunks), strict=True)]
