"""Writes cached blocks into files that other processes can read: which blocks, by which names, some MB at a time.

Nothing is held meanwhile: blocks that are evicted before it is their turn are left out. A file that is damaged goes, and what is cached of
it is written anew.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..blocks import BlockHash, HashChain
from ..blocks.roots import RootFacts, Roots
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, SavedBlocksError
from ..tiers.base import STATES, Kind, Name
from ..tiers.folders import Folder, remove
from ..tiers.run_files import Run
from ..tiers.saved_file import DamagedFileError, Identity, new_path, read_saved_file, read_to_the_end, saved_paths
from ..tiers.sharing import renamed
from .block_store import BlockStore

logger = logging.getLogger("hf_paged_cache")

_FILE_BYTES = 2**26  # of rows in a file, about


class Model(NamedTuple):
    """Whose blocks they are.

    Attributes:
        digest: as roots of this process have it.
        identity: as other processes know it.
        roots: of its rows.
    """

    digest: bytes
    identity: Identity
    roots: Roots


class Saved(NamedTuple):
    """What was written.

    Attributes:
        num_blocks: written now.
        num_known: that the folder had, whole.
        num_bytes: of the files written.
        not_saved: reason -> blocks; 0 where there are none.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> cache.store.save(folder).num_blocks, cache.store.save(folder).num_known
        (5, 5)
    """

    num_blocks: int
    num_known: int
    num_bytes: int
    not_saved: dict[str, int]


def save_blocks(
    blocks: BlockStore,
    model: Model,
    folder: Path,
    prefixes: Sequence[TokenIds] | None,
    *,
    pinned: bool,
    mode: int,
    progress: Callable[[int, int], None],
) -> Saved:
    """Write blocks without a salt into a folder, which is made where it is not there.

    Files that are there and have some of these blocks are read to their end; those that are damaged are removed.

    Args:
        prefixes: only blocks of these; None: all.
        pinned: only those that pins hold.
        mode: permissions of files, and of the folder if it is made.
        progress: told how many of how many blocks are done.

    Raises:
        OSError: the folder or a file cannot be written. Files that were written are whole.
    """
    home = Folder(folder, mode=mode)
    home.make()
    with blocks.lock:
        blocks.settle()
        chosen, roots, not_saved = _choose(blocks, model, prefixes, pinned=pinned)
        parts = blocks.tiers.layout.parts()
        step = max(1, _FILE_BYTES // max(1, sum(part.num_bytes for of_kind in parts.values() for part in of_kind)))
    known = _known_in(folder, model.identity.facts, {saved.digest for _, saved in chosen})
    num_done = num_gone = num_written = num_bytes = 0
    while num_done < len(chosen):
        some, run = chosen[num_done : num_done + step], Run(new_path(folder), model.identity)
        with blocks.lock:
            blocks.settle()
            num_gone += len(some) - _copy_out(blocks, some, run, roots, known)
        run.write(home)
        if run.file is not None:
            num_written += len(run.file.blocks)
            num_bytes += run.file.num_bytes
        num_done += len(some)
        progress(num_done, len(chosen))
    if num_gone:
        not_saved["evicted meanwhile"] = num_gone
    return Saved(num_written, len(chosen) - num_gone - num_written, num_bytes, not_saved)


def _known_in(folder: Path, facts: Mapping[str, str], wanted: Collection[bytes]) -> set[tuple[Kind, bytes]]:
    """Kind and digest of what a folder's files of a model have, whole, if they have some of these blocks. Damaged ones go."""
    known: set[tuple[Kind, bytes]] = set()
    for path in saved_paths(folder) if wanted else ():
        try:
            file = read_saved_file(path)
            if file.facts == facts and any(block.digest in wanted for block in file.blocks):
                read_to_the_end(file)
                known |= {(each.kind, file.blocks[number].digest) for each in file.contents for number in each.blocks}
        except DamagedFileError as error:
            logger.warning("PagedPrefixCache: a file is removed, and what is cached of it is saved again: %s", error)
            remove(path)
        except (SavedBlocksError, OSError):
            continue
    return known


def _choose(
    blocks: BlockStore, model: Model, prefixes: Sequence[TokenIds] | None, *, pinned: bool
) -> tuple[list[tuple[BlockHash, BlockHash]], Collection[RootFacts], dict[str, int]]:
    """Blocks, as this process names them and as files do, parents first; their roots; and why others cannot be named there."""
    by_id = blocks.allocator.hashes()
    by_digest = {block_hash.digest: block_hash for block_hash in by_id.values()}
    wanted: Collection[bytes] = by_digest
    if pinned:
        wanted = {by_id[block_id].digest for block_id in blocks.pins.block_ids(b"") if block_id in by_id}
    elif prefixes is not None:
        wanted = {digest for tokens in prefixes for digest in _digests_of(blocks, model, tokens)} & by_digest.keys()
    nothing = (
        "nothing is pinned"
        if pinned
        else f"no such block is cached: compute it first, with cache.prefill; blocks have {blocks.block_size} tokens, and what is shorter has none"
    )
    not_saved = {} if wanted else {nothing: 0}
    roots = {
        here: facts._replace(digest=model.identity.digest)
        for here in {block_hash.parent for block_hash in by_digest.values()}
        if (facts := model.roots.facts_of(here)) is not None and facts.digest == model.digest
    }
    names = renamed(by_digest.values(), {here: root.root() for here, root in roots.items()})
    chosen = [(by_digest[digest], saved) for digest, saved in names.items() if digest in wanted]
    if num_unnamed := len(wanted) - len(chosen):
        not_saved["the model has changed since they were computed, or blocks before them were evicted"] = num_unnamed
    return chosen, roots.values(), not_saved


def _digests_of(blocks: BlockStore, model: Model, token_ids: TokenIds) -> Iterable[bytes]:
    """Of all blocks of a prefix, under whatever conditions of the row."""
    for facts in model.roots.all_of(model.digest, b""):
        hashes = HashChain(model.roots.of(facts), blocks.block_size)
        hashes.extend(token_ids)
        yield from (block_hash.digest for block_hash in hashes.hashes())


def _copy_out(
    blocks: BlockStore,
    some: Sequence[tuple[BlockHash, BlockHash]],
    run: Run,
    roots: Collection[RootFacts],
    known: Collection[tuple[Kind, bytes]],
) -> int:
    """Add what is there of these blocks and not known to a run; returns how many of them are there. The store's lock is held."""
    layout, num_here = blocks.tiers.layout, 0
    new: dict[Kind, dict[Name, Any]] = {}
    for block_hash, saved in some:
        at = blocks.allocator.match_prefix((block_hash,), b"")
        num_here += len(at)
        for kind, content in layout.contents_of(at[0], block_hash.digest) if at else ():
            if (kind, saved.digest) not in known:
                new.setdefault(kind, {})[Name(saved, b"")] = content
            if kind == STATES:
                layout.see_states(content)
    for kind, contents in new.items():
        if parts := layout.parts().get(kind):
            run.add(kind, parts, [*contents], layout.rows_of(kind, [*contents.values()]), roots)
    return num_here


def folder_of(folder: str | os.PathLike[str]) -> Path:
    """The folder that a user names.

    Raises:
        CacheArgumentError: it is no path, or a file, or in one.
    """
    if not isinstance(folder, str | os.PathLike):
        raise CacheArgumentError(f"folder is {folder!r}; give a folder's path")
    path = Path(folder).expanduser().absolute()
    if file := next((each for each in (path, *path.parents) if each.is_file()), None):
        raise CacheArgumentError(f"{file} is a file; give a folder")
    return path
