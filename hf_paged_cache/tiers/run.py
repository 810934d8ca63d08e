"""Owns runs: rows of contents of one model that are in host memory, in a file, or on the way into one."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..blocks import BlockHash, RootFacts
from ..kv.contents import Kind, Part
from .folder import Folder, remove
from .saved_file import ModelIdentity, SavedFile, encoded, read_rows


class Tier:
    """`Tier` counts what memory, or a folder, keeps; see `TierStats`."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self.name, self.max_bytes = name, max_bytes
        self.num_down = self.num_up = self.num_dropped = self.num_refused = 0


class Run:
    """`Run` has rows of contents, in memory until its file is written; or it is a file that others have written.

    `model` is None where it has no name in other processes, or where others wrote the file.
    """

    def __init__(
        self, tier: Tier, path: Path, model: ModelIdentity | None, namespace: bytes = b"", *, is_ours: bool
    ) -> None:
        self.tier, self.path, self.model, self.namespace, self.is_ours = tier, path, model, namespace, is_ours
        self.key = b"" if model is None else model.digest, namespace
        self.file: SavedFile | None = None  # what the file says of itself, once it is there
        self.problem: str | None = None  # why nothing of the run is found
        self.num_bytes = 0  # of the file, or of memory, which torch deals out in powers of two
        self.is_adopted = False  # contents of a file that others have written are found
        # kind -> parts of a row, the block of each row, and each row: [1, bytes] of each part; None: not in memory
        self._rows: dict[Kind, tuple[tuple[Part, ...], list[BlockHash], list[list[Tensor]]]] | None = None
        if is_ours:
            self._rows = {}
        self._roots: dict[RootFacts, None] = {}
        self._is_dropped = False

    @property
    def is_in_memory(self) -> bool:
        """True until the file is written."""
        return self._rows is not None

    def content_keys(self) -> list[tuple[Kind, bytes]]:
        """Return kind and digest of each content."""
        if self.file is not None:
            return self.file.content_keys()
        return [(kind, block.digest) for kind, (_, blocks, _) in (self._rows or {}).items() for block in blocks]

    def add(
        self, kind: Kind, parts: Sequence[Part], block_hash: BlockHash, row: list[Tensor], root: RootFacts | None
    ) -> int:
        """Add a content; return its number among the contents of its kind. Nobody writes the run yet."""
        assert self._rows is not None
        _, blocks, rows = self._rows.setdefault(kind, (tuple(parts), [], []))
        blocks.append(block_hash)
        if root is not None:
            self._roots[root] = None
        rows.append(row)
        self.num_bytes += sum(1 << (of_part.nbytes - 1).bit_length() for of_part in row)
        return len(rows) - 1

    def write(self, folder: Folder) -> None:
        """Write the rows into the file.

        Raises:
            OSError: the file cannot be written; the rows are lost.
        """
        try:
            if self._rows and self.model is not None and not self._is_dropped:
                rows_of = {kind: (parts, blocks, _joined(rows)) for kind, (parts, blocks, rows) in self._rows.items()}
                file, data = encoded(self.path, self.model, self._roots, rows_of)
                folder.write(self.path, data)
                self.file, self.num_bytes = file, len(data)
        except OSError as error:
            self.problem = str(error)
            raise
        finally:
            self._rows = None
            if self._is_dropped:
                remove(self.path)

    def read(self, kind: Kind, numbers: Sequence[int]) -> list[list[Tensor]]:
        """Return these rows, for each part in one or some tensors of the host: [N, bytes].

        Raises:
            OSError, DamagedFileError: the file is not there, or not what was written.
        """
        if (in_memory := self._rows) is not None:  # the file may be written at any time
            rows = [in_memory[kind][2][number] for number in numbers]
            return [[*of_part] for of_part in zip(*rows, strict=True)]
        if self.file is None:
            raise FileNotFoundError(f"{self.path} could not be written")
        return [[of_part] for of_part in read_rows(self.file, kind, numbers)]

    def drop(self) -> None:
        """Remove the file, written already or not: nobody asks for it any more."""
        self._is_dropped = True
        if self.file is not None:
            remove(self.path)


def _joined(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(of_part) for of_part in zip(*rows, strict=True)]
