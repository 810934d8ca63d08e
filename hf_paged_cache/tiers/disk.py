"""The disk tier: contents of blocks in files. A folder in shared memory makes it a host tier for a CPU, and for all processes on it.

Contents are gathered in memory, up to a few MB, and written by a thread; until then they are found there. Nobody who computes waits
for a file to be written. Files are dropped whole, the least recently used first. What has a name that other processes understand is
written for them, too, and what they write is found; all else lies in a folder of this process, and goes with it.
"""

import contextlib
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from weakref import finalize

from torch import Tensor

from ..blocks.arguments import OWNERS_ALONE
from ..blocks.hashing import BlockHash
from ..errors import BlockStateError, CacheArgumentError, SavedBlocksError
from ..kv.contents import Part, host_rows, runs
from ..kv.stopwatch import events_on
from .base import Kind, Name, Rows
from .files import FileTier, Place
from .folders import OwnFolder, SharedFolder, make_folder, remove
from .runs import Run, Writer, content_bytes, kind_bytes
from .saved_file import DamagedFileError, read_saved_file, saved_paths
from .sharing import Origin, Sharing

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # gathered before a file is written
_MOST_WAITING_BYTES = 2**29  # in memory and not yet written; beyond that, what is evicted is lost
_SPARE_BYTES = 2**14  # of headers
_DEFAULT_SHARE = 0.5  # of what the folder's disk has free


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
        self._num_bytes = 0  # of `_runs`
        self._is_dirty = False

    def _settle(self) -> None:
        """In a forked child the files are the parent's: begin with none. Where a change was interrupted, count anew."""
        if self._is_dirty:
            self._num_bytes = sum(run.num_bytes for run in self._runs)
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
        self.touch(kind, [name for name in names if shelf.has_digest(name)])
        new = [index for index, name in enumerate(names) if not shelf.has_digest(name)]
        origins = {root: self._origin_of(root) for root in {names[index].root for index in new}}
        models = {root: b"" if origin is None else origin.model.digest for root, origin in origins.items()}
        of_model: dict[bytes, list[int]] = {}  # b"": of this process alone
        for index in new:
            of_model.setdefault(models[names[index].root], []).append(index)
        for model, indices in of_model.items():
            step = max(1, self.run_bytes // content_bytes(parts, names[indices[0]]))
            for start in range(0, len(indices), step):
                some = indices[start : start + step]
                self._gather(model, origins, kind, parts, [names[index] for index in some], _chosen(rows, some))

    def _origin_of(self, root: bytes) -> Origin | None:
        """Where contents of a root are from; None where they are for this process alone."""
        return None if self.sharing is None else self.sharing.origin_of(root)

    def _gather(
        self,
        model: bytes,
        origins: Mapping[bytes, Origin | None],
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
        found = [origin for root in {name.root for name in names} if (origin := origins[root]) is not None]
        self._is_dirty = True
        run = self._open.get(model)
        if run is None or run.is_closed or run not in self._runs:
            run = Run(self._shared, found[0].model) if found else Run(self._own)
            self._num_bytes += run.num_bytes
            self._runs[run] = None
            self._waiting.append(run)
        before = run.num_bytes
        first = run.add(kind, parts, names, on_host, [origin.root for origin in found], arrival)
        self._num_bytes += run.num_bytes - before
        self._runs.move_to_end(run)
        for row, name in enumerate(names, first):
            self._add(self._shelves[kind], kind, name, Place(run, row))
        self.counts.num_down += len(names)
        self._open[model] = run
        if run.num_bytes >= self.run_bytes:
            run.is_closed = True
            if run.is_shared:
                self._known[run.path] = run
            self._writer.give(run)
            self._open.pop(model, None)
        self._is_dirty = False

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
        self._is_dirty = True
        super()._drop(run)
        self._num_bytes -= run.num_bytes
        if run.path in self._known:
            self._known[run.path] = None
        if not (keeps_file and run.is_closed):
            run.drop()
        self._is_dirty = False

    def _lose(self, run: Run, error: Exception) -> None:
        super()._lose(run, error)
        if isinstance(error, DamagedFileError):
            remove(run.path)

    def forget(self, names: Collection[Name]) -> None:
        self._settle()
        super().forget(names)

    def reset(self) -> None:
        """Keep nothing, remove all files that this process has written, and find no others that are there now."""
        self._settle()
        super().reset()
        self._forget_all()

    def check(self) -> None:
        self._settle()
        super().check()
        if self._num_bytes != sum(run.num_bytes for run in self._runs):
            raise BlockStateError(f"a disk tier counts {self._num_bytes} bytes, and its runs have others")
        own = self.num_bytes - sum(run.num_bytes for run in self._runs if run.is_found)
        counts = {"counts": own, "has": _bytes_in(self._own.path), "has for all": _bytes_in(self._parent)}
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
                self._is_dirty = True
                self._runs[new_run] = None
                self._num_bytes += new_run.num_bytes
                self._is_dirty = False
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

    def adopt(
        self, run: Run, parts_of: Mapping[Kind, Sequence[Part] | None], name_of: Callable[[BlockHash], Name | None]
    ) -> None:
        """What a file of `look`'s has is found from here on, if it is still there."""
        if run in self._runs:
            super().adopt(run, parts_of, name_of)

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
        writer.stop()
        for run in [*writer.given(), *gathering.values()]:
            if run.is_shared:
                run.write(may_wait=False)
        own.remove()
