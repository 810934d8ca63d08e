"""Contents in files: found by the names that this process has for them, and read. A folder of saved blocks is attached so, and the
disk tier writes them: a folder in shared memory makes it a host tier for a CPU, and for all processes on it.

What is evicted is gathered in memory, up to a few MB, and written by a thread; until then it is found there. Nobody who computes waits
for a file to be written. Files are dropped whole, the least recently used first. What has a name that other processes understand is
written for them, too, and what they write is found; all else lies in a folder of this process, and goes with it.
"""

import contextlib
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

from ..blocks.arguments import OWNERS_ALONE
from ..blocks.hashing import BlockHash
from ..errors import BlockStateError, CacheArgumentError, SavedBlocksError
from ..kv.contents import Part, events_on, host_rows, runs
from .base import Kind, Name, Rows, Shelf, Tier
from .folders import OwnFolder, SharedFolder, make_folder, remove
from .run_files import Run, Writer, content_bytes, kind_bytes
from .saved_file import DamagedFileError, read_saved_file, saved_paths
from .sharing import Origin, Sharing

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # gathered before a file is written
_MOST_WAITING_BYTES = 2**29  # in memory and not yet written; beyond that, what is evicted is lost
_SPARE_BYTES = 2**14  # of headers
_DEFAULT_SHARE = 0.5  # of what the folder's disk has free


class _Place(NamedTuple):
    """Where a content lies."""

    run: Run
    row: int  # among the run's of its kind

    @property
    def position(self) -> tuple[str, int]:
        return str(self.run.path), self.row


class FileTier(Tier):
    """Files that are read, and neither written nor removed.

    Attributes:
        num_read_bytes: of rows, so far.
    """

    name = "disk"

    def __init__(self) -> None:
        super().__init__()
        self.num_read_bytes = 0
        self._shelves: dict[Kind, Shelf[_Place]] = {}
        self._runs: OrderedDict[Run, None] = OrderedDict()  # the least recently used first
        self._num_bytes = 0  # of these

    def _derive(self) -> None:
        self._num_bytes = sum(run.num_bytes for run in self._runs)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def damaged(self) -> dict[str, str]:
        """Path -> what was wrong with the file when it was read; nothing of it is found from then on."""
        return {str(run.path): run.problem for run in self._runs if run.problem is not None}

    def _place_of(self, kind: Kind, name: Name) -> _Place | None:
        place: _Place | None = self._shelf(kind).get(name)
        return None if place is None or place.run.problem is not None else place

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """Nothing: nothing goes."""

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Nothing: it is read only."""

    def attach(self, run: Run) -> None:
        """A run is here; `adopt` says how its contents are found."""
        with self._changing():
            self._runs[run] = None
            self._num_bytes += run.num_bytes

    def adopt(
        self, run: Run, parts_of: Mapping[Kind, Sequence[Part] | None], name_of: Callable[[BlockHash], Name | None]
    ) -> None:
        """What a file has is found from here on, if it is still there.

        Args:
            parts_of: of each of its kinds, what rows are made of here; None: they cannot be used here.
            name_of: what this process calls a block; None: nothing.
        """
        file = run.file
        if file is None or run not in self._runs:
            return
        for content in file.contents:
            if (parts := parts_of[content.kind]) is not None:
                shelf = self._shelf_for(content.kind, parts)
                for row, number in enumerate(content.blocks):
                    if (name := name_of(file.blocks[number])) is not None:
                        self._add(shelf, content.kind, name, _Place(run, row))

    def _shelf_for(self, kind: Kind, parts: Sequence[Part]) -> Shelf[_Place]:
        """Rows of a kind are made of these parts from here on; what is made of others is found no more."""
        shelf = self._shelves.get(kind)
        if shelf is None or shelf.parts != tuple(parts):
            for run in list(dict.fromkeys(place.run for _, place in shelf or ())):
                self._drop(run, keeps_file=run.is_shared)
            shelf = self._shelves[kind] = Shelf(parts)
        return shelf

    def _add(self, shelf: Shelf[_Place], kind: Kind, name: Name, place: _Place) -> None:
        """A content is found, if none has its digest."""
        if not shelf.has_digest(name):
            place.run.names[kind, name] = None
            shelf.add(name, place)

    def _drop(self, run: Run, *, keeps_file: bool = False) -> None:
        """Nothing of a run is found any more.

        Args:
            keeps_file: other processes may still find it.
        """
        with self._changing():
            for kind, name in run.names:
                if self._shelves[kind].get(name) is not None:
                    self._shelves[kind].remove(name)
            del self._runs[run]
            self._num_bytes -= run.num_bytes

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
        self._settle()
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
        self._settle()
        for kind, shelf in self._shelves.items():
            strays = [name for name, place in shelf if place.run not in self._runs]
            if strays:
                raise BlockStateError(f"{len(strays)} contents of kind {kind!r} are in runs that were dropped")
        if self._num_bytes != sum(run.num_bytes for run in self._runs):
            raise BlockStateError(f"a disk tier counts {self._num_bytes} bytes, and its runs have others")


class DiskTier(FileTier):
    """Contents in files of one folder, at most `max_bytes`.

    Files that are this process's alone lie in a folder of its own in it, which goes with the store. What a process has left of
    these that died is removed by the next one.

    Args:
        folder: made if it is not there.
        max_bytes: of all files, those of other processes too that are for all; None: half of what is free there now.
        sharing: what other processes understand of its contents; None: nothing.
        mode: permissions of files that are for other processes, too.

    Attributes:
        run_bytes: gathered before a file is written.

    Raises:
        CacheArgumentError: the folder cannot be made or written.
    """

    max_bytes: int

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        sharing: Sharing | None = None,
        mode: int = OWNERS_ALONE,
    ) -> None:
        super().__init__()
        parent = Path(folder).expanduser().absolute()
        try:
            make_folder(parent, mode)
            self._begin(parent)
            free = shutil.disk_usage(parent).free
        except OSError as error:
            raise CacheArgumentError(
                f"disk_folder is {os.fspath(folder)!r}, which cannot be written: {error}"
            ) from error
        self.max_bytes = int(free * _DEFAULT_SHARE) if max_bytes is None else max_bytes
        self.run_bytes = _RUN_BYTES
        self.sharing = sharing
        self._parent, self._mode = parent, mode
        self._known: dict[Path, Run | None] = {}  # files for all, and those to be; None: that are not to be found
        self._forget_all()

    def _begin(self, parent: Path) -> None:
        """A folder of this process."""
        self._writer, self._own = Writer(), OwnFolder(parent)
        # that gather: the one of this process, b"", and those of models, by what these are
        self._open: dict[bytes, Run] = {}
        self._waiting: list[Run] = []  # to be written, dropped ones that are being written among them
        self._clean = finalize(self, _end, self._own, self._writer, self._open)

    def _forget_all(self) -> None:
        self._shelves, self._runs = {}, OrderedDict()
        self._known = {path: None for path, run in self._known.items() if run is None}
        self._shared = SharedFolder(self._parent, self.max_bytes, self._mode)
        self._open.clear()
        self._num_bytes = 0

    def _settle(self) -> None:
        """In a forked child the files are the parent's: begin with none."""
        super()._settle()
        if self._own.pid != os.getpid():
            self._clean.detach()
            self._begin(self._parent)
            self._forget_all()

    def __repr__(self) -> str:
        return f"DiskTier({str(self._parent)!r}, {self.num_bytes} of {self.max_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """That files take, or will take when they are written."""
        return self._num_bytes + sum(run.num_bytes for run in self._in_memory() if run not in self._runs)

    @property
    def num_waiting_bytes(self) -> int:
        """In memory, not yet in a file."""
        return sum(run.num_bytes for run in self._in_memory())

    def _in_memory(self) -> list[Run]:
        self._waiting = [run for run in self._waiting if run.is_in_memory]
        return self._waiting

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        for name in names:
            place = self._place_of(kind, name)
            if place is not None and place.run in self._runs:
                self._runs.move_to_end(place.run)
                place.run.use()

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        self._settle()
        shelf = self._shelf_for(kind, parts)
        self.touch(kind, names)
        new = [index for index, name in enumerate(names) if not shelf.has_digest(name)]
        roots = {names[index].root for index in new}
        origins = {root: None if self.sharing is None else self.sharing.origin_of(root) for root in roots}
        of_model: dict[bytes, list[int]] = {}  # b"": of this process alone
        for index in new:
            origin = origins[names[index].root]
            of_model.setdefault(b"" if origin is None else origin.model.digest, []).append(index)
        for model, indices in of_model.items():
            step = max(1, self.run_bytes // content_bytes(parts, names[indices[0]]))
            for start in range(0, len(indices), step):
                some = indices[start : start + step]
                found = [origin for index in some if (origin := origins[names[index].root]) is not None]
                self._gather(model, found, kind, parts, [names[index] for index in some], _chosen(rows, some))

    def _gather(
        self,
        model: bytes,
        origins: Sequence[Origin],
        kind: Kind,
        parts: Sequence[Part],
        names: Sequence[Name],
        rows: Rows,
    ) -> None:
        """Keep contents of one model, if there is room for all of them."""
        num_bytes = sum(content_bytes(parts, name) for name in names) + kind_bytes(parts) + _SPARE_BYTES
        if self.num_waiting_bytes + num_bytes > _MOST_WAITING_BYTES or not self._make_room(num_bytes):
            self.counts.num_refused += len(names)
            return
        on_host = [
            of_part if of_part.device.type == "cpu" else host_rows(part, len(names)).copy_(of_part, non_blocking=True)
            for part, of_part in zip(parts, rows, strict=True)
        ]
        arrival = events_on(of_part.device for of_part in rows)
        run = self._open.get(model)
        if run is None or run.is_closed or run not in self._runs:
            run = Run(self._shared, origins[0].model) if origins else Run(self._own)
            self.attach(run)
            self._waiting.append(run)
        with self._changing():
            before = run.num_bytes
            first = run.add(kind, parts, names, on_host, [origin.root for origin in origins], arrival)
            self._num_bytes += run.num_bytes - before
            self._runs.move_to_end(run)
            for row, name in enumerate(names, first):
                self._add(self._shelves[kind], kind, name, _Place(run, row))
            self.counts.num_down += len(names)
            self._open[model] = run
            if run.num_bytes >= self.run_bytes:
                run.is_closed = True
                if run.is_shared:
                    self._known[run.path] = run
                self._writer.give(run)
                self._open.pop(model, None)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop files until so much more may be kept; whether it may."""
        if num_bytes > self.max_bytes:
            return False
        held: set[bytes] | None = None
        while self.num_bytes + num_bytes > self.max_bytes:
            if held is None:
                held = {digest for shelf in self._shelves.values() for digest in shelf.held()}
            oldest = next((run for run in self._runs if not self._must_stay(run, held)), None)
            if oldest is None:
                return False
            self.counts.num_dropped += len(oldest.names)
            self._drop(oldest)
        self._shared.num_beside = sum(run.num_bytes for run in self._runs if not run.is_shared)
        return True

    def _must_stay(self, run: Run, held: Collection[bytes]) -> bool:
        """Whether somebody reads of it, or its file is there anyway until it is written."""
        return run.is_being_written or (bool(held) and any(name.digest in held for _, name in run.names))

    def _drop(self, run: Run, *, keeps_file: bool = False) -> None:
        super()._drop(run)
        if run.path in self._known:
            self._known[run.path] = None
        if not (keeps_file and run.is_closed):
            run.drop()

    def _lose(self, run: Run, error: Exception) -> None:
        super()._lose(run, error)
        if isinstance(error, DamagedFileError):
            remove(run.path)

    def reset(self) -> None:
        """Keep nothing, remove all files that this process has written, and find no others that are there now."""
        self._settle()
        super().reset()
        self._forget_all()

    def check(self) -> None:
        super().check()
        own = self.num_bytes - sum(run.num_bytes for run in self._runs if run.is_found)
        counts = {"counts": own, "has": _bytes_in(self._own.path)}  # others may have left more, until this one writes
        if max(counts.values()) > self.max_bytes:
            raise BlockStateError(f"a disk tier of at most {self.max_bytes} bytes is larger: {counts}")

    def distrust(self) -> None:
        """What this process has written for others may be wrong: those files go."""
        self._settle()
        for run in [run for run in self._runs if run.is_shared and not run.is_found]:
            self._drop(run)

    def look(self) -> list[Run]:
        """Files for all that have come since this was asked last, of whatever model; those that have gone are found no more.

        What is damaged is removed, and said.
        """
        self._settle()
        written = [run for run in self._known.values() if run and not run.is_in_memory]  # others are there soon
        try:
            looked = self._shared.look(self._known)
        except OSError as error:
            logger.warning("PagedPrefixCache: disk_folder cannot be read: %s", error)
            return []
        if looked is None:
            return []
        there, new = looked
        for run in written:
            if run.path not in there:
                self._drop(run, keeps_file=True)
        self._known = {path: run for path, run in self._known.items() if run or path in there}
        found: list[Run] = []
        for path in new:
            self._known[path] = new_run = self._found(path)
            if new_run is not None:
                self.attach(new_run)
                found.append(new_run)
        return found

    def _found(self, path: Path) -> Run | None:
        """A file for all; None where it is nothing that can be used, which is said, and what is damaged goes."""
        try:
            return Run.found(read_saved_file(path), self._shared)
        except DamagedFileError as error:
            logger.warning("PagedPrefixCache: a file of blocks is removed: %s", error)
            remove(path)
        except SavedBlocksError as error:
            logger.warning("PagedPrefixCache: a file in disk_folder is left alone: %s", error)
        except OSError:  # gone since
            pass
        return None

    def join(self) -> None:
        """Wait until all runs are written that are to be. For tests."""
        self._writer.join()


def _chosen(rows: Iterable[Tensor], at: Sequence[int]) -> list[Tensor]:
    """Some of the rows of each part; in memory of their own where that frees the others."""
    if len(list(runs(at))) == 1:
        return [of_part[at[0] : at[0] + len(at)] for of_part in rows]
    return [of_part[list(at)] for of_part in rows]


def _bytes_in(folder: Path) -> int:
    """Of the files of blocks in a folder."""
    num_bytes = 0
    for path in saved_paths(folder):
        with contextlib.suppress(OSError):  # gone since
            num_bytes += path.stat().st_size
    return num_bytes


def _end(own: OwnFolder, writer: Writer, gathering: Mapping[bytes, Run]) -> None:
    """The store has gone, or the process ends: what others can use and is not written yet is, if that takes seconds at most."""
    if os.getpid() == own.pid:
        for run in [*writer.stop(), *gathering.values()]:
            if run.is_shared:
                run.write(may_wait=False)
        own.remove()
