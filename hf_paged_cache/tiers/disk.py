"""The disk tier: contents of blocks in files, for this process alone. A folder in shared memory makes it a host tier for a CPU.

Contents are gathered in memory, up to a few MB, and written by a thread; until then they are found there. Nobody who computes waits
for a file to be written. Files are dropped whole, the least recently used first.
"""

import contextlib
import os
import shutil
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4
from weakref import finalize

from filelock import FileLock, Timeout
from torch import Tensor

from ..errors import BlockStateError, CacheArgumentError
from ..kv.contents import Part, host_rows, runs
from .arrival import arrival_on
from .base import Hold, Kind, Name, Rows, Shelf, TierCounts
from .run_files import Run, Writer

_RUN_BYTES = 2**23  # gathered before a file is written
_MOST_WAITING_BYTES = 2**29  # in memory and not yet written; beyond that, what is evicted is lost
_SPARE_BYTES = 2**14  # of headers
_DEFAULT_SHARE = 0.5  # of what the folder's disk has free
_PREFIX, _LOCK = "hf-paged-cache-", "lock"


class _Place(NamedTuple):
    run: Run
    chunk: int
    row: int


class DiskTier:
    """Contents in files of one folder, at most `max_bytes`.

    The process has a folder of its own in it, which goes with the store. What a process has left that died is removed by the
    next one.

    Args:
        folder: made if it is not there.
        max_bytes: of all files; None: half of what is free there now.
    Attributes:
        run_bytes: gathered before a file is written.
    Raises:
        CacheArgumentError: the folder cannot be made or written.
    """

    name = "disk"

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        parent = Path(folder).expanduser().absolute()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(parent)
            self._begin(parent)
            free = shutil.disk_usage(parent).free
        except OSError as error:
            raise CacheArgumentError(
                f"disk_folder is {os.fspath(folder)!r}, which cannot be written: {error}"
            ) from error
        self.max_bytes = int(free * _DEFAULT_SHARE) if max_bytes is None else max_bytes
        self.run_bytes = _RUN_BYTES
        self.counts = TierCounts()
        self._parent = parent
        self._forget_all()

    def _begin(self, parent: Path) -> None:
        """A folder of this process."""
        self._pid, self._writer, self._numbers = os.getpid(), Writer(), count()
        self._folder = parent / f"{_PREFIX}{self._pid}-{uuid4().hex[:8]}"
        self._folder.mkdir(mode=0o700)  # prompts can be told from what is in it
        lock = FileLock(self._folder / _LOCK)
        lock.acquire(timeout=0)
        self._clean = finalize(self, _end, self._folder, self._writer, lock, self._pid)

    def _forget_all(self) -> None:
        self._shelves: dict[Kind, Shelf[_Place]] = {}
        self._parts: dict[Kind, tuple[Part, ...]] = {}
        self._runs: OrderedDict[Run, None] = OrderedDict()  # the least recently used first
        self._waiting: deque[Run] = deque()  # in the order in which they are written, the last of which gathers
        self._leaving: list[Run] = []  # dropped while they were being written
        self._num_bytes = 0  # of `_runs`
        self._is_dirty = False

    def _settle(self) -> None:
        """In a forked child the files are the parent's: begin with none. Where a change was interrupted, count anew."""
        if self._is_dirty:
            self._num_bytes = sum(run.num_bytes for run in self._runs)
            self._waiting = deque(run for run in self._waiting if run in self._runs)
            self._is_dirty = False
        if self._pid != os.getpid():
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
        return sum(run.num_bytes for run in self._waiting)

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

    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        """What a row of this kind is made of."""
        return self._parts.get(kind, ())

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Keep contents that are not here yet, as far as there is room. Copies from a device are launched and not waited for.

        Args:
            rows: of each part, on its device or on the host; the host's are kept as they are.
        """
        self._settle()
        if self._parts.get(kind, tuple(parts)) != tuple(parts):
            self.forget({name for name, _ in self._shelves[kind]})
        self._parts[kind] = tuple(parts)
        shelf = self._shelves.setdefault(kind, Shelf())
        new = [index for index, name in enumerate(names) if not shelf.has_digest(name)]
        self.touch(kind, [name for name in names if shelf.has_digest(name)])
        row_bytes = sum(part.num_bytes for part in parts)
        step = max(1, self.run_bytes // row_bytes)
        for start in range(0, len(new), step):
            some = new[start : start + step]
            num_bytes = len(some) * row_bytes
            if self.num_waiting_bytes + num_bytes + _SPARE_BYTES > _MOST_WAITING_BYTES or not self._make_room(
                num_bytes
            ):
                self.counts.num_refused += len(some)
                continue
            self._add(kind, shelf, parts, [names[index] for index in some], [_chosen(each, some) for each in rows])

    def _add(self, kind: Kind, shelf: Shelf[_Place], parts: Sequence[Part], names: Sequence[Name], rows: Rows) -> None:
        chunk = []
        for part, of_part in zip(parts, rows, strict=True):
            if of_part.device.type != "cpu":
                of_part = host_rows(part, len(names)).copy_(of_part, non_blocking=True)
            chunk.append(of_part)
        arrival = arrival_on(each.device for each in rows)
        self._is_dirty = True
        run = self._waiting[-1] if self._waiting and not self._waiting[-1].is_closed else Run()
        if run not in self._runs:
            self._num_bytes += run.num_bytes
            self._runs[run] = None
            self._waiting.append(run)
        before = run.num_bytes
        number = run.add(chunk, arrival)
        self._num_bytes += run.num_bytes - before
        self._runs.move_to_end(run)
        for index, name in enumerate(names):
            run.names[kind, name] = None
            shelf.add(name, _Place(run, number, index))
        self.counts.num_down += len(names)
        if run.num_bytes >= self.run_bytes:
            run.is_closed = True
            self._writer.give(run, self._folder / f"{next(self._numbers)}.safetensors")
        self._is_dirty = False

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
        return True

    def _must_stay(self, run: Run, held: Collection[bytes]) -> bool:
        """Whether somebody reads of it, or its file is there anyway until it is written."""
        return run.is_being_written or (bool(held) and any(name.digest in held for _, name in run.names))

    def _drop(self, run: Run) -> None:
        self._is_dirty = True
        for kind, name in run.names:
            if self._shelves[kind].get(name) is not None:
                self._shelves[kind].remove(name)
        del self._runs[run]
        self._num_bytes -= run.num_bytes
        if run in self._waiting:
            self._waiting.remove(run)
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
                for part, fragments in enumerate(loaded):
                    fragments += run.read(wanted, part)
            except OSError:
                run.is_lost = True
                raise
        self.counts.num_up += len(names)
        return loaded

    def forget(self, names: Collection[Name]) -> None:
        """Keep these contents no more; files of which nothing is wanted go."""
        self._settle()
        emptied: dict[Run, None] = {}
        for kind, shelf in self._shelves.items():
            for name in names:
                if (place := shelf.get(name)) is not None:
                    shelf.remove(name)
                    place.run.names.pop((kind, name), None)
                    if not place.run.names:
                        emptied[place.run] = None
        for run in emptied:
            self._drop(run)

    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace."""
        self.forget({name for shelf in self._shelves.values() for name, _ in shelf if name.namespace == namespace})

    def reset(self) -> None:
        """Keep nothing, and remove all files."""
        self._settle()
        for run in list(self._runs):
            self._drop(run)
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
        on_disk = 0
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):  # gone since
                on_disk += path.stat().st_size
        if max(self.num_bytes, on_disk) > self.max_bytes:
            raise BlockStateError(
                f"a disk tier of at most {self.max_bytes} bytes counts {self.num_bytes} and has {on_disk}"
            )

    def join(self) -> None:
        """Wait until all runs are written that are to be. For tests."""
        self._writer.join()


def _chosen(rows: Tensor, at: Sequence[int]) -> Tensor:
    """Some of the rows; in memory of their own where that frees the others."""
    stretches = list(runs(at))
    if len(stretches) == 1:
        return rows[at[0] : at[0] + len(at)]
    return rows[list(at)]


def _end(folder: Path, writer: Writer, lock: FileLock, pid: int) -> None:
    """The store has gone, or the process ends."""
    if os.getpid() == pid:
        writer.stop()
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_left_behind(parent: Path) -> None:
    """Folders of processes that died."""
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = FileLock(folder / _LOCK)
        with contextlib.suppress(OSError, Timeout), lock.acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
