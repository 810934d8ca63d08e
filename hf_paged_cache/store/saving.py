"""Writes cached blocks into files that other processes can read, some MB at a time.

It decides which blocks are written, and by which names. It holds no blocks meanwhile: a block that is evicted before
its turn is left out. A damaged file is removed, and what is cached of it is written anew.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..blocks import BlockHash, HashChain
from ..blocks.hashing import digest_behind
from ..blocks.roots import RootFacts, Roots
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, SavedBlocksError
from ..kv.contents import Kind
from ..tiers.folders import Folder, remove
from ..tiers.run_files import Run
from ..tiers.saved_file import DamagedFileError, Identity, new_path, read_saved_file, read_to_the_end, saved_paths
from .block_store import BlockStore

logger = logging.getLogger("hf_paged_cache")

_FILE_BYTES = 2**26  # bytes of rows in a file, about


class Model(NamedTuple):
    """`Model` identifies the model that computed the blocks."""

    digest: bytes  # digest of the model in this process's roots
    identity: Identity  # the model as other processes know it
    roots: Roots  # roots of the model's rows


class Saved(NamedTuple):
    """`Saved` says what `save` has written.

    Attributes:
        num_blocks: number of blocks written now.
        num_known: number of blocks that the folder had, whole.
        num_bytes: bytes of the files written.
        not_saved: reason why blocks were not saved -> number of blocks. The number is 0 if there are no such blocks.

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
    """Write blocks without a salt into a folder; see `PrefixStore.save`.

    Args:
        prefixes: prefixes whose blocks are written; None: all blocks, or those that pins hold.
        progress: called with the number of blocks that are done, and with the number of all blocks.
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
            num_gone += len(some) - _copy_out(blocks, some, run, known)
        run.note(roots)
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
    """Return kind and digest of all that is in a folder's files of a model, as far as they have wanted blocks.

    These files are read to their end, and damaged ones are removed.
    """
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
    """Choose the blocks to write.

    Returns:
        The blocks, as this process names them and as files do, parents first; the blocks' roots; and reason -> number
        of blocks that cannot be named in files.
    """
    by_id = blocks.allocator.hashes()
    by_digest = {block_hash.digest: block_hash for block_hash in by_id.values()}
    wanted: Collection[bytes] = by_digest
    if pinned:
        wanted = {by_id[block_id].digest for block_id in blocks.pins.block_ids(b"") if block_id in by_id}
    elif prefixes is not None:
        wanted = {digest for tokens in prefixes for digest in _digests_of(blocks, model, tokens)} & by_digest.keys()
    not_saved = {}
    if not wanted:
        none_cached = (
            "no such block is cached: compute it first, with cache.prefill; "
            f"blocks have {blocks.block_size} tokens, and what is shorter has none"
        )
        not_saved["nothing is pinned" if pinned else none_cached] = 0
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
    """Yield the digests of all blocks of a prefix, under each root that rows of the model have had."""
    for facts in model.roots.all_of(model.digest, b""):
        hashes = HashChain(model.roots.of(facts), blocks.block_size)
        hashes.extend(token_ids)
        yield from (block_hash.digest for block_hash in hashes.hashes())


def _copy_out(
    blocks: BlockStore, some: Sequence[tuple[BlockHash, BlockHash]], run: Run, known: Collection[tuple[Kind, bytes]]
) -> int:
    """Add to a run what is cached of these blocks and not known; return how many of the blocks are cached.

    The caller holds the store's lock.
    """
    layout, num_here = blocks.tiers.layout, 0
    new: dict[Kind, list[tuple[BlockHash, object]]] = {}
    for block_hash, saved in some:
        at = blocks.allocator.match_prefix((block_hash,), b"")
        num_here += len(at)
        for kind, content in layout.contents_of(at[0], block_hash.digest) if at else ():
            if (kind, saved.digest) not in known:
                new.setdefault(kind, []).append((saved, content))
    for kind, contents in new.items():
        if parts := layout.parts().get(kind):
            rows = layout.rows_of(kind, [content for _, content in contents])
            for number, (saved, _) in enumerate(contents):
                run.add(kind, parts, saved, [of_part[number : number + 1] for of_part in rows])
    return num_here


def renamed(blocks: Iterable[BlockHash], roots: Mapping[bytes, bytes]) -> dict[bytes, BlockHash]:
    """Rename blocks whose roots have other names: return digest -> renamed block, parents before their children.

    Blocks are left out that do not descend from one of the roots, or that depend on more than tokens.

    Args:
        roots: name of a root here -> its name there.
    """
    children: dict[bytes, list[BlockHash]] = {}
    for block in dict.fromkeys(blocks):
        if digest_behind(block.parent, block.token_bytes) == block.digest:
            children.setdefault(block.parent, []).append(block)
    found: dict[bytes, BlockHash] = {}
    waiting = [(block, there) for here, there in roots.items() for block in children.get(here, ())]
    while waiting:
        block, parent = waiting.pop()
        there = digest_behind(parent, block.token_bytes)
        found[block.digest] = BlockHash(there, block.token_bytes, parent)
        waiting += [(child, there) for child in children.get(block.digest, ())]
    return found


def folder_of(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a user names.

    Raises:
        CacheArgumentError: `folder` is no path, or is a file, or lies in one.
    """
    if not isinstance(folder, str | os.PathLike):
        raise CacheArgumentError(f"folder is {folder!r}; give a folder's path")
    path = Path(folder).expanduser().absolute()
    if file := next((each for each in (path, *path.parents) if each.is_file()), None):
        raise CacheArgumentError(f"{file} is a file; give a folder")
    return path
