"""Keeps contents of blocks below the pool: in host memory, and in the files of a folder.

Contents are gathered in runs of a few MB. What is used the least leaves memory first, a run at once, into a file that a
thread writes; until then it is found in memory. Nobody who computes waits for a file to be written. Whatever fails is a
miss. Only what has a name in other processes is written, and what those have written is found here, too.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

from ..blocks import BlockHash, RootFacts, Roots, digest_behind
from ..errors import SavedBlocksError
from ..kv.contents import Kind, Part, new_rows
from ..stats import TierStats
from .folder import Folder, remove, saved_paths, use
from .run import Run, Tier
from .saved_file import DamagedFileError, ModelIdentity, read_saved_file

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # bytes of rows that are gathered in a run
_LEAST_RUNS = 4  # number of runs that each tier is to hold
_MOST_WAITING_BYTES = 2**29  # bytes on their way into files; beyond that, what leaves memory is lost

Name = tuple[BlockHash, bytes]
"""A content is found by the hash of its block and its namespace."""


class Place(NamedTuple):
    """`Place` says where a content lies."""

    run: Run
    row: int  # number of the content among the run's contents of its kind


class Tiers:
    """`Tiers` finds contents by name in host memory and in files. The caller holds the store's lock.

    `identities` returns what states of the model mean to other processes. With `host_bytes`, what waits to be written
    does not count; where a folder may take 0 bytes, files are only read, and what is wrong is not logged.
    """

    def __init__(
        self, roots: Roots, identities: Callable[[], Sequence[ModelIdentity]], host_bytes: int, folder: Folder | None
    ) -> None:
        self.host, self.disk = Tier("host", host_bytes), Tier("disk", 0 if folder is None else int(folder.max_bytes))
        self.tiers = [self.host] if host_bytes else []
        if folder is not None:
            self.tiers.append(self.disk)
        self.run_bytes = min([_RUN_BYTES, *(tier.max_bytes // _LEAST_RUNS for tier in self.tiers)])
        self.num_read_bytes = 0
        self.identities = identities
        self._roots, self.folder = roots, folder
        self._parts: dict[Kind, Sequence[Part]] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin without any content."""
        self._pid = os.getpid()
        # kind and digest -> name of a content, and its place
        self.entries: dict[tuple[Kind, bytes], tuple[Name, Place]] = {}
        self._runs: dict[Run, None] = {}  # those in memory in the order of their last use
        self._open: dict[tuple[bytes, bytes], Run] = {}  # digest of a model and namespace -> run that gathers
        self._num_models = 0  # identities of the model at the last look
        self._writer = ThreadPoolExecutor(1, "hf_paged_cache tiers")
        gathering = {} if self.host.max_bytes else self._open
        self._end = finalize(self, _write_rest, self._pid, gathering, self.folder)

    def _settle(self) -> None:
        """Begin anew in a forked child: what is in memory is the parent's. Files are found again."""
        if self._pid != os.getpid():
            self._end.detach()
            if self.folder is not None:
                self.folder = Folder(self.folder.path, self.folder.max_bytes)
            self._begin()

    def place_of(self, kind: Kind, name: Name) -> Place | None:
        """Return where a content lies; None: it is not here."""
        held, place = self.entries.get((kind, name[0].digest), (None, None))
        return place if held == name and place is not None and place.run.problem is None else None

    @property
    def problems(self) -> dict[str, str]:
        """Path of a file -> what is wrong with it; nothing of such a file is found."""
        return {str(run.path): run.problem for run in self._runs if run.problem is not None}

    def stats(self, namespace: bytes) -> tuple[TierStats, ...]:
        """Return the numbers of each tier; given a namespace, of its contents alone."""
        found = []
        for tier in self.tiers:
            here = {
                digest
                for (_, digest), (name, place) in self.entries.items()
                if place.run.tier is tier and namespace in (b"", name[1])
            }
            num_bytes = sum(run.num_bytes for run in self._runs if run.problem is None and run.tier is tier)
            moved = (tier.num_down, tier.num_up, tier.num_dropped, tier.num_refused)
            found.append(TierStats(tier.name, len(here), *(() if namespace else (num_bytes, tier.max_bytes, *moved))))
        return tuple(found)

    def lay_out(self, parts: Mapping[Kind, Sequence[Part]]) -> None:
        """Let rows be made of these parts from here on. Contents made of other parts are found no more."""
        for kind, of_kind in parts.items():
            if self._parts.setdefault(kind, of_kind) != of_kind:
                for run in [run for run in self._runs if run.is_in_memory]:
                    self._forget(run)
                self.entries = {key: entry for key, entry in self.entries.items() if key[0] != kind}
                self._parts[kind] = of_kind

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """Note that these contents are used, so that they go last."""
        for run in {place.run for name in names if (place := self.place_of(kind, name)) is not None}:
            del self._runs[run]
            self._runs[run] = None
            if run.file is not None:
                use(run.path)

    def put(
        self, kind: Kind, parts: Sequence[Part], contents: Sequence[tuple[Name, bytes]], rows: Sequence[Tensor]
    ) -> None:
        """Keep contents that are not here yet, as far as there is room.

        Args:
            contents: name of each content, and root of its sequence where that is known.
            rows: for each part [N, bytes], on its device or on the host; rows on the host are kept as they are.
        """
        self._settle()
        self.lay_out({kind: parts})
        on_host = [_on_host(part, of_part) for part, of_part in zip(parts, rows, strict=True)]
        origins = {root: self._origin_of(root) for root in {root for _, root in contents}}
        for at, (name, root) in enumerate(contents):
            block_hash, namespace = name
            model, facts = origins[root]
            if namespace or digest_behind(block_hash.parent, block_hash.token_bytes) != block_hash.digest:
                model = None  # it has a salt, or depends on more than tokens
            if model is None and not self.host.max_bytes:
                self.tiers[0].num_refused += 1
                continue
            run = self._open_run(model, namespace)
            number = run.add(kind, parts, block_hash, [of_part[at : at + 1] for of_part in on_host], facts)
            self.entries[kind, block_hash.digest] = name, Place(run, number)
            run.tier.num_down += 1
            if run.num_bytes >= self.run_bytes:
                self._lower(run) if run.tier is self.disk else self._close(run)
        in_memory = [run for run in self._runs if run.tier is self.host]
        over = sum(run.num_bytes for run in in_memory) - self.host.max_bytes
        for run in in_memory:  # the least recently used ones first
            if over > 0:
                over -= run.num_bytes
                self._lower(run)

    def _origin_of(self, root: bytes) -> tuple[ModelIdentity | None, RootFacts | None]:
        """Return the model and the facts by which others know sequences of this root; (None, None): they know none."""
        facts = self._roots.facts_of(root)
        if facts is None or facts.salt or self.folder is None:
            return None, None
        return next(((model, facts) for model in self.identities() if model.digest == facts.digest), (None, None))

    def _open_run(self, model: ModelIdentity | None, namespace: bytes) -> Run:
        """Return the run that gathers what a model has computed in a namespace."""
        path = Path() if self.folder is None else self.folder.new_path()
        new = Run(self.tiers[0], path, model, namespace, is_ours=True)
        run = self._open.setdefault(new.key, new)
        self._runs.setdefault(run)
        return run

    def _close(self, run: Run) -> None:
        """Gather nothing more in a run."""
        if self._open.get(run.key) is run:
            del self._open[run.key]

    def _lower(self, run: Run) -> None:
        """Write a run that leaves memory into the folder; without a folder, or where too much waits, it is lost."""
        self._close(run)
        if run.tier is self.host:
            self.host.num_dropped += len(run.content_keys())
        if self.folder is None or run.model is None:
            self._forget(run)
            return
        if run.tier is self.host:
            self.disk.num_down += len(run.content_keys())
            run.tier = self.disk
        waiting = sum(each.num_bytes for each in self._runs if each.tier is self.disk and each.is_in_memory)
        if waiting > min(_MOST_WAITING_BYTES, self.disk.max_bytes):
            self.disk.num_refused += len(run.content_keys())
            self._forget(run)
            return
        with suppress(RuntimeError):  # raised where the process ends
            self._writer.submit(_write, run, self.folder)

    def look(self) -> list[Run]:
        """Return others' files that were not adopted, if files have come or gone, or the model has other identities.

        Files that have gone are found no more.
        """
        self._settle()
        if self.folder is None:
            return []
        num_models, self._num_models = self._num_models, len(self.identities())
        written = [run for run in self._runs if not run.is_in_memory]  # the files of other runs are there soon
        try:
            paths = self.folder.changed_paths()
        except OSError as error:
            _warn_once(self.folder.path, f"cannot be read, so nothing in it is found: {error.strerror or error}")
            paths = []
        if paths is None and num_models == self._num_models:
            return []
        if paths is not None:
            there, known = {*paths}, {run.path for run in self._runs}
            self.disk.num_dropped += sum(self._forget(run) for run in written if run.path not in there)
            for path in paths:
                if path not in known:
                    self._read(Run(self.disk, path, None, is_ours=False))
        return [run for run in self._runs if not run.is_ours and not run.is_adopted and run.file is not None]

    def _read(self, run: Run) -> None:
        """Read what a file says of itself that others have written."""
        self._runs[run] = None
        try:
            run.file = read_saved_file(run.path)
            run.num_bytes = run.file.num_bytes
        except (SavedBlocksError, OSError) as error:
            self._lose(run, error)

    def adopt(self, run: Run, names: Mapping[bytes, BlockHash] | None = None) -> None:
        """Let the contents of a file be found from here on.

        Args:
            names: digest of a block in the file -> the block here; None: as in the file.
        """
        assert run.file is not None  # `look` has read it
        run.is_adopted = True
        here = [block if names is None else names.get(block.digest) for block in run.file.blocks]
        for content in run.file.contents:
            for row, number in enumerate(content.blocks):
                block = here[number]
                if block is not None and self.place_of(content.kind, (block, b"")) is None:
                    self.entries[content.kind, block.digest] = (block, b""), Place(run, row)

    def read(self, kind: Kind, run: Run, rows: Sequence[int]) -> list[list[Tensor]]:
        """Return rows of a run, for each part in one or some tensors of the host: [N, bytes].

        Raises:
            OSError: the file is not there, or not what was written; nothing of it is found from here on.
        """
        try:
            found = run.read(kind, rows)
        except (OSError, SavedBlocksError) as error:
            self._lose(run, error)
            raise OSError(str(error)) from error
        run.tier.num_up += len(rows)
        self.num_read_bytes += sum(fragment.nbytes for fragments in found for fragment in fragments)
        return found

    def _lose(self, run: Run, error: Exception) -> None:
        """Note that a file cannot be read. A damaged one is removed, so that its blocks are written anew."""
        run.problem = str(error)
        if run.tier.max_bytes and not isinstance(error, FileNotFoundError):
            _warn_once(run.path.parent, f"has what is not used: {error}")
            if isinstance(error, DamagedFileError):
                remove(run.path)

    def _forget(self, run: Run) -> int:
        """Forget a run; return the number of its contents that were found."""
        self._close(run)
        del self._runs[run]
        keys = [key for key in run.content_keys() if key in self.entries and self.entries[key][1].run is run]
        for key in keys:
            del self.entries[key]
        return len(keys)

    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace. Files have contents of the namespace b"" alone."""
        if not namespace and self.folder is not None:
            self.reset()
        else:
            for run in [run for run in self._runs if run.namespace == namespace]:
                self._forget(run)

    def reset(self) -> None:
        """Find nothing any more, and remove all files that this process has written. Files of other processes stay."""
        self._settle()
        for run in self._runs:
            if run.is_ours:
                run.drop()
        self._end.detach()
        self._begin()
        with suppress(OSError):
            for path in () if self.folder is None else saved_paths(self.folder.path):
                run = Run(self.disk, path, None, is_ours=False)
                run.problem = "it was there when all was forgotten"
                self._runs[run] = None

    def join(self) -> None:
        """Wait until all runs are written that are to be. For tests."""
        self._writer.submit(int).result()


def _on_host(part: Part, rows: Tensor) -> Tensor:
    """Return rows as they are if they are on the host, else a copy, in pinned memory if there is some."""
    if rows.device.type == "cpu":
        return rows
    try:
        return new_rows(part, len(rows), on_host=True).copy_(rows)
    except RuntimeError:  # no memory can be pinned
        return rows.cpu()


def _write(run: Run, folder: Folder) -> None:
    try:
        run.write(folder)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        _warn_once(folder.path, f"cannot be written, so blocks are dropped: {why}")


def _write_rest(pid: int, gathering: Mapping[tuple[bytes, bytes], Run], folder: Folder | None) -> None:
    """Write what is not written yet, as the store has gone or the process ends."""
    if os.getpid() == pid and folder is not None:
        for run in gathering.values():
            _write(run, folder)


@lru_cache
def _warn_once(folder: Path, why: str) -> None:
    logger.warning("PagedPrefixCache: disk_folder %s %s; this is said once", folder, why)
