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
from ..blocks.roots import RootFacts, Roots
from ..errors import CacheArgumentError, SavedBlocksError
from ..kv.contents import Kind, Part, events_on, host_rows
from .base import Name, Tier
from .folders import Folder, remove
from .run_files import Run
from .saved_file import DamagedFileError, Identity, new_path, read_saved_file, saved_paths

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # bytes of rows that are gathered before a file is written
_MOST_WAITING_BYTES = 2**29  # bytes in memory and not yet written; beyond that, what is evicted is lost
_LEAST_FILES = 4  # number of files that the budget is to hold
_DEFAULT_SHARE = 0.5  # share of what the folder's disk has free


class _Place(NamedTuple):
    """`_Place` says where a content lies."""

    run: Run
    row: int  # number of the content among the run's contents of its kind


class DiskTier(Tier):
    """`DiskTier` keeps contents in files of one folder, at most `max_bytes`.

    Args:
        folder: folder of the files; it is made if it is not there.
        max_bytes: most bytes of all files, also of those that other processes write. None: half of what is free there
            now. 0: files are only read, and what is wrong with one is noted and not logged.
        identities: returns what states of the model mean to other processes; states that mean nothing are left out.

    Attributes:
        num_read_bytes: bytes of rows read so far.
        run_bytes: bytes that are gathered before a file is written.

    Raises:
        CacheArgumentError: the folder cannot be made or written.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None,
        roots: Roots,
        identities: Callable[[], Sequence[Identity]],
    ) -> None:
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
        self._roots, self.identities = roots, identities
        self.run_bytes = min(_RUN_BYTES, self.max_bytes // _LEAST_FILES)
        self.num_read_bytes = 0
        self._begin()

    def _begin(self) -> None:
        """Begin without any content."""
        self._pid = os.getpid()
        self.entries.clear()
        self._runs: dict[Path, Run] = {}  # runs that are files or become one; nothing is found of a run with a problem
        self._open: dict[bytes, Run] = {}  # digest of a model -> the run that gathers what it has computed
        self._waiting: list[Run] = []  # runs in memory
        self._adopted: set[Run] = set()  # others' files whose contents are found
        self._num_models = 0  # identities of the model at the last look
        self._writer = ThreadPoolExecutor(1, "hf_paged_cache tiers")
        self._end = finalize(self, _write_rest, self._pid, self._open, self._folder)

    def _settle(self) -> None:
        """Begin anew in a forked child, since what waits to be written is the parent's. Files are found again."""
        if self._pid != os.getpid():
            self._end.detach()
            self._folder = Folder(self._folder.path, self.max_bytes)
            self._begin()

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

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Sequence[Tensor]) -> None:
        self._settle()
        self.lay_out(kind, parts)
        self.touch(kind, names)
        self._waiting = [run for run in self._waiting if run.is_in_memory]
        left = min(_MOST_WAITING_BYTES, self.max_bytes) - sum(run.num_bytes for run in self._waiting)
        on_host = [_on_host(part, of_part) for part, of_part in zip(parts, rows, strict=True)]
        arrival = events_on(part.device for part in parts)
        origins = {root: self._origin_of(root) for root in {name.root for name in names}}
        for at, name in enumerate(names):
            origin, row = origins[name.root], [of_part[at : at + 1] for of_part in on_host]
            left -= sum(of_part.nbytes for of_part in row)
            if origin is None or name.namespace or left < 0 or not _depends_on_tokens_alone(name.block_hash):
                self.num_refused += 1
            elif not self.has(kind, name):
                model, root = origin
                run = self._open_run(model)
                run.note([root], arrival)
                number = run.add(kind, parts, name.block_hash, row)
                self.entries[kind, name.block_hash.digest] = name, _Place(run, number)
                self.num_down += 1
                if run.num_bytes >= self.run_bytes:
                    del self._open[model.digest]
                    with suppress(RuntimeError):  # raised where the process ends
                        self._writer.submit(_write, run, self._folder)

    def _origin_of(self, root: bytes) -> tuple[Identity, RootFacts] | None:
        """Return the model and the root that others know sequences of this root by; None: they know none."""
        facts = self._roots.facts_of(root)
        if facts is None or facts.salt:
            return None
        return next(((model, facts) for model in self.identities() if model.digest == facts.digest), None)

    def _open_run(self, model: Identity) -> Run:
        """Return the run that gathers what a model has computed."""
        run = self._open.get(model.digest)
        if run is None:
            run = self._open[model.digest] = Run(new_path(self._folder.path), model)
            self._runs[run.path] = run
            self._waiting.append(run)
        return run

    def look(self) -> list[Run]:
        """Return others' files that were not adopted, if files have come or gone, or the model has other identities.

        Files that have gone are found no more.
        """
        self._settle()
        num_models, self._num_models = self._num_models, len(self.identities())
        written = [run for run in self._runs.values() if not run.is_in_memory]  # the files of other runs are there soon
        try:
            paths = self._folder.changed_paths()
        except OSError as error:
            _warn_once(self._folder.path, f"cannot be read, so nothing in it is found: {error.strerror or error}")
            paths = []
        if paths is None and num_models == self._num_models:
            return []
        if paths is not None:
            self._forget({run for run in written if run.path not in {*paths}})
        for run in [Run(path) for path in paths or () if path not in self._runs]:
            self._runs[run.path] = run
            try:
                run.file = read_saved_file(run.path)
                run.num_bytes = run.file.num_bytes
            except (SavedBlocksError, OSError) as error:
                self._lose(run, error)
        left = [run for run in self._runs.values() if not run.is_ours and run not in self._adopted]
        return [run for run in left if run.file is not None]

    def adopt(
        self, run: Run, parts_of: Mapping[Kind, Sequence[Part] | None], name_of: Callable[[BlockHash], Name | None]
    ) -> None:
        """Let the contents of a file be found from here on.

        Args:
            parts_of: kind -> parts of which its rows are made here; None: they cannot be used here.
            name_of: returns the name of a block in this process; None: the block is not to be found.
        """
        assert run.file is not None  # `look` has found the file
        self._adopted.add(run)
        for content in run.file.contents:
            if (parts := parts_of[content.kind]) is not None:
                self.lay_out(content.kind, parts)
                for row, number in enumerate(content.blocks):
                    name = name_of(run.file.blocks[number])
                    if name is not None and not self.has(content.kind, name):
                        self.entries[content.kind, name.block_hash.digest] = name, _Place(run, row)

    def load(self, kind: Kind, places: Sequence[_Place]) -> list[list[Tensor]]:
        loaded: list[list[Tensor]] = [[] for _ in self.parts[kind]]
        for run, group in groupby(places, lambda place: place.run):
            try:
                found = run.read(kind, [place.row for place in group])
            except (OSError, SavedBlocksError) as error:
                self._lose(run, error)
                raise OSError(str(error)) from error
            for fragments, of_part in zip(loaded, found, strict=True):
                fragments.append(of_part)
                self.num_read_bytes += of_part.nbytes
        self.num_up += len(places)
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
        keys = [key for key, (_, place) in self.entries.items() if place.run in gone] if gone else []
        self.drop(keys)
        self.num_dropped += len(keys)
        for run in gone:
            del self._runs[run.path]
        self._adopted -= {*gone}

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
            for path in saved_paths(self._folder.path):
                self._runs[path] = Run(path)
                self._runs[path].problem = "it was there when all was forgotten"

    def join(self) -> None:
        """Wait until all runs are written that are to be. For tests."""
        self._writer.submit(int).result()


def _on_host(part: Part, rows: Tensor) -> Tensor:
    """Return rows as they are if they are on the host, else a copy, which arrives later where memory can be pinned."""
    if rows.device.type == "cpu":
        return rows
    try:
        return host_rows(part, len(rows)).copy_(rows, non_blocking=True)
    except RuntimeError:  # no memory can be pinned: the host waits
        return rows.cpu()


def _depends_on_tokens_alone(block_hash: BlockHash) -> bool:
    return digest_behind(block_hash.parent, block_hash.token_bytes) == block_hash.digest


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
