"""Contents in files: found by the names that this process has for them, and read. A folder of saved blocks is attached so."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from ..blocks.hashing import BlockHash
from ..errors import BlockStateError, SavedBlocksError
from ..kv.contents import Part, runs
from .base import Kind, Name, Rows, Shelf, Tier
from .runs import Run


class Place(NamedTuple):
    """Where a content lies."""

    run: Run
    row: int  # among the run's of its kind


class FileTier(Tier):
    """Files that are read, and neither written nor removed.

    Attributes:
        num_read_bytes: of rows, so far.
    """

    name = "disk"

    def __init__(self) -> None:
        super().__init__()
        self.num_read_bytes = 0
        self._shelves: dict[Kind, Shelf[Place]] = {}
        self._runs: OrderedDict[Run, None] = OrderedDict()  # the least recently used first

    @property
    def num_bytes(self) -> int:
        return sum(run.num_bytes for run in self._runs)

    @property
    def damaged(self) -> dict[str, str]:
        """Path -> what was wrong with the file when it was read; nothing of it is found from then on."""
        return {str(run.path): run.problem for run in self._runs if run.problem is not None}

    def _place_of(self, kind: Kind, name: Name) -> Place | None:
        place: Place | None = self._shelf(kind).get(name)
        return None if place is None or place.run.problem is not None else place

    def has(self, kind: Kind, name: Name) -> bool:
        return self._place_of(kind, name) is not None

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        order = {run: number for number, run in enumerate(self._runs)}
        place_of = {name: place for name in names if (place := self._place_of(kind, name)) is not None}
        return sorted(place_of, key=lambda name: (order.get(place_of[name].run, -1), place_of[name].row))

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """Nothing: nothing goes."""

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Nothing: it is read only."""

    def adopt(
        self, run: Run, parts_of: Mapping[Kind, Sequence[Part] | None], name_of: Callable[[BlockHash], Name | None]
    ) -> None:
        """What a file has is found from here on.

        Args:
            parts_of: of each of its kinds, what rows are made of here; None: they cannot be used here.
            name_of: what this process calls a block; None: nothing.
        """
        assert run.file is not None  # it was found
        self._runs.setdefault(run)
        for content in run.file.contents:
            if (parts := parts_of[content.kind]) is None:
                continue
            shelf = self._shelf_for(content.kind, parts)
            for row, number in enumerate(content.blocks):
                name = name_of(run.file.blocks[number])
                if name is not None:
                    self._add(shelf, content.kind, name, Place(run, row))

    def _shelf_for(self, kind: Kind, parts: Sequence[Part]) -> Shelf[Place]:
        """Rows of a kind are made of these parts from here on; what is made of others is found no more."""
        shelf = self._shelves.get(kind)
        if shelf is None or shelf.parts != tuple(parts):
            for run in list(dict.fromkeys(place.run for _, place in shelf or ())):
                self._drop(run, keeps_file=run.is_shared)
            shelf = self._shelves[kind] = Shelf(parts)
        return shelf

    def _add(self, shelf: Shelf[Place], kind: Kind, name: Name, place: Place) -> None:
        """A content is found, if none has its digest."""
        if not shelf.has_digest(name):
            place.run.names[kind, name] = None
            shelf.add(name, place)

    def _drop(self, run: Run, *, keeps_file: bool = False) -> None:
        """Nothing of a run is found any more.

        Args:
            keeps_file: other processes may still find it.
        """
        for kind, name in run.names:
            if self._shelves[kind].get(name) is not None:
                self._shelves[kind].remove(name)
        del self._runs[run]

    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Of each part, rows of the host in the order of the names. No lock need be held.

        Raises:
            OSError: a file is not there, or not what was written; nothing of it is found from here on.
        """
        places = [place for name in names if (place := self._place_of(kind, name)) is not None]
        if len(places) < len(names):
            raise OSError("contents were dropped that are to be read")
        loaded: list[list[Tensor]] = [[] for _ in self.parts_of(kind)]
        for run, group in groupby(places, lambda place: place.run):
            rows = [place.row for place in group]
            try:
                found = run.read(kind, [(rows[start], length) for start, length in runs(rows)])
            except (OSError, SavedBlocksError) as error:
                self._lose(run, error)
                raise error if isinstance(error, OSError) else OSError(str(error)) from error
            for fragments, of_part in zip(loaded, found, strict=True):
                fragments += of_part
                self.num_read_bytes += sum(fragment.nbytes for fragment in of_part)
        self.counts.num_up += len(names)
        return loaded

    def _lose(self, run: Run, error: Exception) -> None:
        """A file cannot be read: nothing of it is found any more."""
        run.problem = str(error)

    def forget(self, names: Collection[Name]) -> None:
        """Keep these contents no more; files of which nothing is wanted go, and those for all of which anything is not."""
        emptied: dict[Run, None] = {}
        for kind, shelf in self._shelves.items():
            for name in names:
                if (place := shelf.get(name)) is not None:
                    shelf.remove(name)
                    place.run.names.pop((kind, name), None)
                    if not place.run.names or place.run.is_shared:
                        emptied[place.run] = None
        for run in emptied:
            self._drop(run)

    def reset(self) -> None:
        """Find nothing any more; files that others have written stay."""
        for run in list(self._runs):
            self._drop(run, keeps_file=run.is_found)

    def check(self) -> None:
        for kind, shelf in self._shelves.items():
            strays = [name for name, place in shelf if place.run not in self._runs]
            if strays:
                raise BlockStateError(f"{len(strays)} contents of kind {kind!r} are in runs that were dropped")
