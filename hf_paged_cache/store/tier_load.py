"""Loads blocks from lower tiers before a prompt looks for them.

It decides which contents are loaded, into which blocks, and how these become cached blocks. A block that is loaded is
committed under its hash like any other; whatever holds for cached blocks holds for it from then on.
"""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import Allocation, BlockHash, Group, HashChain, resumable_where
from ..blocks.tokens import TokenIds
from ..blocks.window_blocks import Changing
from ..errors import OutOfBlocksError
from ..kv.contents import BLOCKS, STATES, Kind, Part, states_of_row, to_device, write_blocks
from ..tiers.base import Name, Tier
from ..tiers.disk import DiskTier
from .block_store import BlockStore
from .lower_tiers import MOST_STAGED_BYTES

logger = logging.getLogger("hf_paged_cache")

Content = tuple[Kind, Name]
_Rows = list[list[Tensor]]  # for each part some tensors, [N, bytes]


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
    missing: list[tuple[Kind, int]]  # contents that are not in the pool: kind, and logical index of the block

    @property
    def contents(self) -> list[Content]:
        """Contents that are not in the pool."""
        return [(kind, self.names[index]) for kind, index in self.missing]


class _Found(NamedTuple):
    """`_Found` says where a tier has contents of one kind, as many as are copied at once."""

    tier: Tier
    kind: Kind
    parts: tuple[Part, ...]
    places: dict[Name, Any]


_Read = Sequence[tuple[_Found, _Rows]]


def load(store: BlockStore, rows: Sequence[Wanted]) -> dict[int, str]:
    """Load the blocks that these rows begin with, as far as a tier has them and there is room.

    If several rows have one prefix, it is loaded for the first row, and the others find it in the cache.

    Returns:
        block id -> name of the tier from which the block came.
    """
    if store.tiers.disk is not None:
        with store.lock:
            _find_files(store, store.tiers.disk)
        if store.tiers.layout.has_all_layers:
            store.settle_budget()
    loader = TierLoad(store, store.tiers.tiers)
    loaded: dict[int, str] = {}
    for row in rows:
        loaded |= loader.load(row)
    return loaded


def look_up(store: BlockStore, row: Wanted) -> tuple[int, str | None] | None:
    """Return how many leading tokens of a row would be known if all were loaded, and the furthest tier needed.

    Returns None if tiers have no more than is cached.  Effects: none.
    """
    if store.tiers.disk is not None:
        _find_files(store, store.tiers.disk)
    tiers = store.tiers.tiers
    prefix = TierLoad(store, tiers).missing(row)
    if prefix is None:
        return None
    at = [next(number for number, tier in enumerate(tiers) if tier.has(*content)) for content in prefix.contents]
    return len(prefix.names) * store.block_size, tiers[max(at)].name if at else None


def _find_files(store: BlockStore, disk: DiskTier) -> None:
    """Find what other processes have written. The caller holds the store's lock."""
    layout = store.tiers.layout
    for run in disk.look():
        assert run.file is not None  # `look` has read it
        why = run.file.why_not(store.block_size, disk.identities())
        if why is None:
            layout.learn(run.file, store.make_room)
            parts = layout.parts_here(run.file, store.first_device())
            disk.adopt(run, parts, lambda block: Name(block, b""))
            if None in parts.values():
                why = "layers lie on other devices, or have other tensors, than where it was computed"
        if why is not None:
            _say_once(run.path.parent, why)


@lru_cache
def _say_once(folder: Path, why: str) -> None:
    logger.info("files in disk_folder %s are not used: %s", folder, why)


class TierLoad:
    """`TierLoad` loads contents of some tiers, the nearest first, into a store."""

    def __init__(self, store: BlockStore, tiers: Sequence[Tier]) -> None:
        self._store, self._tiers = store, tiers
        self._allocator, self._layout = store.allocator, store.tiers.layout

    def load(self, row: Wanted) -> dict[int, str]:
        """Load the blocks that a row begins with; return block id -> name of the tier from which the block came.

        No lock is held while files are read.
        """
        while True:
            with self._store.lock:
                prefix = self.missing(row)
                found = [] if prefix is None else self._where(prefix)
            if prefix is None:
                return {}
            try:
                rows = [each.tier.load(each.kind, [*each.places.values()]) for each in found]
            except OSError as error:  # nothing of the file is found from here on: look what is left
                logger.warning("PagedPrefixCache: blocks could not be read back, and are computed: %s", error)
                continue
            # where there is no memory, not even for what is copied at once, the prompt is computed
            with suppress(torch.OutOfMemoryError, OutOfBlocksError), self._store.lock:
                return self._take_in(prefix, [*zip(found, rows, strict=True)])
            return {}

    def missing(self, row: Wanted) -> _Prefix | None:
        """Return a row's prefix as the pool and the tiers have it; None if tiers have no more than is cached."""
        tiers = [tier for tier in self._tiers if tier.entries]
        if not tiers or (self._store.windows.layers and not self._store.pool.layer_indices):
            return None
        size = self._allocator.block_size
        chain = HashChain(row.root, size)
        chain.extend(row.token_ids)

        def is_below(kind: Kind, name: Name) -> bool:
            return any(tier.has(kind, name) for tier in tiers)

        prefix = self._reach(chain.hashes, row.namespace, row.most_tokens // size, is_below)
        return prefix if prefix.missing or None in prefix.ids else None

    def _reach(
        self,
        hashes: Callable[[int], Iterable[BlockHash]],
        namespace: bytes,
        most: int,
        is_below: Callable[[Kind, Name], bool],
    ) -> _Prefix:
        """Return the longest prefix after which all layers can resume with what can be loaded, as far as there is room.

        Args:
            hashes: returns the hashes of the row's blocks, from a logical index on.
            most: most blocks after which layers with a state may resume.
            is_below: returns whether a content can be loaded.
        """
        match, has_tensors, size = self._allocator.match_prefix, self._layout.has_tensors, self._allocator.block_size
        ids: list[int | None] = [*match(hashes(0), namespace)]
        for block_hash in hashes(len(ids)):
            at = match((block_hash,), namespace)
            if not at and has_tensors and not is_below(BLOCKS, Name(block_hash, namespace)):
                break
            ids.append(at[0] if at else None)
        # cached blocks that nobody holds take room, too: they could be evicted for the others
        num_taken = accumulate(at is None or not self._allocator.ref_count(at) for at in ids)
        ids = ids[: bisect_right([*num_taken], self._store.num_obtainable_blocks())]
        names = [Name(block_hash, namespace) for block_hash in islice(hashes(0), len(ids))]

        def is_held(group: Group, index: int) -> bool:
            return (at := ids[index]) is not None and group.has(at)

        def is_anywhere(group: Group, index: int) -> bool:
            return is_held(group, index) or is_below(group.name, names[index])

        groups = self._store.groups
        end = min(len(ids), most) if self._store.states else len(ids)
        end = resumable_where(groups, end * size, is_anywhere) // size
        needed = [(group, index) for group in groups for index in group.seen(end * size)]
        missing: list[tuple[Kind, int]] = [(group.name, at) for group, at in needed if not is_held(group, at)]
        if has_tensors:
            missing += [(BLOCKS, index) for index, at in enumerate(ids[:end]) if at is None]
        return _Prefix(names[:end], ids[:end], missing)

    def _where(self, prefix: _Prefix) -> list[_Found]:
        """Find each missing content in the nearest tier that has it."""
        found: list[_Found] = []
        for kind in dict.fromkeys(kind for kind, _ in prefix.missing):
            names = [name for of_kind, name in prefix.contents if of_kind == kind]
            for tier in self._tiers:
                places = {name: place for name in names if (place := tier.place_of(kind, name)) is not None}
                parts = tier.parts.get(kind, ())
                if places and self._layout.is_now(kind, parts):
                    tier.touch(kind, places)
                    step = max(1, MOST_STAGED_BYTES // sum(part.num_bytes for part in parts))
                    at = [*places.items()]
                    found += [_Found(tier, kind, parts, dict(at[n : n + step])) for n in range(0, len(at), step)]
                    names = [name for name in names if name not in places]
        return found

    def _take_in(self, prefix: _Prefix, read: _Read) -> dict[int, str]:
        """Take blocks for what was read, fill them, and commit them, unless others have changed what is cached.

        Returns block id -> name of the tier from which the block came.
        """
        self._store.pool.join_streams()
        has = {(found.kind, name) for found, _ in read for name in found.places}
        hashes, namespace = [name.block_hash for name in prefix.names], prefix.names[0].namespace
        now = self._reach(lambda start: hashes[start:], namespace, len(hashes), lambda *content: content in has)
        if now != prefix:
            return {}
        self._make_room(prefix)
        lease = self._store.leases.take((), namespace)
        try:
            return self._load_into(lease, prefix, read)
        finally:
            self._store.leases.give_back(lease)

    def _make_room(self, prefix: _Prefix) -> None:
        """Make room for what a prefix needs beside what is cached, or raise OutOfBlocksError."""
        num_lacking = Counter(kind for kind, _ in prefix.missing)
        groups = self._store.windows.groups
        self._store.make_room(max([prefix.ids.count(None), *(num_lacking[group.name] for group in groups)]))
        for group in groups:
            ids = [prefix.ids[index] for index in group.seen(len(prefix.ids) * self._allocator.block_size)]
            held = [at for at in ids if at is not None and at in group.places]
            group.require(group.num_to_take(held) + num_lacking[group.name])

    def _load_into(self, lease: Allocation, prefix: _Prefix, read: _Read) -> dict[int, str]:
        """Let `lease`, which is empty, hold a prefix, and fill its new blocks with their contents.

        If interrupted anywhere, new blocks are free again, and no block has a window block that was not written.
        """
        allocator, groups = self._allocator, self._store.windows.groups
        with Changing(groups):
            # holds cached blocks before it takes others
            allocator.allocate_immutable(lease, [name.block_hash for name in prefix.names])
            block_ids = lease.block_ids
            fresh = [block_id for block_id, at in zip(block_ids, prefix.ids, strict=True) if at is None]
            self._store.leases.resume(lease, len(block_ids) * allocator.block_size)
            # content to load -> block, or window block
            targets: dict[tuple[Kind, int], int] = {
                (kind, index): block_ids[index] for kind, index in prefix.missing if kind == BLOCKS
            }
            for group in groups:
                group.drop(fresh)  # what these blocks held before
                lacking = [content for content in prefix.missing if content[0] == group.name]
                targets |= zip(lacking, group.take_places(len(lacking)), strict=True)
            self._store.offload()
            self._fill(read, {(kind, prefix.names[index]): to for (kind, index), to in targets.items()})
            allocator.mark_computed(fresh)
            for group in groups:
                for (kind, index), place in targets.items():
                    if kind == group.name:
                        group.places[block_ids[index]] = place
        for found, rows in read:
            if found.kind == STATES:  # one snapshot, at the end
                states = states_of_row((part, row[0]) for part, (row,) in zip(found.parts, rows, strict=True))
                self._store.states.kept.keep(block_ids[-1], states)
        tier_of = {(found.kind, name): found.tier.name for found, _ in read for name in found.places}
        if self._layout.has_tensors:
            return {block_ids[at]: tier_of[BLOCKS, prefix.names[at]] for kind, at in prefix.missing if kind == BLOCKS}
        return dict.fromkeys(fresh, [*tier_of.values()][-1])

    def _fill(self, read: _Read, targets: Mapping[Content, int]) -> None:
        """Copy contents into blocks and window blocks."""
        for found, rows in read:
            if found.kind != STATES:
                ids = [targets[found.kind, name] for name in found.places]
                for part, fragments in zip(found.parts, rows, strict=True):
                    write_blocks(self._store.pool, part, ids, to_device(part, fragments))
