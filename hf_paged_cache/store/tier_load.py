"""Loads blocks from lower tiers before a prompt looks for them.

A block that is loaded is committed under its hash like any other; whatever holds for cached blocks holds for it from
then on.
"""

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from ..blocks import Allocation, Changing, Group, HashChain, TokenIds, resumable_where
from ..errors import OutOfBlocksError
from ..kv.block_pool import BLOCKS
from ..kv.contents import STATES, Kind, states_of_row, to_device, write_blocks
from ..tiers.tiers import Name, Place, Run, Tiers, say_once
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
    tier: str  # furthest tier that has something of it; "": all is in the pool


def load(store: BlockStore, tiers: Tiers, rows: Sequence[Wanted]) -> dict[int, str]:
    """Load the blocks that these rows begin with, as far as a tier has them and there is room.

    Return block id -> name of the tier from which the block came.
    """
    with store.lock:
        _find_files(store, tiers)
    if store.contents.has_all_layers:
        store.budget.settle()
    loaded: dict[int, str] = {}
    for row in rows:
        loaded |= load_row(store, tiers, row)
    return loaded


def look_up(store: BlockStore, row: Wanted) -> tuple[int, str] | None:
    """Return how many leading tokens of a row would be known if all were loaded, and the furthest tier needed.

    Return None if tiers have no more than is cached.
    """
    if store.tiers is None:
        return None
    _find_files(store, store.tiers)
    prefix = _missing(store, store.tiers, row)
    return None if prefix is None else (len(prefix.names) * store.block_size, prefix.tier)


def _find_files(store: BlockStore, tiers: Tiers) -> None:
    """Find what other processes have written. The caller holds the store's lock."""
    for run in new_files(store, tiers):
        if run.why_not is None:
            tiers.adopt(run)
        else:
            say_once(run.path.parent, f"has files that are not used: {run.why_not}", logging.INFO)


def new_files(store: BlockStore, tiers: Tiers) -> list[Run]:
    """Return the runs of files that are new; each says why it is of no use here. The caller holds the store's lock."""
    found = tiers.look()
    for run in found:
        assert run.file is not None  # `look` has read it
        run.why_not = run.file.why_not(store.block_size, tiers.identities())
        if run.why_not is None and not store.contents.fits(run.file):
            run.why_not = "layers lie on other devices, or have other tensors, than where they were computed"
    return found


def load_row(store: BlockStore, tiers: Tiers, row: Wanted) -> dict[int, str]:
    """Load the blocks that a row begins with; return block id -> name of the tier from which the block came.

    Where there is no memory or no room, the prompt is computed.
    """
    with store.lock:
        while (prefix := _missing(store, tiers, row)) is not None:
            lease = store.leases.take((), row.namespace)
            try:
                return _bring_up(store, tiers, lease, prefix)
            except OSError as error:  # nothing of the file is found from here on: look what is left
                logger.warning("PagedPrefixCache: blocks could not be read back, and are computed: %s", error)
            except (torch.OutOfMemoryError, OutOfBlocksError):
                break
            finally:
                store.leases.give_back(lease)
    return {}


def _missing(store: BlockStore, tiers: Tiers, row: Wanted) -> _Prefix | None:
    """Return the longest prefix of a row after which all layers can resume with what tiers have, as far as there is
    room; None if they have no more than is cached.
    """
    if not tiers.entries or (store.layers and not store.pool.named()):
        return None
    size, groups, parts = store.block_size, store.groups, store.contents.parts()
    tiers.lay_out(parts)
    match, hashes = store.allocator.match_prefix, HashChain(row.root, size, row.token_ids).hashes_of()
    ids: list[int | None] = [*match(hashes, row.namespace)]
    for block_hash in hashes[len(ids) :]:
        at = match((block_hash,), row.namespace)
        if not at and BLOCKS in parts and tiers.place_of(BLOCKS, (block_hash, row.namespace)) is None:
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

    end = min(len(ids), row.most_tokens // size) if store.has_states else len(ids)
    end = resumable_where(groups, end * size, is_anywhere) // size
    lacking = {group.name: [at for at in group.seen(end * size) if not is_held(group, at)] for group in groups}
    lacking[BLOCKS] = [index for index, at in enumerate(ids[:end]) if at is None] if BLOCKS in parts else []
    missing = {}
    for kind, indices in lacking.items():
        missing[kind] = {at: place for at in indices if (place := tiers.place_of(kind, names[at])) is not None}
    needed = {place.run.tier for places in missing.values() for place in places.values()}
    tier = next((tier.name for tier in reversed(tiers.tiers) if tier in needed), "")
    return _Prefix(names[:end], ids[:end], missing, tier) if needed or None in ids[:end] else None


def _bring_up(store: BlockStore, tiers: Tiers, lease: Allocation, prefix: _Prefix) -> dict[int, str]:
    """Let `lease`, which is empty, hold a prefix, and fill what is missing of it with its contents.

    Return block id -> name of the tier from which the block came. If interrupted anywhere, new blocks are free again
    once the lease is, and no block has a window block that was not written.
    """
    groups, (names, ids, missing, tier) = store.windows, prefix
    store.pool.join_streams()
    for kind, places in missing.items():
        tiers.touch(kind, [names[index] for index in places])
    store.budget.make_room(max([ids.count(None), *(len(missing[group.name]) for group in groups)]))
    for group in groups:
        seen = [ids[index] for index in group.seen(len(ids) * store.block_size)]
        held = [at for at in seen if at is not None and group.has(at)]
        group.require(group.num_to_take(held) + len(missing[group.name]))
    with Changing(groups):
        # holds cached blocks before it takes others
        store.allocator.allocate_immutable(lease, [block_hash for block_hash, _ in names])
        block_ids = lease.block_ids
        fresh = [block_id for block_id, at in zip(block_ids, ids, strict=True) if at is None]
        store.leases.resume(lease, len(block_ids) * store.block_size)
        targets: dict[Kind, list[int]] = {BLOCKS: [block_ids[index] for index in missing[BLOCKS]]}
        for group in groups:
            group.drop(fresh)  # what these blocks held before
            targets[group.name] = group.take_places(len(missing[group.name]))
        store.contents.offload()
        for kind, at in targets.items():
            _fill(store, tiers, kind, [*missing[kind].values()], at)
        store.allocator.mark_computed(fresh)
        for group in groups:
            of_group = (block_ids[index] for index in missing[group.name])
            group.places.update(zip(of_group, targets[group.name], strict=True))
    for run, row in missing.get(STATES, {}).values():  # one snapshot, at the end
        read = zip(store.contents.parts()[STATES], tiers.read(STATES, run, [row]), strict=True)
        store.snapshots.keep(block_ids[-1], states_of_row((part, fragments[0][0]) for part, fragments in read))
    if missing[BLOCKS]:
        return {block_ids[index]: place.run.tier.name for index, place in missing[BLOCKS].items()}
    return dict.fromkeys(fresh, tier)


def _fill(store: BlockStore, tiers: Tiers, kind: Kind, places: Sequence[Place], ids: Sequence[int]) -> None:
    """Copy contents of a kind into blocks or window blocks, those of one run at a time."""
    pairs = zip(places, ids, strict=True)
    for run, of_run in groupby(pairs, key=lambda pair: pair[0].run):
        some = [*of_run]
        read = tiers.read(kind, run, [place.row for place, _ in some])
        for part, fragments in zip(store.contents.parts()[kind], read, strict=True):
            write_blocks(store.pool, part, [to for _, to in some], to_device(part, fragments))
