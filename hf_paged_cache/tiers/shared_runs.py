"""Runs of contents in files that any process with the same model reads: those that this one writes, and those that it has found.

A run of this process is found in its memory until its file is written. Names in it are those that every process has.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch
from torch import Tensor

from ..blocks.hashing import TOKEN_BYTES, BlockHash
from ..errors import SavedBlocksError
from ..kv.contents import Part
from .base import Kind, Name
from .run_files import Run
from .saved_file import (
    SUFFIX,
    SavedBlock,
    SavedContents,
    SavedFile,
    SavedOrigin,
    content_name,
    read_rows,
    read_saved_file,
    write_saved_file,
)
from .shared_folder import SharedFolder

_BYTES_OF_A_PIECE = 2**8  # in a header, at most; and of each other thing there
_BYTES_OF_A_TOKEN = 8  # written as text


class Sharing(Protocol):
    """What other processes understand, and what of theirs is understood here."""

    @property
    def num_models(self) -> int: ...  # states of this model that rows were computed under

    def origin_of(self, root: bytes) -> SavedOrigin | None: ...  # None: it means nothing to others

    def why_not(self, file: SavedFile, block_size: int) -> str | None: ...  # nothing of a file is found here


def file_bytes_of(parts: Sequence[Part], name: Name) -> int:
    """Of one content in a file for all, at most."""
    num_tokens = len(name.block_hash.token_bytes) // TOKEN_BYTES
    header = _BYTES_OF_A_PIECE * (1 + len(parts)) + _BYTES_OF_A_TOKEN * num_tokens
    return sum(part.num_bytes for part in parts) + header


class SharedRun(Run):
    """A run that becomes a file for all.

    Args:
        folder: where.
        origin: of the first content that comes in; all are of this model.

    Attributes:
        may_wait: for other processes that write.
    """

    is_shared = True

    def __init__(self, folder: SharedFolder, origin: SavedOrigin) -> None:
        super().__init__()
        self.may_wait = True
        self.num_bytes += len(json.dumps([dict(origin.facts), dict(origin.settings)])) + _BYTES_OF_A_PIECE
        self._folder = folder
        self._model = origin
        self._origins: dict[bytes, SavedOrigin] = {}
        self._chunks: list[tuple[Kind, Sequence[Name]]] = []
        self._parts: dict[Kind, Sequence[Part]] = {}
        self._name = uuid4().hex[:8]  # another process may write the same contents
        self._path: Path | None = None
        self._file: SavedFile | None = None

    def note(
        self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], origins: Sequence[SavedOrigin | None]
    ) -> None:
        """Say what the next chunk is."""
        if kind not in self._parts:
            self.num_bytes += _BYTES_OF_A_PIECE * (1 + sum(1 + len(part.pieces) for part in parts))
        self._parts[kind] = parts
        self._chunks.append((kind, names))
        for origin in origins:
            if origin is not None and origin.root.digest not in self._origins:
                self._origins[origin.root.digest] = origin
                self.num_bytes += _BYTES_OF_A_PIECE + 2 * len(origin.root.regime)
        # rows are counted by `add`
        self.num_bytes += sum(file_bytes_of((), name) + _BYTES_OF_A_PIECE // 4 * len(parts) for name in names)

    def path_to_be(self) -> Path:
        """Where its file is, or will be."""
        if self._path is None:
            self._path = self._folder.path / f"{content_name(self._described())[:32]}-{self._name}{SUFFIX}"
        return self._path

    def _described(self) -> SavedFile:
        """What its file will say."""
        numbers: dict[BlockHash, int] = {}
        of_kind: dict[Kind, list[int]] = {}
        for kind, names in self._chunks:
            of_kind.setdefault(kind, []).extend(numbers.setdefault(name.block_hash, len(numbers)) for name in names)
        blocks = tuple(SavedBlock(each.digest, each.parent, each.token_bytes) for each in numbers)
        parents = {block.parent for block in blocks}
        roots = tuple(origin.root for digest, origin in self._origins.items() if digest in parents)
        contents = tuple(
            SavedContents(kind, tuple(self._parts[kind]), tuple(rows), ()) for kind, rows in of_kind.items()
        )
        block_size = len(blocks[0].token_bytes) // TOKEN_BYTES if blocks else 1
        return SavedFile(Path(), 0, block_size, self._model.facts, self._model.settings, roots, blocks, contents)

    def _write_file(self, content: list, path: Path) -> None:  # type: ignore[type-arg]
        file = self._described()._replace(path=path)
        rows: dict[Kind, list[list[Tensor]]] = {}
        for (kind, _), chunk in zip(self._chunks, content, strict=True):
            for number, of_part in enumerate(chunk.rows):
                rows.setdefault(kind, [[] for _ in chunk.rows])[number].append(of_part)
        joined = {kind: [_joined(of_part) for of_part in of_kind] for kind, of_kind in rows.items()}

        def write() -> int:
            self._file = write_saved_file(file, joined, self._folder.mode)
            return self._file.num_bytes

        if not self._folder.write(self.num_bytes, write, may_wait=self.may_wait):
            self.is_lost = True

    def _read_file(self, path: Path, places: Sequence[tuple[int, int, int]], num_parts: int) -> list[list[Tensor]]:
        assert self._file is not None  # it is written
        kind, firsts, counts = self._chunks[places[0][0]][0], [], dict.fromkeys(self._parts, 0)
        for of_chunk, names in self._chunks:
            firsts.append(counts[of_chunk])
            counts[of_chunk] += len(names)
        return _rows_of(self._file, kind, [(firsts[chunk] + first, number) for chunk, first, number in places])

    @property
    def file(self) -> SavedFile | None:
        """What its file says, once it is written."""
        return self._file


class FoundRun(Run):
    """A run that somebody else has written."""

    is_shared = True

    def __init__(self, file: SavedFile) -> None:
        super().__init__()
        self.num_bytes = file.num_bytes
        self.is_closed = True
        self._content = file.path
        self.file = file

    def names_of(self, content: SavedContents) -> list[Name]:
        """Of its rows."""
        blocks = (self.file.blocks[number] for number in content.blocks)
        return [Name(BlockHash(block.digest, block.token_bytes, block.parent), b"") for block in blocks]

    def _read_file(self, path: Path, places: Sequence[tuple[int, int, int]], num_parts: int) -> list[list[Tensor]]:
        kind = self.file.contents[places[0][0]].kind
        return _rows_of(self.file, kind, [(first, number) for _, first, number in places])


def is_replaced(run: Run) -> bool:
    """Whether what is called like a run's file is whole, and another one."""
    file = run.file if isinstance(run, SharedRun | FoundRun) else None
    if file is None:
        return False
    try:
        return read_saved_file(file.path).contents != file.contents
    except (OSError, SavedBlocksError):
        return False


def _rows_of(file: SavedFile, kind: Kind, rows: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
    content = next(content for content in file.contents if content.kind == kind)
    return read_rows(file, content, rows)


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
