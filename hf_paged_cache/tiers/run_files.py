"""Runs of contents on their way into files: kept in memory until a thread of its own has written them, then read from there.

A run is a few MB of rows that were evicted together. Its file is in the safetensors format, and nobody reads it before it is
complete. The thread is a daemon: it dies with the process, and holds nothing that keeps a store alive.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .base import Kind, Name

logger = logging.getLogger("hf_paged_cache")

_HEADER_BYTES = 2**12  # of a file, beside its tensors; more than that for many tensors
_BYTES_OF_AN_ENTRY = 2**8  # in the header, at most
_MOST_SECONDS = 5.0  # that are waited for a file when its store goes

_Chunk = Sequence[Tensor]  # rows that were evicted at once, of each part: [N, bytes] uint8 of the host


class _Arriving(NamedTuple):
    """A chunk in memory. Copies from a device may be on the way."""

    rows: _Chunk
    arrival: Sequence[torch.Event]

    def wait(self) -> None:
        for event in self.arrival:
            event.synchronize()


class Run:
    """Chunks of rows that become one file.

    Attributes:
        num_bytes: that the file takes at most.
        is_closed: no rows are added any more.
        is_being_written: now, by the writer; then there is a file of it, whatever becomes of the run.
        is_shared: its file is for other processes, too.
        is_lost: its file could not be written or read; nothing of it is there.
        names: what is in it, by kind; whoever owns the run keeps these.
    """

    is_shared = False

    def __init__(self) -> None:
        self.num_bytes = _HEADER_BYTES
        self.is_closed = False
        self.is_being_written = False
        self.is_lost = False
        self.names: dict[tuple[Kind, Name], None] = {}
        self._content: list[_Arriving] | Path = []
        self._lock = threading.Lock()  # of where the content is
        self._is_dropped = False

    @property
    def is_in_memory(self) -> bool:
        """Whether it has not been written yet."""
        return not isinstance(self._content, Path)

    def add(self, chunk: _Chunk, arrival: Sequence[torch.Event]) -> int:
        """More rows, as long as it is not being written; returns the number of the chunk."""
        content = self._content
        assert isinstance(content, list)  # not closed
        self.num_bytes += sum(rows.nbytes + _BYTES_OF_AN_ENTRY for rows in chunk)
        content.append(_Arriving(chunk, arrival))
        return len(content) - 1

    def write(self, path: Path) -> None:
        """Let a file have it. What it cannot hold is lost."""
        with self._lock:
            content = self._content
            if self._is_dropped or isinstance(content, Path):
                return
            self.is_being_written = True
        try:
            self._save(content, path)
        finally:
            self.is_being_written = False

    def _save(self, content: list[_Arriving], path: Path) -> None:
        for chunk in content:
            chunk.wait()
        try:
            self._write_file(content, path)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "PagedPrefixCache: blocks could not be written to %s, and are dropped: %s", path.parent, error
            )
            self.is_lost = True
            _unlink(path)
            return
        if self.is_lost:  # there was no room for it
            return
        with self._lock:
            if not self._is_dropped:
                self._content = path
                return
        _unlink(path)

    def _write_file(self, content: list[_Arriving], path: Path) -> None:
        tensors = {
            _name(c, p): rows.contiguous() for c, chunk in enumerate(content) for p, rows in enumerate(chunk.rows)
        }
        save_file(tensors, path)

    def read(self, places: Sequence[tuple[int, int, int]], num_parts: int) -> list[list[Tensor]]:
        """Of each part, rows of the host: for each (chunk, first, number). The chunks are of one kind.

        Raises:
            OSError, SavedBlocksError: the file is not there, or not what was written.
        """
        content = self._content
        if isinstance(content, list):
            for chunk, _, _ in places:
                content[chunk].wait()
            return [
                [content[chunk].rows[part][first : first + number] for chunk, first, number in places]
                for part in range(num_parts)
            ]
        return self._read_file(content, places, num_parts)

    def _read_file(self, path: Path, places: Sequence[tuple[int, int, int]], num_parts: int) -> list[list[Tensor]]:
        try:
            with safe_open(path, framework="pt") as file:
                loaded = []
                for part in range(num_parts):
                    slices = {chunk: file.get_slice(_name(chunk, part)) for chunk, _, _ in places}
                    loaded.append([slices[chunk][first : first + number] for chunk, first, number in places])
                return loaded
        except SafetensorError as error:
            raise OSError(f"{path} is not what was written: {error}") from error

    @property
    def path(self) -> Path | None:
        """Its file, once it is written."""
        return self._content if isinstance(self._content, Path) else None

    def drop(self) -> None:
        """Nobody asks for it any more: its file goes, written already or not."""
        with self._lock:
            self._is_dropped, content = True, self._content
        if isinstance(content, Path):
            _unlink(content)


class Writer:
    """Writes runs one after the other, in a thread that is started with the first."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Run, Path] | None] = SimpleQueue()
        self._must_stop = threading.Event()
        self._thread: threading.Thread | None = None

    def give(self, run: Run, path: Path) -> None:
        """Write this run when those before it are written."""
        self._queue.put((run, path))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_write_all, args=(self._queue, self._must_stop), name="hf_paged_cache tiers", daemon=True
            )
            self._thread.start()

    def given(self) -> list[Run]:
        """Runs that were not written any more."""
        found = []
        while not self._queue.empty():
            each = self._queue.get()
            if each is not None:
                found.append(each[0])
        return found

    def stop(self) -> None:
        """Write no more runs, and wait for the one that is being written, but not for long."""
        self._must_stop.set()
        self._join(_MOST_SECONDS)

    def join(self) -> None:
        """Wait until all runs that were given are written."""
        self._join(None)

    def _join(self, seconds: float | None) -> None:
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():  # the collector may run in any
            thread.join(seconds)


def _write_all(queue: "SimpleQueue[tuple[Run, Path] | None]", must_stop: threading.Event) -> None:
    while (given := queue.get()) is not None and not must_stop.is_set():
        run, path = given
        run.write(path)
        del given, run  # while it waits, it holds nothing


def _name(chunk: int, part: int) -> str:
    return f"{chunk}.{part}"


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
