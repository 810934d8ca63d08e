"""Runs: rows of contents that are one file, or become one. A tier writes what was evicted so, and `save` what is cached.

A run is found in memory until its file is written, and from then on in the file. What others have written is a run, too. The thread
that writes is a daemon: it dies with the process, and holds nothing that keeps a store alive.
"""

import json
import logging
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.hashing import TOKEN_BYTES, BlockHash
from ..blocks.roots import RootFacts
from ..kv.contents import Part
from .base import Kind, Name
from .folders import OwnFolder, SharedFolder, remove
from .saved_file import ModelFacts, SavedContents, SavedFile, new_path, read_rows, write_saved_file

logger = logging.getLogger("hf_paged_cache")

_HEADER_BYTES = 2**12  # of a file, beside what it says
_BYTES_OF_AN_ENTRY = 2**8  # in a header, at most: of a block, a root or a tensor
_BYTES_OF_A_CHECKSUM = 2**6
_BYTES_OF_A_TOKEN = 8  # written as text
_MOST_SECONDS = 5.0  # that are waited for a file when its store goes


def content_bytes(parts: Sequence[Part], name: Name) -> int:
    """Of one content in a file, at most."""
    num_tokens = len(name.block_hash.token_bytes) // TOKEN_BYTES
    header = _BYTES_OF_AN_ENTRY + _BYTES_OF_A_CHECKSUM * len(parts) + _BYTES_OF_A_TOKEN * num_tokens
    return header + sum(part.num_bytes for part in parts)


@lru_cache
def _warn_once(folder: Path, why: str) -> None:
    """A disk that is full is so for many files."""
    logger.warning(
        "PagedPrefixCache: blocks could not be written to %s, and are dropped, which is said once: %s", folder, why
    )


def kind_bytes(parts: Sequence[Part]) -> int:
    """Of what a file says of a kind, at most, beside its contents."""
    return _BYTES_OF_AN_ENTRY * (1 + sum(2 + len(part.pieces) for part in parts))


class _Chunk(NamedTuple):
    """Rows of one kind that came in at once. Copies from a device may be on the way."""

    first: int  # their first, among the run's of this kind
    names: Sequence[Name]
    rows: Sequence[Tensor]  # of each part, [N, bytes]
    arrival: Sequence[torch.Event]

    def wait(self) -> None:
        for event in self.arrival:
            event.synchronize()


class Run:
    """Rows of contents that become one file.

    Args:
        home: where.
        model: that has computed them; None: the file is this process's alone.

    Attributes:
        path: of the file.
        num_bytes: that the file takes at most.
        names: what is in it, by kind; whoever owns the run keeps these.
        is_shared: the file is for other processes, too.
        is_found: somebody else has written it.
        is_closed: no rows are added any more.
        is_being_written: now, by the writer; then there is a file of it, whatever becomes of the run.
        file: what the file says, once it is written.
        problem: why the file could not be written or read; then nothing of it is there.
    """

    def __init__(self, home: OwnFolder | SharedFolder, model: ModelFacts | None = None) -> None:
        self.path = new_path(home.path)
        self._facts, self._settings = ({}, {}) if model is None else (dict(model.facts), dict(model.settings))
        self.num_bytes = _HEADER_BYTES + len(json.dumps([self._facts, self._settings]))
        self.names: dict[tuple[Kind, Name], None] = {}
        self.is_shared = home.is_shared
        self.is_found = self.is_closed = self.is_being_written = False
        self.file: SavedFile | None = None
        self.problem: str | None = None
        self._home = home
        self._roots: dict[bytes, RootFacts] = {}
        self._parts: dict[Kind, tuple[Part, ...]] = {}
        self._chunks: dict[Kind, list[_Chunk]] | None = {}  # None: not in memory any more
        self._lock = threading.Lock()  # of where the rows are
        self._is_dropped = False

    @classmethod
    def found(cls, file: SavedFile, home: SharedFolder) -> "Run":
        """A file that is there."""
        run = cls(home)
        run.path, run.num_bytes, run.file = file.path, file.num_bytes, file
        run.is_found = run.is_closed = True
        run._chunks = None
        return run

    @property
    def has_rows(self) -> bool:
        """Whether any were added."""
        return bool(self._chunks)

    @property
    def is_in_memory(self) -> bool:
        """Whether it has not been written yet."""
        return self._chunks is not None

    def add(
        self,
        kind: Kind,
        parts: Sequence[Part],
        names: Sequence[Name],
        rows: Sequence[Tensor],
        roots: Iterable[RootFacts] = (),
        arrival: Sequence[torch.Event] = (),
    ) -> int:
        """More rows, as long as it is not closed; returns the number of their first among those of their kind.

        Args:
            rows: of each part, [N, bytes].
            roots: of these contents' sequences, where others may find them.
        """
        assert self._chunks is not None
        if kind not in self._parts:
            self._parts[kind] = tuple(parts)
            self.num_bytes += kind_bytes(parts)
        for root in roots:
            if (digest := root.root()) not in self._roots:
                self._roots[digest] = root
                self.num_bytes += _BYTES_OF_AN_ENTRY + 2 * len(root.regime)
        self.num_bytes += sum(content_bytes(parts, name) for name in names)
        chunks = self._chunks.get(kind, [])
        first = chunks[-1].first + len(chunks[-1].names) if chunks else 0
        self._chunks[kind] = [*chunks, _Chunk(first, names, rows, arrival)]
        return first

    def save(self) -> SavedFile:
        """Write the file now, into its folder as it is; the rows stay in memory.

        Raises:
            OSError: it cannot be; nothing is left of it.
        """
        assert self._chunks is not None
        numbers: dict[BlockHash, int] = {}
        contents, rows = [], {}
        for kind, chunks in self._chunks.items():
            for chunk in chunks:
                chunk.wait()
            of_parts = [[chunk.rows[part] for chunk in chunks] for part in range(len(self._parts[kind]))]
            rows[kind] = [fragments[0] if len(fragments) == 1 else torch.cat(fragments) for fragments in of_parts]
            names = [name for chunk in chunks for name in chunk.names]
            blocks = tuple(numbers.setdefault(name.block_hash, len(numbers)) for name in names)
            contents.append(SavedContents(kind, self._parts[kind], blocks, ()))
        parents = {block.parent for block in numbers}
        roots = tuple(root for digest, root in self._roots.items() if digest in parents)
        block_size = len(next(iter(numbers)).token_bytes) // TOKEN_BYTES
        file = SavedFile(self.path, 0, block_size, self._facts, self._settings, roots, (*numbers,), tuple(contents))
        self.file = write_saved_file(file, rows, self._home.mode, outlives=self.is_shared)
        return self.file

    def write(self, *, may_wait: bool = True) -> None:
        """Let the file have it when its folder has room. What it cannot hold is lost.

        Args:
            may_wait: for other processes that write.
        """
        with self._lock:
            if self._is_dropped or self._chunks is None:
                return
            self.is_being_written = True
        try:
            if not self._home.write(self.num_bytes, self.save, may_wait=may_wait):
                self.problem = "there is no room for it"
        except OSError as error:
            _warn_once(self.path.parent, error.strerror or str(error))
            self.problem = str(error)
        finally:
            with self._lock:
                self._chunks, self.is_being_written = None, False
                if self._is_dropped:
                    remove(self.path)

    def read(self, kind: Kind, rows: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
        """Of each part of a kind, the rows `[first, first + number)` for each (first, number), in some tensors of the host.

        Raises:
            OSError, SavedBlocksError: the file is not there, or not what was written.
        """
        chunks_of = self._chunks
        if chunks_of is None:
            if self.file is None:
                raise OSError(f"{self.path} is not there")
            return read_rows(self.file, kind, rows)
        chunks, loaded = chunks_of[kind], [list[Tensor]() for _ in self._parts[kind]]
        for first, number in rows:
            at = bisect_right(chunks, first, key=lambda chunk: chunk.first) - 1
            while at < len(chunks) and chunks[at].first < first + number:
                chunk = chunks[at]
                chunk.wait()
                for fragments, of_part in zip(loaded, chunk.rows, strict=True):
                    fragments.append(of_part[max(0, first - chunk.first) : first + number - chunk.first])
                at += 1
        return loaded

    def use(self) -> None:
        """It is used: whoever shares its folder is to keep it."""
        if self.file is not None:
            self._home.use(self.path)

    def drop(self) -> None:
        """Nobody asks for it any more: its file goes, written already or not."""
        with self._lock:
            self._is_dropped = True
            if self._chunks is None:
                remove(self.path)
            elif not self.is_being_written:
                self._chunks = None


class Writer:
    """Writes runs one after the other, in a thread that is started with the first."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Run | None] = SimpleQueue()
        self._must_stop = threading.Event()
        self._thread: threading.Thread | None = None

    def give(self, run: Run) -> None:
        """Write this run when those before it are written."""
        self._queue.put(run)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_write_all, args=(self._queue, self._must_stop), name="hf_paged_cache tiers", daemon=True
            )
            self._thread.start()

    def stop(self) -> list[Run]:
        """Write no more runs, and wait for the one that is being written, but not for long; returns those that are not written."""
        self._must_stop.set()
        self.join(_MOST_SECONDS)
        left = []
        while not self._queue.empty():
            if (run := self._queue.get()) is not None:
                left.append(run)
        return left

    def join(self, seconds: float | None = None) -> None:
        """Wait until all runs that were given are written."""
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():  # the collector may run in any
            thread.join(seconds)


def _write_all(queue: "SimpleQueue[Run | None]", must_stop: threading.Event) -> None:
    while (run := queue.get()) is not None and not must_stop.is_set():
        run.write()
        del run  # while it waits, it holds nothing
