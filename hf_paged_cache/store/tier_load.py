"""Loads blocks from lower tiers before a prompt looks for them.

A block that is loaded is committed under its hash like any other; whatever holds for cached blocks holds for it from
then on.
"""

import logging
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import torch

from ..blocks import Allocation, Changing, Group, HashChain, TokenIds, resumable_where
from ..errors import OutOfBlocksError
from ..kv.block_pool import BLOCKS
from ..kv.contents import STATES, Kind, states_of_row, to_device, write_blocks
from ..tiers.run import Run
from ..tiers.saved_file import ModelIdentity
from ..tiers.tiers import Name, Place, Tiers
from .block_store import BlockStore

logger = logging.getLogger("hf_paged_cache")


class Wanted(NamedTuple):
    """`Wanted` is a row whose prefix is looked for."""

    root: bytes
    namespace: bytes
    token_ids: TokenIds
    most_tokens: int  # most tokens after which layers with a state may resume


class _Prefix(NamedTuple):
    """`_Prefix` says how much of a row can be had: its leading blocks, and what of them is not in the pool."""

    names: list[Name]  # logical index -> name of the block
    ids: list[int | None]  # logical index -> cached block; None: not cached
    missing: dict[Kind, dict[int, Place]]  # kind -> logical index -> where the content is
    tier: str | None  # furthest tier that has something of it; None: all is in the pool


def load(store: BlockStore, rows: Sequence[Wanted]) -> dict[int, str]:
    """Load the blocks that these rows begin with, as far as a tier has them and there is room.

    If several rows have one prefix, it is loaded for the first row, and the others find it in the cache.

    Returns:
        block id -> name of the tier from which the block came.
    """
    tiers, loaded = store.tiers, dict[int, str]()
    if tiers is None:
        return loaded
    with store.lock:
        _find_files(store, tiers)
    if store.layout.has_all_layers:
        store.budget.settle()
    for row in rows:
        loaded |= load_row(store, tiers, row)
    return loaded


def look_up(store: BlockStore, row: Wanted) -> tuple[int, str | None] | None:
    """Return how many leading tokens of a row would be known if all were loaded, and the furthest tier needed.

    Returns None if tiers have no more than is cached.  Effects: none.
    """
    if store.tiers is None:
        return None
    _find_files(store, store.tiers)
    prefix = _missing(store, store.tiers, row)
    return None if prefix is None else (len(prefix.names) * store.block_size, prefix.tier)


def _find_files(store: BlockStore, tiers: Tiers) -> None:
    """Find what other processes have written. The caller holds the store's lock."""
    for run, why in found_files(store, tiers, tiers.identities()).items():
        if why is None:
            tiers.adopt(run)
        else:
            _say_once(run.path.parent, why)


def found_files(store: BlockStore, tiers: Tiers, models: Sequence[ModelIdentity]) -> dict[Run, str | None]:
    """Return files that are new -> why nothing of them is for a model that is or was one of these."""
    found = {}
    for run in tiers.look():
        assert run.file is not None  # `look` has read it
        why = run.file.why_not(store.block_size, models)
        if why is None and not store.layout.fits(run.file):
            why = "layers lie on other devices, or have other tensors, than where they were computed"
        found[run] = why
    return found


@lru_cache
def _say_once(folder: Path, why: str) -> None:
    logger.info("files in disk_folder %s are not used: %s", folder, why)


def load_row(store: BlockStore, tiers: Tiers, row: Wanted) -> dict[int, str]:
    """Load the blocks that a row begins with; return block id -> name of the tier from which the block came.

    Where there is no memory or no room, the prompt is computed.
    """
    with store.lock:
        while (prefix := _missing(store, tiers, row)) is not None:
            try:
                return _bring_up(store, tiers, prefix, row.namespace)
            except OSError as error:  # nothing of the file is found from here on: look what is left
                logger.warning("PagedPrefixCache: blocks could not be read back, and are computed: %s", error)
            except (torch.OutOfMemoryError, OutOfBlocksError):
                break
    return {}


def _missing(store: BlockStore, tiers: Tiers, row: Wanted) -> _Prefix | None:
    """Return the longest prefix of a row after which all layers can resume with what tiers have, as far as there is
    room; None if they have no more than is cached.
    """
    if not tiers.entries or (store.windows.layers and not store.pool.named()):
        return None
    tiers.lay_out(store.layout.parts())
    match, size = store.allocator.match_prefix, store.block_size
    hashes = HashChain(row.root, size, row.token_ids).hashes_of()
    has_tensors = BLOCKS in store.layout.parts()
    ids: list[int | None] = [*match(hashes, row.namespace)]
    for block_hash in hashes[len(ids) :]:
        at = match((block_hash,), row.namespace)
        if not at and has_tensors and tiers.place_of(BLOCKS, (block_hash, row.namespace)) is None:
            break
        ids.append(at[0] if at else None)
    # cached blocks that nobody holds take room, too: they could be evicted for the others
    num_taken = accumulate(at is None or not store.allocator.ref_count(at) for at in ids)
    ids = ids[: bisect_right([*num_taken], store.budget.num_obtainable_blocks())]
    names = [(block_hash, row.namespace) for block_hash in hashes[: len(ids)]]

    def is_held(group: Group, index: int) -> bool:
        return (at := ids[index]) is not None and group.has(at)

    def is_anywhere(group: Group, index: int) -> bool:
        return is_held(group, index) or tiers.place_of(group.name, names[index]) is not None

    groups = store.groups
    end = min(len(ids), row.most_tokens // size) if store.states else len(ids)
    end = resumable_where(groups, end * size, is_anywhere) // size
    lacking = {group.name: [at for at in group.seen(end * size) if not is_held(group, at)] for group in groups}
    if has_tensors:
        lacking[BLOCKS] = [index for index, at in enumerate(ids[:end]) if at is None]
    missing = {}
    for kind, indices in lacking.items():
        missing[kind] = {at: place for at in indices if (place := tiers.place_of(kind, names[at])) is not None}
    needed = {place.run.tier for places in missing.values() for place in places.values()}
    tier = next((tier.name for tier in reversed(tiers.tiers) if tier in needed), None)
    return _Prefix(names[:end], ids[:end], missing, tier) if needed or None in ids[:end] else None


def _bring_up(store: BlockStore, tiers: Tiers, prefix: _Prefix, namespace: bytes) -> dict[int, str]:
    """Take blocks for what is missing of a prefix, and load it.

    Returns block id -> name of the tier from which the block came.

    Raises:
        OSError, OutOfBlocksError, torch.OutOfMemoryError: nothing is found that was not before.
    """
    store.pool.join_streams()
    for kind, places in prefix.missing.items():
        tiers.touch(kind, [prefix.names[index] for index in places])
    groups = store.windows.groups
    store.budget.make_room(max([prefix.ids.count(None), *(len(prefix.missing[group.name]) for group in groups)]))
    for group in groups:
        ids = [prefix.ids[index] for index in group.seen(len(prefix.ids) * store.block_size)]
        held = [at for at in ids if at is not None and at in group.places]
        group.require(group.num_to_take(held) + len(prefix.missing[group.name]))
    lease = store.leases.take((), namespace)
    try:
        return _load_into(store, tiers, lease, prefix)
    finally:
        store.leases.give_back(lease)


def _load_into(store: BlockStore, tiers: Tiers, lease: Allocation, prefix: _Prefix) -> dict[int, str]:
    """Let `lease`, which is empty, hold a prefix, and fill its new blocks with their contents.

    If interrupted anywhere, new blocks are free again, and no block has a window block that was not written.
    """
    groups, missing = store.windows.groups, prefix.missing
    with Changing(groups):
        # holds cached blocks before it takes others
        store.allocator.allocate_immutable(lease, [block_hash for block_hash, _ in prefix.names])
        block_ids = lease.block_ids
        fresh = [block_id for block_id, at in zip(block_ids, prefix.ids, strict=True) if at is None]
        store.leases.resume(lease, len(block_ids) * store.block_size)
        targets: dict[Kind, list[int]] = {BLOCKS: [block_ids[index] for index in missing.get(BLOCKS, ())]}
        for group in groups:
            group.drop(fresh)  # what these blocks held before
            targets[group.name] = group.take_places(len(missing[group.name]))
        store.offload()
        for kind, at in targets.items():
            _fill(store, tiers, kind, [*missing.get(kind, {}).values()], at)
        store.allocator.mark_computed(fresh)
        for group in groups:
            of_group = (block_ids[index] for index in missing[group.name])
            group.places.update(zip(of_group, targets[group.name], strict=True))
    for run, row in missing.get(STATES, {}).values():  # one snapshot, at the end
        read = zip(store.layout.parts()[STATES], tiers.read(STATES, run, [row]), strict=True)
        store.states.kept.keep(block_ids[-1], states_of_row((part, fragments[0][0]) for part, fragments in read))
    if BLOCKS in missing:
        return {block_ids[index]: place.run.tier.name for index, place in missing[BLOCKS].items()}
    return dict.fromkeys(fresh, prefix.tier or "")


def _fill(store: BlockStore, tiers: Tiers, kind: Kind, places: Sequence[Place], ids: Sequence[int]) -> None:
    """Copy contents of a kind into blocks or window blocks, those of one run at a time."""
    pairs = zip(places, ids, strict=True)
    for run, of_run in groupby(pairs, key=lambda pair: pair[0].run):
        some = [*of_run]
        read = tiers.read(kind, run, [place.row for place, _ in some])
        for part, fragments in zip(store.layout.parts()[kind], read, strict=True):
            write_blocks(store.pool, part, [to for _, to in some], to_device(part, fragments))
