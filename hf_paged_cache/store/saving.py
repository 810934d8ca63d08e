"""Writes cached blocks into files that other processes can read: which blocks, by which names, some MB at a time.

Nothing is held meanwhile: blocks that are evicted before it is their turn are left out. A file that is damaged is lost to readers as
a whole: what is whole in it is written anew, under another name, and the file goes.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..blocks import BlockHash, HashChain
from ..blocks.hashing import digest_behind
from ..blocks.roots import RootFacts, Roots
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, SavedBlocksError
from ..tiers.base import STATES, Kind, Name
from ..tiers.folders import SharedFolder, make_folder, remove
from ..tiers.run_files import Run
from ..tiers.saved_file import ROWS_DAMAGED, DamagedFileError, Identity, read_saved_file, read_whole_rows, saved_paths
from ..tiers.sharing import renamed
from .block_store import BlockStore

_FILE_BYTES = 2**26  # of rows in a file, about
_LOST = "they were in a damaged file, and are not among those that are saved now"


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


class _Chosen(NamedTuple):
    """A block to save: as this process names it, and as files do."""

    block_hash: BlockHash
    saved: BlockHash


class Saved(NamedTuple):
    """What was written.

    Attributes:
        num_blocks: written now, those in place of damaged ones too.
        num_known: that the folder had, whole.
        num_bytes: of the files written.
        not_saved: reason -> blocks; 0 where there are none.
        replaced: path of each file that was damaged, and is no longer there -> what was wrong. What of it was whole, and what
            is cached of the rest, is in other files now.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> cache.store.save(folder).num_blocks, cache.store.save(folder).num_known
        (5, 5)
    """

    num_blocks: int
    num_known: int
    num_bytes: int
    not_saved: dict[str, int]
    replaced: dict[str, str] = {}  # noqa: RUF012  # of a tuple, never written


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

    Files that are there and have some of these blocks are read to their end; those that are damaged are replaced.

    Args:
        prefixes: only blocks of these; None: all.
        pinned: only those that pins hold.
        mode: permissions of files; see `make_folder` for those of the folder.
        progress: told how many of how many blocks are done.

    Raises:
        OSError: the folder or a file cannot be written. Files that were written are whole.
    """
    make_folder(folder, mode)
    home = SharedFolder(folder, mode=mode)
    with home.locked():
        with blocks.lock:
            blocks.settle()
            chosen, roots, not_saved = _choose(blocks, model, prefixes, pinned=pinned)
            step = _blocks_of_a_file(blocks)
        wanted = {each.saved.digest for each in chosen}
        known, lost, replaced = _mend(home, model.identity.facts, wanted)
        if num_lost := len(lost - wanted):
            not_saved[_LOST] = num_lost
        num_done = num_gone = num_written = num_bytes = 0
        while num_done < len(chosen):
            some = chosen[num_done : num_done + step]
            with blocks.lock:
                blocks.settle()
                run, num_here = _copy_out(blocks, some, Run(home, model.identity), roots, known)
            num_gone += len(some) - num_here
            if run.has_rows:
                file = run.save()
                num_written += len(file.blocks)
                num_bytes += file.num_bytes
            num_done += len(some)
            progress(num_done, len(chosen))
    if num_gone:
        not_saved["evicted meanwhile"] = num_gone
    return Saved(num_written, len(chosen) - num_gone - num_written, num_bytes, not_saved, replaced)


class _Mended(NamedTuple):
    """What was found in a folder.

    Attributes:
        known: kind and digest of what is in it of blocks that were asked for, and whole.
        lost: digests of blocks of which something was damaged.
        replaced: path of each file that was damaged, and has gone -> what was wrong.
    """

    known: set[tuple[Kind, bytes]]
    lost: set[bytes]
    replaced: dict[str, str]


def _mend(folder: SharedFolder, facts: Mapping[str, str], wanted: Collection[bytes]) -> _Mended:
    """Have each file of a folder readable that is of this model and has one of these blocks. The folder is locked.

    Who reads a damaged file keeps it open. Files of other models are looked at no further than what they say of
    themselves; what cannot even say that, under a name of ours, goes.  Cost: reads those files to their end.

    Args:
        facts: of the model, see `ModelIdentity`.
        wanted: digests of blocks; without any nothing is done.

    Raises:
        OSError: the folder cannot be written. Nothing is lost that could be read.
    """
    found = _Mended(set(), set(), {})
    for path in saved_paths(folder.path) if wanted else ():
        try:
            file = read_saved_file(path)
            if file.facts != facts or not any(block.digest in wanted for block in file.blocks):
                continue
            whole = {content.kind: read_whole_rows(file, content.kind) for content in file.contents}
        except DamagedFileError as error:
            _take_out(path, str(error), found)
            continue
        except (SavedBlocksError, OSError):
            continue
        rest, lost = Run(folder, file), set[bytes]()
        for content in file.contents:
            rows, held = whole[content.kind]
            blocks = [file.blocks[content.blocks[row]] for row in rows]
            found.known.update((content.kind, block.digest) for block in blocks)
            lost.update(file.blocks[number].digest for row, number in enumerate(content.blocks) if row not in rows)
            if blocks:
                rest.add(content.kind, content.parts, [Name(block, b"") for block in blocks], held, file.roots)
        if lost:
            found.lost.update(lost)
            if rest.has_rows:
                rest.save()
            _take_out(path, f"{path} is damaged: {ROWS_DAMAGED}", found)
    return found


def _take_out(path: Path, why: str, found: _Mended) -> None:
    remove(path)
    if not path.exists():
        found.replaced[str(path)] = why


def _choose(
    blocks: BlockStore, model: Model, prefixes: Sequence[TokenIds] | None, *, pinned: bool
) -> tuple[list[_Chosen], Collection[RootFacts], dict[str, int]]:
    """Blocks that can be named in files, parents first, one sequence after the other; their roots; and why others cannot."""
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
    chosen = [_Chosen(by_digest[digest], saved) for digest, saved in names.items() if digest in wanted]
    for digest in wanted:
        if digest not in names:
            why = _why_unnamed(model, by_digest, digest)
            not_saved[why] = not_saved.get(why, 0) + 1
    return chosen, roots.values(), not_saved


def _why_unnamed(model: Model, by_digest: Mapping[bytes, BlockHash], digest: bytes) -> str:
    """Why a block cannot be found from files."""
    while (block_hash := by_digest.get(digest)) is not None:
        if digest_behind(block_hash.parent, block_hash.token_bytes) != digest:
            return "what they depend on is more than tokens, such as an image"
        digest = block_hash.parent
    if model.roots.facts_of(digest) is None:
        return "the blocks before them were evicted"
    return "the model has changed since they were computed"


def _digests_of(blocks: BlockStore, model: Model, token_ids: TokenIds) -> Iterable[bytes]:
    """Of all blocks of a prefix, under whatever conditions of the row."""
    for facts in model.roots.all_of(model.digest, b""):
        hashes = HashChain(model.roots.of(facts), blocks.block_size)
        hashes.extend(token_ids)
        yield from (block_hash.digest for block_hash in hashes.hashes())


def _blocks_of_a_file(blocks: BlockStore) -> int:
    """How many blocks make a file of about `_FILE_BYTES`. The store's lock is held."""
    parts = blocks.tiers.layout.parts()
    row_bytes = sum(part.num_bytes for of_kind in parts.values() for part in of_kind)
    return max(1, _FILE_BYTES // max(1, row_bytes))


def _copy_out(
    blocks: BlockStore,
    some: Sequence[_Chosen],
    run: Run,
    roots: Collection[RootFacts],
    known: Collection[tuple[Kind, bytes]],
) -> tuple[Run, int]:
    """What is there of these blocks and not known, on its device; and how many of the blocks are there. The store's lock is held."""
    layout, num_here = blocks.tiers.layout, 0
    blocks.pool.join_streams()
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
    return run, num_here


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
