"""Loads blocks from lower tiers before a prompt looks for them.

It decides which contents are loaded, into which blocks, and how these become cached blocks. A block that is loaded is
committed under its hash like any other; whatever holds for cached blocks holds for it from then on.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from threading import RLock
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..blocks import (
    Allocation,
    BlockHash,
    Group,
    HashChain,
    PrefixCachingBlockAllocator,
    resumable_where,
)
from ..blocks.allocation import Resumption
from ..blocks.tokens import TokenIds
from ..blocks.window_blocks import Changing
from ..errors import OutOfBlocksError
from ..kv.block_pool import BlockPool
from ..kv.contents import states_of_row, to_device, write_blocks
from ..tiers.base import BLOCKS, STATES, Kind, Name, Tier
from ..tiers.host import HostTier
from .content_layout import ContentLayout
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups

logger = logging.getLogger("hf_paged_cache")

_MOST_STAGED_BYTES = 2**26  # bytes of rows that are copied at once, beside the pool


class Room(Protocol):
    """`Room` says what must be known of a store to take blocks of it."""

    lock: RLock
    allocator: PrefixCachingBlockAllocator
    pool: BlockPool
    windows: WindowGroups
    states: StateSnapshots
    first_device: Callable[[], torch.device]

    @property
    def groups(self) -> list[Group]: ...

    def read_budget(self) -> None: ...

    def settle_budget(self) -> None: ...

    def num_obtainable_blocks(self) -> float: ...

    def make_room(self, num_blocks: int) -> None: ...

    def make_copies(self) -> None: ...


class Wanted(NamedTuple):
    """`Wanted` is a row whose prefix is looked for."""

    root: bytes
    namespace: bytes
    token_ids: TokenIds
    most_tokens: int  # most tokens after which layers with a state may resume


class _Prefix(NamedTuple):
    """`_Prefix` says how much of a row can be had: its leading blocks, and what of them is not in the pool."""

    hashes: list[BlockHash]
    namespace: bytes
    ids: list[int | None]  # logical index -> cached block; None: not cached
    missing: list[tuple[Kind, int]]  # contents that are not in the pool: kind, and logical index of the block

    @property
    def is_cached(self) -> bool:
        return not self.missing and None not in self.ids

    def name(self, index: int) -> Name:
        return Name(self.hashes[index], self.namespace)


class _Found(NamedTuple):
    """`_Found` lists contents of a prefix that a tier has, as many as are copied at once."""

    tier: Tier
    kind: Kind
    names: list[Name]  # names in the order in which the contents lie there
    rows: list[list[Tensor]] | None = None  # rows read; None: they are read with the lock held, by the device alone


class TierLoad:
    """`TierLoad` loads contents of tiers into one store. It is made for one call.

    Args:
        store: store of the pool.
        layout: layout of contents.
        tiers: tiers from the nearest to the furthest.
    """

    def __init__(self, store: Room, layout: ContentLayout, tiers: Sequence[Tier]) -> None:
        self._store, self._layout, self._tiers = store, layout, tiers
        self._allocator = store.allocator

    def load(self, rows: Sequence[Wanted]) -> dict[int, str]:
        """Load the blocks that these rows begin with, as far as a tier has them and there is room.

        If several rows have one prefix, it is loaded for the first row, and the others find it in the cache. No lock is
        held while files are read.

        Returns:
            block id -> name of the tier from which the block came.
        """
        loaded: dict[int, str] = {}
        for row in rows:
            with self._store.lock:
                prefix = self._missing(row)
                found, holds = ([], []) if prefix is None else self._where(prefix)
            if prefix is not None:
                found = [self._read(each) for each in found]
                # where there is no memory, not even for what is copied at once, the prompt is computed
                with suppress(torch.OutOfMemoryError, OutOfBlocksError), self._store.lock:
                    loaded |= self._take_in(prefix, found)
            del holds
        return loaded

    def look_up(self, row: Wanted) -> tuple[int, str | None] | None:
        """Return how many leading tokens of a row would be known if all were loaded, and the furthest tier needed.

        Returns None if tiers have no more than is cached.  Effects: none.
        """
        prefix, tiers = self._missing(row), self._tiers
        if prefix is None:
            return None
        names = [(kind, prefix.name(index)) for kind, index in prefix.missing]
        at = max((next(n for n, tier in enumerate(tiers) if tier.has(*content)) for content in names), default=None)
        return len(prefix.hashes) * self._allocator.block_size, None if at is None else tiers[at].name

    def _missing(self, row: Wanted) -> _Prefix | None:
        """Return a row's prefix as the pool and the tiers have it; None if tiers have no more than is cached."""
        tiers = [tier for tier in self._tiers if any(tier.num_of(kind) for kind in self._layout.kinds)]
        if not tiers or (self._store.windows.layers and not self._store.pool.layer_indices):
            return None
        size = self._allocator.block_size
        chain = HashChain(row.root, size)
        chain.extend(row.token_ids)

        def is_below(kind: Kind, name: Name) -> bool:
            return any(tier.has(kind, name) for tier in tiers)

        prefix = self._reach(chain.hashes, row.namespace, row.most_tokens // size, is_below)
        return None if prefix.is_cached else prefix

    def _reach(
        self,
        hashes: Callable[[int], Iterable[BlockHash]],
        namespace: bytes,
        most: int,
        is_below: Callable[[Kind, Name], bool],
        num_left: float = math.inf,
    ) -> _Prefix:
        """Return the longest prefix after which all layers can resume, with what can be loaded.

        Args:
            hashes: returns the hashes of the row's blocks, from a logical index on.
            most: most blocks after which layers with a state may resume.
            is_below: returns whether a content can be loaded.
            num_left: number of blocks that can be taken; cached blocks that nobody holds count, too.
        """
        match, has_tensors, size = self._allocator.match_prefix, self._layout.has_tensors, self._allocator.block_size
        ids: list[int | None] = [*match(hashes(0), namespace)]
        for block_hash in hashes(len(ids)):
            at = match((block_hash,), namespace)
            if not at and has_tensors and not is_below(BLOCKS, Name(block_hash, namespace)):
                break
            ids.append(at[0] if at else None)
        if num_left < len(ids):
            num_taken = accumulate(at is None or not self._allocator.ref_count(at) for at in ids)
            ids = [at for at, taken in zip(ids, num_taken, strict=True) if taken <= num_left]
        known = [*islice(hashes(0), len(ids))]

        def is_held(group: Group, index: int) -> bool:
            return (at := ids[index]) is not None and group.has(at)

        def is_anywhere(group: Group, index: int) -> bool:
            return is_held(group, index) or is_below(group.name, Name(known[index], namespace))

        groups = self._store.groups
        end = min(len(ids), most) if self._store.states else len(ids)
        end = resumable_where(groups, end * size, is_anywhere) // size
        needed = [(group, index) for group in groups for index in group.seen(end * size)]
        missing: list[tuple[Kind, int]] = [(group.name, at) for group, at in needed if not is_held(group, at)]
        if has_tensors:
            missing += [(BLOCKS, index) for index, at in enumerate(ids[:end]) if at is None]
        return _Prefix(known[:end], namespace, ids[:end], missing)

    def _where(self, prefix: _Prefix) -> tuple[list[_Found], list[object]]:
        """Find the tier of each missing content.

        Returns:
            What was found, and objects that keep the contents there as long as the objects live.
        """
        found: list[_Found] = []
        holds: list[object] = []
        for kind in dict.fromkeys(kind for kind, _ in prefix.missing):
            names = [prefix.name(index) for of_kind, index in prefix.missing if of_kind == kind]
            for tier in self._tiers:
                here, parts = tier.in_order(kind, names), tier.parts_of(kind)
                if here and self._layout.is_now(kind, parts):
                    step = max(1, _MOST_STAGED_BYTES // sum(part.num_bytes for part in parts))
                    found += [_Found(tier, kind, here[at : at + step]) for at in range(0, len(here), step)]
                    holds.append(tier.hold(kind, here))
                    names = [name for name in names if not tier.has(kind, name)]
        return found, holds

    def _read(self, found: _Found) -> _Found:
        """Read contents that lie in files. Contents in memory stay where they are."""
        if isinstance(found.tier, HostTier):
            return found
        try:
            return found._replace(rows=found.tier.load(found.kind, found.names))
        except OSError as error:
            logger.warning("PagedPrefixCache: blocks could not be read back, and are computed: %s", error)
            return found._replace(names=[], rows=[])

    def _take_in(self, prefix: _Prefix, found: Sequence[_Found]) -> dict[int, str]:
        """Take blocks for what was found, as far as they can be had now, fill them, and commit them.

        Returns:
            block id -> name of the tier from which the block came.
        """
        has = {(each.kind, name) for each in found for name in each.names if each.tier.has(each.kind, name)}
        self._store.pool.join_streams()
        hashes, most = prefix.hashes, self._store.num_obtainable_blocks()
        now = self._reach(
            lambda start: hashes[start:], prefix.namespace, len(hashes), lambda *content: content in has, most
        )
        if now.is_cached or not self._make_room(now):
            return {}
        allocation, groups = self._allocator.allocate(namespace=prefix.namespace), self._store.windows.groups
        try:
            return self._load_into(allocation, now, found)
        finally:
            with Changing(groups):
                block_ids, resumption = list(allocation.block_ids), allocation.resumption or Resumption.at(0)
                allocation.free()
                for group in groups:
                    group.leave(block_ids, resumption)  # the end of a prefix is where others are likely to resume

    def _make_room(self, prefix: _Prefix) -> bool:
        """Make room for what a prefix needs beside what is cached; return whether all of it can be had."""
        num_lacking = Counter(kind for kind, _ in prefix.missing)
        self._store.make_room(
            max([prefix.ids.count(None), *(num_lacking[group.name] for group in self._store.windows.groups)])
        )
        for group in self._store.windows.groups:
            ids = [prefix.ids[index] for index in group.seen(len(prefix.ids) * self._allocator.block_size)]
            held = [at for at in ids if at is not None and at in group.places]
            num_needed = group.num_to_take(held) + num_lacking[group.name]
            if num_needed > min(group.num_spare, group.num_free + group.num_idle):
                return False
        return True

    def _load_into(self, allocation: Allocation, prefix: _Prefix, found: Sequence[_Found]) -> dict[int, str]:
        """Let `allocation`, which is empty, hold a prefix, and fill its new blocks with their contents.

        If interrupted anywhere, new blocks are free again, and no block has a window block that was not written.
        """
        allocator, groups = self._allocator, self._store.windows.groups
        with Changing(groups):
            allocator.allocate_immutable(allocation, prefix.hashes)  # holds cached blocks before it takes others
            block_ids = allocation.block_ids
            fresh = [block_id for block_id, at in zip(block_ids, prefix.ids, strict=True) if at is None]
            allocation.resumption = Resumption.at(len(block_ids) * allocator.block_size)
            # content to load -> block, or window block
            targets: dict[tuple[Kind, int], int] = {
                (kind, index): block_ids[index] for kind, index in prefix.missing if kind == BLOCKS
            }
            for group in groups:
                group.hold(block_ids[index] for index in group.seen(allocation.resumption.start))
                group.drop(fresh)  # what these blocks held before
                lacking = [content for content in prefix.missing if content[0] == group.name]
                targets |= zip(lacking, group.take_places(len(lacking)), strict=True)
            self._store.make_copies()
            tier_of = self._fill(found, {(kind, prefix.name(index)): to for (kind, index), to in targets.items()})
            allocator.mark_computed(fresh)
            for group in groups:
                for (kind, index), place in targets.items():
                    if kind == group.name:
                        group.places[block_ids[index]] = place
        if (STATES, len(block_ids) - 1) in prefix.missing:
            tier_of |= self._fill(found, {(STATES, prefix.name(-1)): block_ids[-1]})
        if self._layout.has_tensors:
            return {block_ids[i]: tier_of[BLOCKS, prefix.name(i)] for kind, i in prefix.missing if kind == BLOCKS}
        return {block_id: tier for tier in tier_of.values() for block_id in fresh}

    def _fill(self, found: Sequence[_Found], targets: Mapping[tuple[Kind, Name], int]) -> dict[tuple[Kind, Name], str]:
        """Copy contents into blocks and window blocks, or keep a snapshot; return each content's tier by name."""
        tier_of: dict[tuple[Kind, Name], str] = {}
        for tier, kind, all_names, read in found:
            at = [index for index, name in enumerate(all_names) if (kind, name) in targets]
            if not at:
                continue
            names, parts = [all_names[index] for index in at], tier.parts_of(kind)
            if read is None:
                read = tier.load(kind, names)
            elif len(at) < len(all_names):
                read = [[torch.cat(fragments)[at]] for fragments in read]
            ids = [targets[kind, name] for name in names]
            if kind == STATES:
                states = states_of_row((part, rows[0][0]) for part, rows in zip(parts, read, strict=True))
                self._store.states.kept.keep(ids[0], states)
            else:
                for part, fragments in zip(parts, read, strict=True):
                    write_blocks(self._store.pool, part, ids, to_device(part, fragments))
            tier.touch(kind, names)
            tier_of.update({(kind, name): tier.name for name in names})
        return tier_of
