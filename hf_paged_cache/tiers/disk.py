"""The disk tier: contents of blocks in files. A folder in shared memory makes it a host tier for a CPU, and for all processes on it.

Contents are gathered in memory, up to a few MB, and written by a thread; until then they are found there. Nobody who computes waits
for a file to be written. Files are dropped whole, the least recently used first. What has a name that other processes understand is
written for them, too, and what they write is found; all else lies in a folder of this process, and goes with it.
"""

import contextlib
import logging
import os
import shutil
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

from ..blocks.arguments import OWNERS_ALONE
from ..errors import BlockStateError, CacheArgumentError, SavedBlocksError
from ..kv.contents import Part, host_rows, runs
from .arrival import arrival_on
from .base import Hold, Kind, Name, Rows, Shelf, TierCounts
from .own_folder import OwnFolder
from .run_files import Run, Writer
from .saved_file import DamagedFileError, SavedFile, SavedOrigin, read_saved_file
from .shared_folder import SharedFolder, make_folder, remove
from .shared_runs import FoundRun, SharedRun, Sharing, file_bytes_of, is_replaced

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # gathered before a file is written
_MOST_WAITING_BYTES = 2**29  # in memory and not yet written; beyond that, what is evicted is lost
_SPARE_BYTES = 2**14  # of headers
_DEFAULT_SHARE = 0.5  # of what the folder's disk has free


class _Place(NamedTuple):
    run: Run
    chunk: int
    row: int


class DiskTier:
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

    name = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        sharing: Sharing | None = None,
        mode: int = OWNERS_ALONE,
    ) -> None:
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
        self.counts = TierCounts()
        self._parent, self._mode = parent, mode
        self.sharing = sharing
        self._ignored: set[Path] = set()  # files of others that are not to be found, or are nothing to us
        self._forget_all()

    def _begin(self, parent: Path) -> None:
        """A folder of this process."""
        self._writer, self._own = Writer(), OwnFolder(parent)
        # that gather: the one of this process, "", and those of models, by what these are
        self._open: dict[str, Run] = {}
        self._clean = finalize(self, _end, self._own, self._writer, self._open)

    def _forget_all(self) -> None:
        self._shelves: dict[Kind, Shelf[_Place]] = {}
        self._parts: dict[Kind, tuple[Part, ...]] = {}
        self._runs: OrderedDict[Run, None] = OrderedDict()  # the least recently used first
        self._waiting: deque[Run] = deque()  # in memory, in the order in which they were begun
        self._leaving: list[Run] = []  # dropped while they were being written
        self._of_path: dict[Path, Run] = {}  # files for all, and those to be
        self._shared = SharedFolder(self._parent, self.max_bytes, self._mode)
        self._open.clear()
        self._num_bytes = 0  # of `_runs`
        self._is_dirty = False

    def _settle(self) -> None:
        """In a forked child the files are the parent's: begin with none. Where a change was interrupted, count anew."""
        if self._is_dirty:
            self._num_bytes = sum(run.num_bytes for run in self._runs)
            self._waiting = deque(run for run in self._waiting if run in self._runs)
            self._is_dirty = False
        if self._own.pid != os.getpid():
            self._clean.detach()
            self._begin(self._parent)
            self._forget_all()

    def __repr__(self) -> str:
        return f"DiskTier({str(self._parent)!r}, {self.num_bytes} of {self.max_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """That files take, or will take when they are written."""
        self._leaving = [run for run in self._leaving if run.is_being_written]
        return self._num_bytes + sum(run.num_bytes for run in self._leaving)

    @property
    def num_waiting_bytes(self) -> int:
        """In memory, not yet in a file."""
        while self._waiting and not self._waiting[0].is_in_memory:
            self._waiting.popleft()
        return sum(run.num_bytes for run in self._waiting if run.is_in_memory)

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int:
        """Contents of a kind, of one namespace or of all."""
        shelf = self._shelves.get(kind)
        return 0 if shelf is None else shelf.num_of(namespace)

    def has(self, kind: Kind, name: Name) -> bool:
        """Whether this content is here."""
        return self._place_of(kind, name) is not None

    def _place_of(self, kind: Kind, name: Name) -> _Place | None:
        shelf = self._shelves.get(kind)
        place = None if shelf is None else shelf.get(name)
        return None if place is None or place.run.is_lost else place

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """They are used, and so are their files."""
        for name in names:
            place = self._place_of(kind, name)
            if place is not None and place.run in self._runs:
                self._runs.move_to_end(place.run)
                if place.run.is_shared and place.run.path is not None:
                    self._shared.use(place.run.path)

    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        """What a row of this kind is made of."""
        return self._parts.get(kind, ())

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Keep contents that are not here yet, as far as there is room. Copies from a device are launched and not waited for.

        Args:
            rows: of each part, on its device or on the host; the host's are kept as they are.
        """
        self._settle()
        self._lay_out(kind, parts)
        shelf = self._shelves.setdefault(kind, Shelf())
        new = [index for index, name in enumerate(names) if not shelf.has_digest(name)]
        self.touch(kind, [name for name in names if shelf.has_digest(name)])
        of_origin: dict[str, tuple[SavedOrigin | None, list[int]]] = {}
        for index in new:
            origin = self._origin_of(names[index])
            of_origin.setdefault("" if origin is None else origin.facts_digest, (origin, []))[1].append(index)
        for which, (origin, indices) in of_origin.items():
            self._put(which, origin, kind, shelf, parts, names, rows, indices)

    def _origin_of(self, name: Name) -> SavedOrigin | None:
        """Where a content is from; None where it is for this process alone."""
        return None if self.sharing is None or name.namespace else self.sharing.origin_of(name.root)

    def _lay_out(self, kind: Kind, parts: Sequence[Part]) -> None:
        """Rows of a kind are made of these parts from here on; what is made of others is found no more."""
        if self._parts.get(kind, tuple(parts)) != tuple(parts):
            for run in list(dict.fromkeys(place.run for _, place in self._shelves.get(kind, ()))):
                self._drop(run, keeps_file=run.is_shared)
        self._parts[kind] = tuple(parts)

    def _put(
        self,
        which: str,
        origin: SavedOrigin | None,
        kind: Kind,
        shelf: Shelf[_Place],
        parts: Sequence[Part],
        names: Sequence[Name],
        rows: Rows,
        indices: Sequence[int],
    ) -> None:
        """Keep those contents that have one origin."""
        row_bytes = sum(part.num_bytes for part in parts)
        if origin is not None:
            row_bytes = file_bytes_of(parts, names[indices[0]])
        step = max(1, self.run_bytes // row_bytes)
        for start in range(0, len(indices), step):
            some = indices[start : start + step]
            num_bytes = len(some) * row_bytes
            if self.num_waiting_bytes + num_bytes + _SPARE_BYTES > _MOST_WAITING_BYTES or not self._make_room(
                num_bytes
            ):
                self.counts.num_refused += len(some)
                continue
            chosen = [_chosen(each, some) for each in rows]
            self._add(which, origin, kind, shelf, parts, [names[index] for index in some], chosen)

    def _add(
        self,
        which: str,
        origin: SavedOrigin | None,
        kind: Kind,
        shelf: Shelf[_Place],
        parts: Sequence[Part],
        names: Sequence[Name],
        rows: Rows,
    ) -> None:
        chunk = []
        for part, of_part in zip(parts, rows, strict=True):
            if of_part.device.type != "cpu":
                of_part = host_rows(part, len(names)).copy_(of_part, non_blocking=True)
            chunk.append(of_part)
        arrival = arrival_on(each.device for each in rows)
        self._is_dirty = True
        run = self._open.get(which)
        if run is None or run.is_closed or run not in self._runs:
            run = Run() if origin is None else SharedRun(self._shared, origin)
        if run not in self._runs:
            self._num_bytes += run.num_bytes
            self._runs[run] = None
            self._waiting.append(run)
        before = run.num_bytes
        if isinstance(run, SharedRun):
            run.note(kind, parts, names, [self._origin_of(name) for name in names])
        number = run.add(chunk, arrival)
        self._num_bytes += run.num_bytes - before
        self._runs.move_to_end(run)
        for index, name in enumerate(names):
            run.names[kind, name] = None
            shelf.add(name, _Place(run, number, index))
        self.counts.num_down += len(names)
        self._open[which] = run
        if run.num_bytes >= self.run_bytes:
            self._close(run)
            self._open.pop(which, None)
        self._is_dirty = False

    def _close(self, run: Run) -> None:
        """Nothing is added any more; the writer gets it."""
        run.is_closed = True
        path = run.path_to_be() if isinstance(run, SharedRun) else self._own.new_path()
        if run.is_shared:
            self._of_path[path] = run
        self._writer.give(run, path)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop files until so much more may be kept; whether it may."""
        needed = num_bytes + _SPARE_BYTES
        if needed > self.max_bytes:
            return False
        held: set[bytes] | None = None
        while self.num_bytes + needed > self.max_bytes:
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
        """Nothing of a run is found any more.

        Args:
            keeps_file: other processes may still find it.
        """
        self._is_dirty = True
        for kind, name in run.names:
            if self._shelves[kind].get(name) is not None:
                self._shelves[kind].remove(name)
        del self._runs[run]
        self._num_bytes -= run.num_bytes
        if run in self._waiting:
            self._waiting.remove(run)
        for path in [path for path, of in self._of_path.items() if of is run] if run.is_shared else ():
            del self._of_path[path]
            self._ignored.add(path)
        if not keeps_file:
            if run.is_being_written:
                self._leaving.append(run)
            run.drop()
        self._is_dirty = False

    def hold(self, kind: Kind, names: Iterable[Name]) -> Hold:
        """Their files stay as long as the hold lives."""
        shelf = self._shelves.get(kind)
        return Hold(()) if shelf is None else shelf.hold(names)

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        """Those that are here, file after file."""
        order = {run: number for number, run in enumerate(self._runs)}
        place_of = {name: place for name in names if (place := self._place_of(kind, name)) is not None}
        return sorted(place_of, key=lambda name: (order.get(place_of[name].run, -1), *place_of[name][1:]))

    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Of each part, rows of the host in the order of the names. No lock need be held.

        Raises:
            OSError: a file is not there, or not what was written; nothing of it is found from here on.
        """
        places = [place for name in names if (place := self._place_of(kind, name)) is not None]
        if len(places) < len(names):
            raise OSError("contents were dropped that are to be read")
        loaded: list[list[Tensor]] = [[] for _ in self._parts[kind]]
        start = 0
        while start < len(places):
            run = places[start].run
            stop = next((i for i in range(start, len(places)) if places[i].run is not run), len(places))
            wanted = []
            while start < stop:
                chunk, first, number = places[start].chunk, places[start].row, 1
                while start + number < stop and places[start + number] == (run, chunk, first + number):
                    number += 1
                wanted.append((chunk, first, number))
                start += number
            try:
                for fragments, of_part in zip(loaded, run.read(wanted, len(loaded)), strict=True):
                    fragments += of_part
            except (OSError, SavedBlocksError) as error:
                run.is_lost = True
                if isinstance(error, DamagedFileError) and run.path is not None and not is_replaced(run):
                    remove(run.path)
                raise error if isinstance(error, OSError) else OSError(str(error)) from error
        self.counts.num_up += len(names)
        return loaded

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

    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace."""
        self.forget({name for shelf in self._shelves.values() for name, _ in shelf if name.namespace == namespace})

    def reset(self) -> None:
        """Keep nothing, remove all files that this process has written, and find no others that are there now."""
        self._settle()
        for run in list(self._runs):
            self._drop(run, keeps_file=isinstance(run, FoundRun))
        leaving = self._leaving
        self._forget_all()
        self._leaving = leaving

    def check(self) -> None:
        """Prove that each content is in a run that is kept, and that the budget is, or raise BlockStateError."""
        self._settle()
        for kind, shelf in self._shelves.items():
            strays = [name for name, place in shelf if place.run not in self._runs]
            if strays:
                raise BlockStateError(f"{len(strays)} contents of kind {kind!r} are in runs that were dropped")
        if self._num_bytes != sum(run.num_bytes for run in self._runs):
            raise BlockStateError(f"a disk tier counts {self._num_bytes} bytes, and its runs have others")
        own = self.num_bytes - sum(run.num_bytes for run in self._runs if isinstance(run, FoundRun))
        counts = {"counts": own, "has": _bytes_in(self._own.path), "has for all": _bytes_in(self._parent)}
        if max(counts.values()) > self.max_bytes:
            raise BlockStateError(f"a disk tier of at most {self.max_bytes} bytes is larger: {counts}")

    def distrust(self) -> None:
        """What this process has written for others may be wrong: those files go."""
        self._settle()
        for run in [run for run in self._runs if isinstance(run, SharedRun)]:
            self._drop(run)

    def look(self) -> list[FoundRun]:
        """Files for all that have come since this was asked last, of whatever model; those that have gone are found no more.

        What is damaged is removed, and said.
        """
        self._settle()
        written = [(path, run) for path, run in self._of_path.items() if run.path == path]  # others are there soon
        try:
            looked = self._shared.look({*self._of_path, *self._ignored})
        except OSError as error:
            logger.warning("PagedPrefixCache: disk_folder cannot be read: %s", error)
            return []
        if looked is None:
            return []
        there, entries = looked
        self._ignored &= there
        for path, run in written:
            if path not in there:
                self._drop(run, keeps_file=True)
        found: list[FoundRun] = []
        for entry in entries:
            if (file := _read(entry.path)) is None:
                self._ignored.add(entry.path)
                continue
            run = FoundRun(file)
            self._of_path[entry.path] = run
            self._is_dirty = True
            self._runs[run] = None
            self._num_bytes += run.num_bytes
            self._is_dirty = False
            found.append(run)
        return found

    def adopt(self, run: FoundRun, parts_of: Mapping[Kind, Sequence[Part]]) -> None:
        """A file is of this model: what it has is found from here on.

        Args:
            parts_of: of the kinds that can be found, what rows are made of here.
        """
        self._is_dirty = True
        for number, content in enumerate(run.file.contents):
            if content.kind not in parts_of:
                continue
            self._lay_out(content.kind, parts_of[content.kind])
            shelf = self._shelves.setdefault(content.kind, Shelf())
            for row, name in enumerate(run.names_of(content)):
                if not shelf.has_digest(name):
                    run.names[content.kind, name] = None
                    shelf.add(name, _Place(run, number, row))
        self._is_dirty = False

    def join(self) -> None:
        """Wait until all runs are written that are to be. For tests."""
        self._writer.join()


def _chosen(rows: Tensor, at: Sequence[int]) -> Tensor:
    """Some of the rows; in memory of their own where that frees the others."""
    stretches = list(runs(at))
    if len(stretches) == 1:
        return rows[at[0] : at[0] + len(at)]
    return rows[list(at)]


def _bytes_in(folder: Path) -> int:
    """Of the files of blocks in a folder."""
    num_bytes = 0
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # gone since
            num_bytes += path.stat().st_size
    return num_bytes


def _read(path: Path) -> SavedFile | None:
    """What a file says of itself; None where it is nothing that can be used, which is said, and what is damaged goes."""
    try:
        return read_saved_file(path)
    except DamagedFileError as error:
        logger.warning("PagedPrefixCache: a file of blocks is removed: %s", error)
        remove(path)
    except SavedBlocksError as error:
        logger.warning("PagedPrefixCache: a file in disk_folder is left alone: %s", error)
    except OSError:  # gone since
        pass
    return None


def _end(own: OwnFolder, writer: Writer, gathering: Mapping[str, Run]) -> None:
    """The store has gone, or the process ends: what others can use and is not written yet is, if that takes seconds at most."""
    if os.getpid() == own.pid:
        writer.stop()
        for run in [*writer.given(), *gathering.values()]:
            if isinstance(run, SharedRun):
                run.may_wait = False
                run.write(run.path_to_be())
        own.remove()
