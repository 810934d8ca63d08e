"""The disk tier keeps contents in files of one folder.

A folder in shared memory makes it a host tier for a CPU, and for all processes on it. What is evicted is gathered in
memory, up to a few MB, and written by a thread; until then it is found in memory. Nobody who computes waits for a file
to be written. Whatever fails is a miss. Files are dropped whole, the least recently used first. Only contents are
written whose names other processes understand, and what those processes write is found here, too.
"""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

from ..blocks.hashing import BlockHash, digest_behind
from ..errors import CacheArgumentError, SavedBlocksError
from ..kv.contents import Part, events_on, host_rows
from .base import Kind, Name, Rows, Tier
from .folders import Folder, remove
from .run_files import Run
from .saved_file import DamagedFileError, new_path, read_saved_file, saved_paths
from .sharing import Origin, Sharing

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # bytes of rows that are gathered before a file is written
_MOST_WAITING_BYTES = 2**29  # bytes in memory and not yet written; beyond that, what is evicted is lost
_LEAST_FILES = 4  # number of files that the budget is to hold
_DEFAULT_SHARE = 0.5  # share of what the folder's disk has free


class _Place(NamedTuple):
    """`_Place` says where a content lies."""

    run: Run
    row: int  # number of the content's row among the run's rows of its kind

    @property
    def position(self) -> tuple[str, int]:
        return str(self.run.path), self.row


class DiskTier(Tier):
    """`DiskTier` keeps contents in files of one folder, at most `max_bytes`.

    Args:
        folder: folder of the files; it is made if it is not there.
        max_bytes: most bytes of all files, also of those that other processes write. None: half of what is free there
            now. 0: files are only read, and what is wrong with one is noted and not logged.
        sharing: what other processes understand of the contents.

    Attributes:
        num_read_bytes: bytes of rows read so far.
        run_bytes: bytes that are gathered before a file is written.

    Raises:
        CacheArgumentError: the folder cannot be made or written.
    """

    name = "disk"

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None, sharing: Sharing) -> None:
        path = Path(folder).expanduser().absolute()
        self._folder = Folder(path)
        try:
            if max_bytes != 0:
                self._folder.make()
                (path / ".lock").touch(0o600)  # raises if the folder cannot be written
            free = shutil.disk_usage(path).free
        except OSError as error:
            raise CacheArgumentError(
                f"disk_folder is {os.fspath(folder)!r}, which cannot be written: {error}"
            ) from error
        super().__init__(int(free * _DEFAULT_SHARE) if max_bytes is None else max_bytes)
        self._folder.max_bytes = self.max_bytes
        self.sharing = sharing
        self.run_bytes = min(_RUN_BYTES, self.max_bytes // _LEAST_FILES)
        self.num_read_bytes = 0
        self._begin()

    def _begin(self) -> None:
        """Begin without any content."""
        self._pid = os.getpid()
        self._entries: dict[Kind, dict[bytes, tuple[Name, _Place]]] = {}
        self._parts: dict[Kind, tuple[Part, ...]] = {}
        self._runs: dict[Path, Run] = {}  # runs that are files or become one; nothing is found of a run with a problem
        self._open: dict[bytes, Run] = {}  # digest of a model -> the run that gathers what it has computed
        self._waiting: list[Run] = []  # runs in memory
        self._writer = ThreadPoolExecutor(1, "hf_paged_cache tiers")
        self._end = finalize(self, _write_rest, self._pid, self._open, self._folder)

    def _settle(self) -> None:
        """Begin anew in a forked child, since what waits to be written is the parent's. Files are found again."""
        if self._pid != os.getpid():
            self._end.detach()
            self._folder = Folder(self._folder.path, self.max_bytes)
            self._begin()

    def __repr__(self) -> str:
        return f"DiskTier({str(self._folder.path)!r}, {self.num_bytes} of {self.max_bytes} bytes)"

    def entries(self, kind: Kind) -> Mapping[bytes, tuple[Name, _Place]]:
        return self._entries.get(kind, {})

    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        return self._parts.get(kind, ())

    def place_of(self, kind: Kind, name: Name) -> _Place | None:
        place: _Place | None = super().place_of(kind, name)
        return None if place is None or place.run.problem is not None else place

    @property
    def problems(self) -> dict[str, str]:
        """Path of a file -> what is wrong with it; nothing of such a file is found."""
        return {str(run.path): run.problem for run in self._runs.values() if run.problem is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes of files whose contents are found, and of rows that wait to be written."""
        return sum(run.num_bytes for run in self._runs.values() if run.problem is None)

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        runs = {place.run for name in names if (place := self.place_of(kind, name)) is not None}
        for run in runs:
            if run.file is not None:
                self._folder.use(run.path)

    def _entries_for(self, kind: Kind, parts: Sequence[Part]) -> dict[bytes, tuple[Name, _Place]]:
        """Return the entries of a kind whose rows are made of these parts from here on.

        Contents that are made of other parts are found no more.
        """
        if self._parts.get(kind) != tuple(parts):
            self._parts[kind], self._entries[kind] = tuple(parts), {}
        return self._entries[kind]

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        self._settle()
        self._entries_for(kind, parts)
        self.touch(kind, names)
        origins = {root: self.sharing.origin_of(root) for root in {name.root for name in names}}
        of_model: dict[bytes, list[int]] = {}
        for at, name in enumerate(names):
            origin, (digest, token_bytes, parent) = origins[name.root], name.block_hash
            if name.namespace or origin is None or digest_behind(parent, token_bytes) != digest:
                self.counts.num_refused += 1
            elif not self.has(kind, name):
                of_model.setdefault(origin.model.digest, []).append(at)
        step = max(1, self.run_bytes // sum(part.num_bytes for part in parts))
        for of_one in of_model.values():
            for start in range(0, len(of_one), step):
                some = of_one[start : start + step]
                of_some = [origin for at in some if (origin := origins[names[at].root]) is not None]
                self._gather(of_some, kind, parts, [names[at] for at in some], [_chosen(each, some) for each in rows])

    def _gather(
        self, origins: Sequence[Origin], kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows
    ) -> None:
        """Keep contents of one model; a file is written when there are enough of them."""
        self._waiting = [run for run in self._waiting if run.is_in_memory]
        num_bytes = sum(of_part.nbytes for of_part in rows)
        if sum(run.num_bytes for run in self._waiting) + num_bytes > min(_MOST_WAITING_BYTES, self.max_bytes):
            self.counts.num_refused += len(names)
            return
        on_host = [
            of_part if of_part.device.type == "cpu" else host_rows(part, len(names)).copy_(of_part, non_blocking=True)
            for part, of_part in zip(parts, rows, strict=True)
        ]
        arrival = events_on(of_part.device for of_part in rows)
        model = origins[0].model
        run = self._open.get(model.digest)
        if run is None:
            run = self._open[model.digest] = Run(new_path(self._folder.path), model)
            self._runs[run.path] = run
            self._waiting.append(run)
        first = run.add(kind, parts, names, on_host, {origin.root for origin in origins}, arrival)
        for row, name in enumerate(names, first):
            self._entries[kind][name.digest] = name, _Place(run, row)
        self.counts.num_down += len(names)
        if run.num_bytes >= self.run_bytes:
            del self._open[model.digest]
            with suppress(RuntimeError):  # raised where the process ends
                self._writer.submit(_write, run, self._folder)

    def look(self) -> list[Run]:
        """Return the files, of whatever model, that have come since the last call.

        Files that have gone are found no more.
        """
        self._settle()
        written = [run for run in self._runs.values() if not run.is_in_memory]  # the files of other runs are there soon
        try:
            paths = self._folder.changed_paths()
        except OSError as error:
            _warn_once(self._folder.path, f"cannot be read, so nothing in it is found: {error.strerror or error}")
            paths = []
        if paths is None:
            return []
        there = set(paths)
        self._forget({run for run in written if run.path not in there})
        new = [Run(path, is_there=True) for path in paths if path not in self._runs]
        for run in new:
            self._runs[run.path] = run
            try:
                run.file = read_saved_file(run.path)
                run.num_bytes = run.file.num_bytes
            except (SavedBlocksError, OSError) as error:
                self._lose(run, error)
        return [run for run in new if run.file is not None]

    def adopt(
        self, run: Run, parts_of: Mapping[Kind, Sequence[Part] | None], name_of: Callable[[BlockHash], Name | None]
    ) -> None:
        """Let the contents of a file be found from here on.

        Args:
            parts_of: kind -> parts of which rows of this kind are made here; None: rows of this kind cannot be used
                here.
            name_of: returns the name of a block in this process; None: the block is not to be found.
        """
        file = run.file
        assert file is not None  # `look` has found the file
        for content in file.contents:
            if (parts := parts_of[content.kind]) is not None:
                entries = self._entries_for(content.kind, parts)
                for row, number in enumerate(content.blocks):
                    if (name := name_of(file.blocks[number])) is not None and not self.has(content.kind, name):
                        entries[name.digest] = name, _Place(run, row)

    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Load rows into host memory; see `Tier.load`. The caller need not hold the lock."""
        places = [place for name in names if (place := self.place_of(kind, name)) is not None]
        if len(places) < len(names):
            raise OSError("contents were dropped that are to be read")
        loaded: list[list[Tensor]] = [[] for _ in self.parts_of(kind)]
        for run, group in groupby(places, lambda place: place.run):
            try:
                found = run.read(kind, [place.row for place in group])
            except (OSError, SavedBlocksError) as error:
                self._lose(run, error)
                raise OSError(str(error)) from error
            for fragments, of_part in zip(loaded, found, strict=True):
                fragments.append(of_part)
                self.num_read_bytes += of_part.nbytes
        self.counts.num_up += len(names)
        return loaded

    def _lose(self, run: Run, error: Exception) -> None:
        """Note that a file cannot be read: nothing of it is found any more.

        A damaged file is removed, so that its blocks are written anew with the next ones.
        """
        run.problem = str(error)
        if self.max_bytes and not isinstance(error, FileNotFoundError):
            _warn_once(self._folder.path, f"has what is not used: {error}")
            if isinstance(error, DamagedFileError):
                remove(run.path)

    def _forget(self, gone: Collection[Run]) -> None:
        """Forget these runs and all their contents."""
        for kind, entries in self._entries.items() if gone else ():
            self._entries[kind] = {digest: each for digest, each in entries.items() if each[1].run not in gone}
            self.counts.num_dropped += len(entries) - len(self._entries[kind])
        for run in gone:
            del self._runs[run.path]

    def forget_namespace(self, namespace: bytes) -> None:
        if not namespace:  # no file has contents with a salt
            self.reset()

    def reset(self) -> None:
        """Find nothing any more, and remove all files that this process has written. Files of other processes stay."""
        self._settle()
        for run in self._runs.values():
            if run.is_ours:
                run.drop()
        self._end.detach()
        self._begin()
        with suppress(OSError):
            left = [Run(path, is_there=True) for path in saved_paths(self._folder.path)]
            self._runs = {run.path: run for run in left}
            for run in left:
                run.problem = "it was there when all was forgotten"

    def join(self) -> None:
        """Wait until all runs are written that are to be. For tests."""
        self._writer.submit(int).result()


def _chosen(rows: Tensor, at: Sequence[int]) -> Tensor:
    """Return some rows, as a view if they lie side by side: a list of numbers would be sent to the device."""
    return rows[at[0] : at[0] + len(at)] if at[-1] - at[0] + 1 == len(at) else rows[[*at]]


def _write(run: Run, folder: Folder) -> None:
    try:
        run.write(folder)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        _warn_once(folder.path, f"cannot be written, so blocks are dropped: {why}")


def _write_rest(pid: int, gathering: Mapping[bytes, Run], folder: Folder) -> None:
    """Write what is not written yet, as the store has gone or the process ends."""
    if os.getpid() == pid:
        for run in gathering.values():
            _write(run, folder)


@lru_cache
def _warn_once(folder: Path, why: str) -> None:
    logger.warning("PagedPrefixCache: disk_folder %s %s; this is said once", folder, why)
