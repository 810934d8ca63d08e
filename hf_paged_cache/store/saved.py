"""Writes cached blocks into files that other processes can read, and reads them into the pool.

It decides which blocks are written, by which names, and which files are of this model. A folder is read as a tier is,
and blocks are loaded from it as from any other; whatever holds for cached blocks holds for them.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks import BlockHash, HashChain, RootFacts, Roots, TokenIds, digest_behind
from ..errors import SavedBlocksError
from ..kv.contents import STATES, Kind, Part
from ..tiers.folder import Folder, remove, saved_paths
from ..tiers.saved_file import DamagedFileError, ModelIdentity, SavedFile, encoded, read_saved_file, read_to_the_end
from ..tiers.tiers import Tiers
from .block_store import BlockStore
from .tier_load import Wanted, load_row, new_files

logger = logging.getLogger("hf_paged_cache")

_FILE_BYTES = 2**26  # bytes of rows in a file, about
_NO_ROOM = "there is no room for them in the pool"
_NO_STATE = "no state was saved after which they could be resumed"
_NO_PARENT = "the blocks before them are in no file"


class Model(NamedTuple):
    """`Model` identifies the model that computed the blocks."""

    digest: bytes  # digest of the model in this process's roots
    identity: ModelIdentity  # the model as other processes know it
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


class Loaded(NamedTuple):
    """`Loaded` says what `load` has read.

    Attributes:
        num_blocks: number of blocks that are cached now and were not before.
        num_known: number of blocks that were cached already.
        num_bytes: bytes of the rows that were read.
        not_loaded: reason why blocks were not loaded -> number of blocks. The reason names the file if it is about one
            file. The number is 0 for a file that could not be read at all.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> _ = cache.store.save(folder)
        >>> cache.reset_prefix_cache()
        >>> loaded = cache.store.load(folder)
        >>> loaded.num_blocks, loaded.not_loaded
        (5, {})
    """

    num_blocks: int
    num_known: int
    num_bytes: int
    not_loaded: dict[str, int]


def save_blocks(
    blocks: BlockStore,
    model: Model,
    folder: Path,
    prefixes: Sequence[TokenIds] | None,
    *,
    pinned: bool,
    mode: int,
) -> Saved:
    """Write blocks without a salt into a folder: those of prefixes, or all, or those that pins hold.

    A block that is evicted before its turn is left out.
    """
    home = Folder(folder, mode=mode)
    home.make()
    with blocks.lock:
        blocks.settle()
        chosen, roots, not_saved = _choose(blocks, model, prefixes, pinned=pinned)
        row_bytes = sum(part.num_bytes for parts in blocks.contents.parts().values() for part in parts)
    step = max(1, _FILE_BYTES // max(1, row_bytes))
    known = _known_in(folder, model.identity, {saved.digest for _, saved in chosen})
    num_here = num_written = num_bytes = 0
    for start in range(0, len(chosen), step):
        some = chosen[start : start + step]
        with blocks.lock:
            blocks.settle()
            num_cached, rows_of = _copy_out(blocks, some, known)
        num_here += num_cached
        if rows_of:
            file, data = encoded(home.new_path(), model.identity, roots, rows_of)
            home.write(file.path, data)
            num_written, num_bytes = num_written + len(file.blocks), num_bytes + len(data)
    if num_here < len(chosen):
        not_saved["evicted meanwhile"] = len(chosen) - num_here
    return Saved(num_written, num_here - num_written, num_bytes, not_saved)


def _known_in(folder: Path, model: ModelIdentity, wanted: Collection[bytes]) -> set[tuple[Kind, bytes]]:
    """Return kind and digest of all that is in a folder's files of a model, as far as they have wanted blocks.

    These files are read to their end, and damaged ones are removed.
    """
    known: set[tuple[Kind, bytes]] = set()
    for path in saved_paths(folder) if wanted else ():
        try:
            file = read_saved_file(path)
            if file.model.facts == model.facts and any(block.digest in wanted for block in file.blocks):
                read_to_the_end(file)
                known.update(file.content_keys())
        except DamagedFileError as error:
            logger.warning("PagedPrefixCache: a file is removed, and what is cached of it is saved again: %s", error)
            remove(path)
        except (SavedBlocksError, OSError):
            continue
    return known


def _choose(
    blocks: BlockStore, model: Model, prefixes: Sequence[TokenIds] | None, *, pinned: bool
) -> tuple[list[tuple[BlockHash, BlockHash]], Collection[RootFacts], dict[str, int]]:
    """Return the blocks to write, as this process names them and as files do, parents first; their roots; and reason
    -> number of blocks that cannot be named in files.
    """
    by_id = blocks.allocator.hashes()
    by_digest = {block_hash.digest: block_hash for block_hash in by_id.values()}
    roots = {
        here: facts._replace(digest=model.identity.digest)
        for here in {block_hash.parent for block_hash in by_digest.values()}
        if (facts := model.roots.facts_of(here)) is not None and facts.digest == model.digest
    }
    wanted: Collection[bytes] = by_digest
    if pinned:
        wanted = {by_id[block_id].digest for block_id in blocks.leases.pinned_blocks(b"") if block_id in by_id}
    elif prefixes is not None:
        chains = [HashChain(root, blocks.block_size, tokens) for root in roots for tokens in prefixes]
        wanted = {block_hash.digest for chain in chains for block_hash in chain.hashes_of()} & by_digest.keys()
    not_saved = {}
    if not wanted:
        none_cached = (
            "no such block is cached: compute it first, with cache.prefill; "
            f"blocks have {blocks.block_size} tokens, and what is shorter has none"
        )
        not_saved["nothing is pinned" if pinned else none_cached] = 0
    names = renamed(by_digest.values(), {here: root.root() for here, root in roots.items()})
    chosen = [(by_digest[digest], saved) for digest, saved in names.items() if digest in wanted]
    if num_unnamed := len(wanted) - len(chosen):
        not_saved["the model has changed since they were computed, or blocks before them were evicted"] = num_unnamed
    return chosen, roots.values(), not_saved


def _copy_out(
    blocks: BlockStore, some: Sequence[tuple[BlockHash, BlockHash]], known: Collection[tuple[Kind, bytes]]
) -> tuple[int, dict[Kind, tuple[list[Part], list[BlockHash], list[Tensor]]]]:
    """Copy what is cached of these blocks and not known, for `encoded`; return also how many of them are cached.

    The caller holds the store's lock.
    """
    num_here = 0
    new: dict[Kind, list[tuple[BlockHash, Any]]] = {}
    for block_hash, saved in some:
        at = blocks.allocator.match_prefix((block_hash,), b"")
        num_here += len(at)
        for kind, content in blocks.contents.contents_of(at[0], block_hash.digest) if at else ():
            if (kind, saved.digest) not in known:
                new.setdefault(kind, []).append((saved, content))
    rows_of = {}
    for kind, contents in new.items():
        if rows := blocks.contents.rows_of(kind, [content for _, content in contents]):
            rows_of[kind] = blocks.contents.parts()[kind], [saved for saved, _ in contents], rows
    return num_here, rows_of


def load_blocks(blocks: BlockStore, model: Model, folder: Path) -> Loaded:
    """Load the blocks of a folder's files, as far as they are of this model and there is room."""
    tiers = Tiers(model.roots, lambda: [model.identity], 0, Folder(folder, 0))
    with blocks.lock:
        blocks.settle()
        blocks.forget_other_weights(model.digest)
        fitting = [run for run in new_files(blocks, tiers) if run.why_not is None]
        files = [run.file for run in fitting if run.file is not None]
        found = _named_here(model, files)
        for run in fitting:
            tiers.adopt(run, found)
    if blocks.contents.has_all_layers:
        blocks.budget.settle()
    with blocks.lock:
        known, num_left = _cached(blocks, found), blocks.budget.num_obtainable_blocks()
    for path in _sequences(files, found):
        with blocks.lock:
            num_new = len(path) - len(_cached(blocks, path))
        here = [*path.values()][: len(path) - int(max(0, num_new - num_left))]
        if here:
            tokens = array("q", b"".join(block_hash.token_bytes for block_hash in here))
            num_left -= len(load_row(blocks, tiers, Wanted(here[0].parent, b"", tokens, len(tokens))))
    with blocks.lock:
        missing = found.keys() - _cached(blocks, found)
    num_new = len(found) - len(known) - len(missing)
    not_loaded = {} if tiers.runs else {f"{folder} holds no saved blocks": 0}
    left_out = Counter({_NO_PARENT: len({block.digest for file in files for block in file.blocks}) - len(found)})
    for run in tiers.runs:
        in_file = set() if run.file is None else {block.digest for block in run.file.blocks}
        if run.problem is not None:
            not_loaded[run.problem] = len(missing & in_file)
            missing -= in_file
        elif run.why_not is not None:
            left_out[run.why_not] += len(in_file)
    left_out[_NO_STATE if blocks.has_states and num_left >= len(missing) else _NO_ROOM] = len(missing)
    return Loaded(num_new, len(known), tiers.num_read_bytes, not_loaded | +left_out)


def _named_here(model: Model, files: Iterable[SavedFile]) -> dict[bytes, BlockHash]:
    """Return digest of a block in the files -> its hash here. Blocks that begin from no root are left out."""
    roots = {root.root(): model.roots.of(root._replace(digest=model.digest)) for file in files for root in file.roots}
    return renamed((block for file in files for block in file.blocks), roots)


def _cached(blocks: BlockStore, found: Mapping[bytes, BlockHash]) -> set[bytes]:
    match = blocks.allocator.match_prefix
    return {digest for digest, block_hash in found.items() if match((block_hash,), b"")}


def _sequences(files: Sequence[SavedFile], found: Mapping[bytes, BlockHash]) -> Iterator[dict[bytes, BlockHash]]:
    """Yield digest -> hash of the blocks before each place after which calls may resume.

    Such places are the ends of sequences, where sequences part, and snapshots.
    """
    here = {block_hash.digest: block_hash for block_hash in found.values()}
    num_children = Counter(block_hash.parent for block_hash in found.values())
    with_states = {digest for file in files for kind, digest in file.content_keys() if kind == STATES}
    for saved, end in found.items():
        if num_children[end.digest] != 1 or saved in with_states:
            path = [end]
            while (before := here.get(path[-1].parent)) is not None:
                path.append(before)
            yield {block_hash.digest: block_hash for block_hash in reversed(path)}


def renamed(blocks: Iterable[BlockHash], roots: Mapping[bytes, bytes]) -> dict[bytes, BlockHash]:
    """Rename blocks for other names of roots: return digest -> renamed block, parents before their children.

    Blocks are left out that do not descend from one of the roots, or that depend on more than tokens.
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
