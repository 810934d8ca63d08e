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
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from ..blocks import BlockHash, RootFacts, Roots, digest_behind
from ..errors import SavedBlocksError
from ..kv.contents import Kind, Part, new_rows
from ..stats import TierStats
from .folder import Folder, remove, saved_paths, use
from .saved_file import DamagedFileError, ModelIdentity, SavedFile, encoded, read_rows, read_saved_file

logger = logging.getLogger("hf_paged_cache")

_RUN_BYTES = 2**23  # bytes of rows that are gathered in a run
_LEAST_RUNS = 4  # number of runs that each tier is to hold
_MOST_WAITING_BYTES = 2**29  # bytes on their way into files; beyond that, what leaves memory is lost

Name = tuple[BlockHash, bytes]
"""A content is found by the hash of its block and its namespace."""


class Tier:
    """`Tier` counts what memory, or a folder, keeps; see `TierStats`."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self.name, self.max_bytes = name, max_bytes
        self.num_down = self.num_up = self.num_dropped = self.num_refused = 0


class Run:
    """`Run` has rows of contents of one model, in memory until its file is written; or it is a file of others.

    `model` is None where it has no name in other processes, or where others wrote the file.
    """

    def __init__(
        self, tier: Tier, path: Path, model: ModelIdentity | None = None, namespace: bytes = b"", *, is_ours: bool
    ) -> None:
        self.tier, self.path, self.model, self.namespace, self.is_ours = tier, path, model, namespace, is_ours
        self.file: SavedFile | None = None  # what the file says of itself, once it is there
        self.problem: str | None = None  # why nothing of the run is found
        self.why_not: str | None = None  # why nothing of a file that others have written is of use here
        self.is_adopted = False  # contents of a file that others have written are found
        self.is_dropped = False  # its file is not to be there, written already or not
        self.num_bytes = 0  # of the file, or of memory, which torch deals out in powers of two
        # kind -> parts of a row, the block of each row, and each row: [1, bytes] of each part; None: not in memory
        self.rows: dict[Kind, tuple[Sequence[Part], list[BlockHash], list[list[Tensor]]]] | None = None
        if is_ours:
            self.rows = {}
        self.roots: dict[RootFacts, None] = {}

    def content_keys(self) -> list[tuple[Kind, bytes]]:
        """Return kind and digest of each content."""
        if self.file is not None:
            return self.file.content_keys()
        return [(kind, block.digest) for kind, (_, blocks, _) in (self.rows or {}).items() for block in blocks]

    def write(self, folder: Folder) -> None:
        """Write the rows into the file. Raises OSError where it cannot be written; the rows are lost."""
        try:
            if self.rows and self.model is not None and not self.is_dropped:
                rows_of = {}
                for kind, (parts, blocks, rows) in self.rows.items():
                    rows_of[kind] = parts, blocks, [torch.cat(of_part) for of_part in zip(*rows, strict=True)]
                file, data = encoded(self.path, self.model, self.roots, rows_of)
                folder.write(self.path, data)
                self.file, self.num_bytes = file, len(data)
        except OSError as error:
            self.problem = str(error)
            raise
        finally:
            self.rows = None
            if self.is_dropped:
                remove(self.path)

    def read(self, kind: Kind, numbers: Sequence[int]) -> list[list[Tensor]]:
        """Return these rows, for each part in one or some tensors of the host, or raise OSError or DamagedFileError."""
        if (in_memory := self.rows) is not None:  # the file may be written at any time
            rows = [in_memory[kind][2][number] for number in numbers]
            return [[*of_part] for of_part in zip(*rows, strict=True)]
        if self.file is None:
            raise FileNotFoundError(f"{self.path} could not be written")
        return [[of_part] for of_part in read_rows(self.file, kind, numbers)]


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
        self._end: finalize[..., Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin without any content, as a forked child does: what is in memory is its parent's."""
        if self._end is not None:
            self._end.detach()
        self._parts: dict[Kind, Sequence[Part]] = {}
        # kind and digest -> name of a content, and its place
        self.entries: dict[tuple[Kind, bytes], tuple[Name, Place]] = {}
        self.runs: dict[Run, None] = {}  # those in memory in the order of their last use
        # digest of a model and namespace -> run that gathers what the model has computed in the namespace
        self._open: dict[tuple[bytes, bytes], Run] = {}
        self._num_models = 0  # identities of the model at the last look
        self.writer = ThreadPoolExecutor(1, "hf_paged_cache tiers")
        if self.folder is not None:
            self.folder.looked_at = None
        gathering = {} if self.host.max_bytes else self._open
        self._end = finalize(self, _write_rest, gathering, self.folder)

    def place_of(self, kind: Kind, name: Name) -> Place | None:
        """Return where a content lies; None: it is not here."""
        held, place = self.entries.get((kind, name[0].digest), (None, None))
        return place if held == name and place is not None and place.run.problem is None else None

    def stats(self, namespace: bytes) -> tuple[TierStats, ...]:
        """Return the numbers of each tier; given a namespace, of its contents alone."""
        found = []
        for tier in self.tiers:
            here = {
                digest
                for (_, digest), (name, place) in self.entries.items()
                if place.run.tier is tier and namespace in (b"", name[1])
            }
            num_bytes = sum(run.num_bytes for run in self.runs if run.problem is None and run.tier is tier)
            moved = (tier.num_down, tier.num_up, tier.num_dropped, tier.num_refused)
            found.append(TierStats(tier.name, len(here), *(() if namespace else (num_bytes, tier.max_bytes, *moved))))
        return tuple(found)

    def lay_out(self, parts: Mapping[Kind, Sequence[Part]]) -> None:
        """Let rows be made of these parts from here on. Files stay; what was made of other parts is found no more."""
        changed = {kind for kind, of_kind in parts.items() if self._parts.setdefault(kind, of_kind) != of_kind}
        if changed:
            for run in [run for run in self.runs if run.rows is not None]:
                self._forget(run)
            of_files = {key: entry for key, entry in self.entries.items() if entry[1].run in self.runs}
            self.entries = {key: entry for key, entry in of_files.items() if key[0] not in changed}
            self._parts |= parts
            if self.folder is not None:
                self.folder.looked_at = None  # files may fit now that did not

    def touch(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        """Note that these contents are used, so that they go last; return the names of those that are not here."""
        places = {name: self.place_of(kind, name) for name in names}
        for run in {place.run for place in places.values() if place is not None}:
            del self.runs[run]
            self.runs[run] = None
            if run.file is not None:
                use(run.path)
        return [name for name, place in places.items() if place is None]

    def put(
        self, kind: Kind, parts: Sequence[Part], contents: Sequence[tuple[Name, bytes]], rows: Sequence[Tensor]
    ) -> None:
        """Keep contents that are not here yet, as far as there is room.

        `contents` are their names and the roots of their sequences; `rows` are [N, bytes] for each part.
        """
        self.lay_out({kind: parts})
        on_host = [_on_host(part, of_part) for part, of_part in zip(parts, rows, strict=True)]
        models = {root: self._model_of(root) for root in {root for _, root in contents}}
        for at, (name, root) in enumerate(contents):
            block_hash, namespace = name
            model, facts = models[root], self._roots.facts_of(root)
            if namespace or digest_behind(block_hash.parent, block_hash.token_bytes) != block_hash.digest:
                model = None  # it has a salt, or depends on more than tokens
            if model is None and not self.host.max_bytes:
                self.tiers[0].num_refused += 1
                continue
            key = b"" if model is None else model.digest, namespace
            if key not in self._open:
                path = Path() if self.folder is None else self.folder.new_path()
                self._open[key] = Run(self.tiers[0], path, model, namespace, is_ours=True)
            run = self._open[key]
            self.runs.setdefault(run)
            assert run.rows is not None  # nobody writes it yet
            _, blocks, of_kind = run.rows.setdefault(kind, (parts, [], []))
            blocks.append(block_hash)
            of_kind.append([of_part[at : at + 1] for of_part in on_host])
            self.entries[kind, block_hash.digest] = name, Place(run, len(of_kind) - 1)
            run.num_bytes += sum(1 << (of_part.nbytes - 1).bit_length() for of_part in of_kind[-1])
            if facts is not None:
                run.roots[facts] = None
            run.tier.num_down += 1
            if run.num_bytes >= self.run_bytes:
                self._lower(run) if run.tier is self.disk else self._close(run)
        in_memory = [run for run in self.runs if run.tier is self.host]
        over = sum(run.num_bytes for run in in_memory) - self.host.max_bytes
        for run in in_memory:  # the least recently used ones first
            if over > 0:
                over -= run.num_bytes
                self._lower(run)

    def _model_of(self, root: bytes) -> ModelIdentity | None:
        """Return the model by which others know sequences of this root; None: they know none."""
        facts = self._roots.facts_of(root)
        if facts is None or facts.salt or self.folder is None:
            return None
        return next((model for model in self.identities() if model.digest == facts.digest), None)

    def _close(self, run: Run) -> None:
        """Gather nothing more in a run."""
        for key in [key for key, gathering in self._open.items() if gathering is run]:
            del self._open[key]

    def _lower(self, run: Run) -> None:
        """Write a run that leaves memory into the folder; without a folder, or where too much waits, it is lost."""
        self._close(run)
        num_contents = len(run.content_keys())
        if run.tier is self.host:
            self.host.num_dropped += num_contents
        if self.folder is None or run.model is None:
            self._forget(run)
            return
        if run.tier is self.host:
            self.disk.num_down += num_contents
            run.tier = self.disk
        waiting = sum(each.num_bytes for each in self.runs if each.tier is self.disk and each.rows is not None)
        if waiting > min(_MOST_WAITING_BYTES, self.disk.max_bytes):
            self.disk.num_refused += num_contents
            self._forget(run)
            return
        with suppress(RuntimeError):  # raised where the process ends
            self.writer.submit(_write, run, self.folder)

    def look(self) -> list[Run]:
        """Return others' files that were not adopted, if files have come or gone, or the model has other identities.

        Files that have gone are found no more.
        """
        if self.folder is None:
            return []
        num_models, self._num_models = self._num_models, len(self.identities())
        written = [run for run in self.runs if run.rows is None]  # the files of other runs are there soon
        try:
            paths = self.folder.changed_paths()
        except OSError as error:
            say_once(self.folder.path, f"cannot be read, so nothing in it is found: {error.strerror or error}")
            paths = []
        if paths is None and num_models == self._num_models:
            return []
        if paths is not None:
            there, known = {*paths}, {run.path for run in self.runs}
            self.disk.num_dropped += sum(self._forget(run) for run in written if run.path not in there)
            for path in [path for path in paths if path not in known]:
                run = Run(self.disk, path, is_ours=False)
                self.runs[run] = None
                try:
                    run.file = read_saved_file(path)
                    run.num_bytes = run.file.num_bytes
                except (SavedBlocksError, OSError) as error:
                    self._lose(run, error)
        return [run for run in self.runs if not run.is_ours and not run.is_adopted and run.file is not None]

    def adopt(self, run: Run, names: Mapping[bytes, BlockHash] | None = None) -> None:
        """Let the contents of a file be found from here on; `names` has blocks here by their digests in the file."""
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

        OSError is raised where the file is not what was written; nothing of it is found from here on.
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
            say_once(run.path.parent, f"has what is not used: {error}")
            if isinstance(error, DamagedFileError):
                remove(run.path)

    def _forget(self, run: Run) -> int:
        """Forget a run; return the number of its contents that were found."""
        self._close(run)
        del self.runs[run]
        keys = [key for key in run.content_keys() if key in self.entries and self.entries[key][1].run is run]
        for key in keys:
            del self.entries[key]
        return len(keys)

    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace. Files have contents of the namespace b"" alone."""
        if not namespace and self.folder is not None:
            self.reset()
        else:
            for run in [run for run in self.runs if run.namespace == namespace]:
                self._forget(run)

    def reset(self) -> None:
        """Find nothing any more, and remove all files that this process has written. Files of other processes stay."""
        for run in self.runs:
            if run.is_ours:
                run.is_dropped = True
                if run.file is not None:
                    remove(run.path)
        self.begin()
        with suppress(OSError):
            for path in () if self.folder is None else saved_paths(self.folder.path):
                run = Run(self.disk, path, is_ours=False)
                run.problem = "it was there when all was forgotten"
                self.runs[run] = None


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
        say_once(folder.path, f"cannot be written, so blocks are dropped: {why}")


def _write_rest(gathering: Mapping[tuple[bytes, bytes], Run], folder: Folder | None) -> None:
    """Write what is not written yet, as the store has gone or the process ends."""
    if folder is not None:
        for run in gathering.values():
            _write(run, folder)


@lru_cache
def say_once(folder: Path, why: str, level: int = logging.WARNING) -> None:
    """Log something about a folder, once in this process."""
    logger.log(level, "PagedPrefixCache: disk_folder %s %s; this is said once", folder, why)
