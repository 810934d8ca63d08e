"""A folder of saved blocks as a tier: what is in it is read like what was evicted, and nothing is ever put there or taken away.

Owns the names by which this process asks for what files name otherwise, and what became of each file.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import SavedBlocksError
from ..kv.contents import Part
from .base import Hold, Kind, Name, Rows, TierCounts
from .saved_file import SavedContents, SavedFile, read_rows


class _Place(NamedTuple):
    file: SavedFile
    content: SavedContents
    row: int


class SavedFolder:
    """Contents of files, by the names that this process has for them.

    Attributes:
        num_read_bytes: of rows, so far.
        damaged: path -> what was wrong with the file when rows of it were read; nothing of it is found from then on.
    """

    name = "disk"
    max_bytes = None

    def __init__(self) -> None:
        self.counts = TierCounts()
        self.damaged: dict[str, str] = {}
        self.num_read_bytes = 0
        self._places: dict[Kind, dict[Name, _Place]] = {}

    def add(self, file: SavedFile, content: SavedContents, row: int, name: Name) -> None:
        """A row of a file is what this process calls so."""
        self._places.setdefault(content.kind, {}).setdefault(name, _Place(file, content, row))

    @property
    def num_bytes(self) -> int:
        """Of the rows that can be found."""
        row_bytes = {kind: sum(part.num_bytes for part in self.parts_of(kind)) for kind in self._places}
        return sum(len(places) * row_bytes[kind] for kind, places in self._places.items())

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int:
        """Contents of a kind, of one namespace or of all."""
        return sum(namespace in (None, name.namespace) for name in self._places.get(kind, ()))

    def has(self, kind: Kind, name: Name) -> bool:
        """Whether this content can be read."""
        return name in self._places.get(kind, ())

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """Nothing: nothing goes."""

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Nothing: it is read only."""

    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        """What a row of this kind is made of; the same in all files of one model."""
        return next((place.content.parts for place in self._places.get(kind, {}).values()), ())

    def hold(self, kind: Kind, names: Iterable[Name]) -> Hold:
        """Nothing to do: nothing goes."""
        return Hold(())

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        """Those that are here, as they lie."""
        places = self._places.get(kind, {})
        return sorted(
            (name for name in names if name in places), key=lambda name: (str(places[name].file.path), places[name].row)
        )

    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Of each part, rows of the host in the order of the names, which must be `in_order`'s.

        Raises:
            OSError: a file has gone, or is not what was written.
        """
        places = [place for name in names if (place := self._places[kind].get(name)) is not None]
        if len(places) < len(names):
            raise OSError("a file was damaged that has contents that are to be read")
        loaded: list[list[Tensor]] = [[] for _ in self.parts_of(kind)]
        start = 0
        while start < len(places):
            file, content, _ = places[start]
            stretches: list[tuple[int, int]] = []
            while start < len(places) and places[start].file is file:
                row = places[start].row
                if stretches and sum(stretches[-1]) == row:
                    stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
                else:
                    stretches.append((row, 1))
                start += 1
            try:
                rows = read_rows(file, content, stretches)
            except (SavedBlocksError, OSError) as error:
                self._lose(file, str(error))
                raise OSError(str(error)) from error
            for fragments, of_part in zip(loaded, rows, strict=True):
                fragments += of_part
                self.num_read_bytes += sum(fragment.nbytes for fragment in of_part)
        self.counts.num_up += len(names)
        return loaded

    def _lose(self, file: SavedFile, why: str) -> None:
        self.damaged[str(file.path)] = why
        for places in self._places.values():
            for name in [name for name, place in places.items() if place.file is file]:
                del places[name]

    def forget(self, names: Collection[Name]) -> None:
        """Find these contents no more."""
        for places in self._places.values():
            for name in names:
                places.pop(name, None)

    def forget_namespace(self, namespace: bytes) -> None:
        """Find no content of a namespace."""
        self.forget([name for places in self._places.values() for name in places if name.namespace == namespace])

    def reset(self) -> None:
        """Find nothing any more; the files stay."""
        self._places.clear()

    def check(self) -> None:
        """Nothing to prove."""
