"""Brings blocks up from lower tiers, before a prompt looks for them: which, into which blocks, and how they become cached ones.

A block that comes up is committed under its hash like any other; whatever holds for cached blocks holds for it from then on.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from ..blocks import Allocation, BlockHash, Group, HashChain, PrefixCachingBlockAllocator, WindowBlocks, resumable_where
from ..blocks.allocation import Resumption
from ..blocks.tokens import TokenIds
from ..errors import OutOfBlocksError
from ..kv.block_pool import BlockPool
from ..kv.contents import runs, states_of_row, to_device, write_blocks
from ..kv.stopwatch import Stopwatch
from ..tiers.base import BLOCKS, STATES, Hold, Kind, Name, Tier
from ..tiers.host import HostTier
from ..tiers.worth import Worth
from .content_layout import ContentLayout
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups

logger = logging.getLogger("hf_paged_cache")

_MOST_STAGED_BYTES = 2**26  # rows that are copied at once, beside the pool


class Room(Protocol):
    """What must be known of a store to take blocks of it."""

    lock: RLock
    pool: BlockPool
    windows: WindowGroups
    first_device: Callable[[], torch.device]

    def read_budget(self) -> None: ...

    def settle_budget(self) -> None: ...

    def num_obtainable_blocks(self, holder: Any) -> float: ...

    def make_room(self, num_blocks: int) -> None: ...

    def make_copies(self) -> None: ...


class Wanted(NamedTuple):
    """A row whose prefix is looked for."""

    root: bytes
    namespace: bytes
    token_ids: TokenIds
    most_tokens: int  # behind which layers with a state may go on at most


class _Prefix(NamedTuple):
    """What is to come up for a row."""

    hashes: list[BlockHash]  # of its leading blocks, as far as they are to be known
    namespace: bytes
    missing: list[tuple[Kind, Name]]


class _Plan(NamedTuple):
    """What is brought up of a prefix. Logical indices of its blocks."""

    hashes: list[BlockHash]
    fresh: list[int]  # that are not cached
    spans: list[range]  # of each group, those that the window sees which goes on behind it
    lacking: list[list[int]]  # of these, those that have no window block


class _Found(NamedTuple):
    """Contents that a tier has."""

    tier: Tier
    kind: Kind
    names: list[Name]  # as they lie there
    rows: list[list[Tensor]] | None  # None: read with the lock held, for the device alone reads them
    seconds: float  # that it took to read them


class BringUp:
    """What comes up into one store.

    Args:
        room: the store.
        layout: of contents.
        tiers: from the nearest to the furthest.
        worth: of each tier, by name.
    """

    def __init__(
        self,
        room: Room,
        allocator: PrefixCachingBlockAllocator,
        pool: BlockPool,
        windows: WindowGroups,
        states: StateSnapshots,
        layout: ContentLayout,
        tiers: Sequence[Tier],
        worth: Mapping[str, Worth],
    ) -> None:
        self._room = ref(room)  # which owns this
        self._allocator = allocator
        self._pool = pool
        self._windows = windows
        self._states = states
        self._layout = layout
        self._tiers = tiers
        self._worth = worth

    def bring_up(self, rows: Sequence[Wanted], holder: Any) -> dict[int, str]:
        """Have the blocks cached that these rows begin with, as far as a tier has them, it pays, and there is room.

        Takes only blocks that no other call has reserved. A prefix that several rows have comes up once. No lock is held while
        files are read.

        Args:
            holder: the call that is about to look for them.

        Returns:
            block id -> name of the tier that it came from.
        """
        if (room := self._room()) is None:
            return {}
        lock = room.lock
        with lock:
            tiers = [tier for tier in self._tiers if self._may_have(tier)]
            prefixes = [prefix for row in rows if (prefix := self._missing(row, tiers)) is not None]
            found, holds = self._where(prefixes, tiers)
        if not prefixes:
            return {}
        found = [self._read(each) for each in found]
        try:
            with lock:
                return self._take_in(room, prefixes, found, holder)
        except torch.OutOfMemoryError:  # not even for what is copied at once: the prompt is computed
            return {}
        finally:
            del holds

    def look_up(self, row: Wanted) -> tuple[int, str] | None:
        """Of a row's leading tokens, how many would be known if all came up that pays, and from which tier the furthest of it.

        Effects: none. None where tiers have no more than is cached.
        """
        tiers = [tier for tier in self._tiers if self._has_any(tier) and self._worth[tier.name].is_cheaper]
        prefix = self._missing(row, tiers)
        if prefix is None:
            return None
        furthest = max(
            next(at for at, tier in enumerate(tiers) if tier.has(kind, name)) for kind, name in prefix.missing
        )
        return len(prefix.hashes) * self._allocator.block_size, tiers[furthest].name

    def _has_any(self, tier: Tier) -> bool:
        return any(tier.num_of(kind) for kind in self._layout.kinds)

    def _may_have(self, tier: Tier) -> bool:
        return self._has_any(tier) and self._worth[tier.name].is_worth_it()

    def _missing(self, row: Wanted, tiers: Sequence[Tier]) -> _Prefix | None:
        """What tiers have of a row's prefix, beyond what is cached; None where they have no more."""
        if not tiers or (self._windows.layers and not self._pool.layer_indices):
            return None
        allocator, size = self._allocator, self._allocator.block_size
        chain = HashChain(row.root, size)
        chain.extend(row.token_ids)
        hits: list[int | None] = [*allocator.match_prefix(chain.hashes(), row.namespace)]
        num_known, has_tensors = len(hits), self._layout.has_tensors

        def is_below(kind: Kind, index: int) -> bool:
            name = Name(chain.block_hash(index), row.namespace)
            return any(tier.has(kind, name) for tier in tiers)

        for index in range(num_known, chain.num_full_blocks):
            at = allocator.match_prefix((chain.block_hash(index),), row.namespace)
            if not at and has_tensors and not is_below(BLOCKS, index):
                break
            hits.append(at[0] if at else None)

        def is_held(kind: Kind, index: int) -> bool:
            return self._is_held(kind, hits[index])

        def is_anywhere(kind: Kind, index: int) -> bool:
            return is_held(kind, index) or is_below(kind, index)

        most = row.most_tokens // size
        known, end = self._end(num_known, most, is_held), self._end(len(hits), most, is_anywhere)
        if end <= known:
            return None
        hashes = chain.hashes_of(0, end)
        missing: list[tuple[Kind, Name]] = []
        if has_tensors:
            missing = [(BLOCKS, Name(hashes[i], row.namespace)) for i in range(end) if hits[i] is None]
        for group in self._windows.groups:
            span = [index for index in self._span(group, end) if not is_held(group.window, index)]
            missing += [(group.window, Name(hashes[index], row.namespace)) for index in span]
        if self._states and not is_held(STATES, end - 1):
            missing.append((STATES, Name(hashes[end - 1], row.namespace)))
        return _Prefix(hashes, row.namespace, missing)

    def _is_held(self, kind: Kind, block_id: int | None) -> bool:
        """Whether a block has this in the pool; None: no block."""
        if block_id is None:
            return False
        if kind == STATES:
            return self._states.kept.has(block_id)
        return any(block_id in group.places for group in self._windows.groups if group.window == kind)

    def _span(self, group: WindowBlocks, num_blocks: int) -> range:
        size = self._allocator.block_size
        return group.span(num_blocks * size, num_blocks * size)

    def _end(self, num_blocks: int, most: int, has: Callable[[Kind, int], bool]) -> int:
        """Of so many leading blocks, the most behind which all layers can go on: windows, and behind a snapshot, up to `most`."""
        groups: list[Group] = [*self._windows.groups]
        if self._states:
            groups, num_blocks = [*groups, self._states.kept], min(num_blocks, most)
        size = self._allocator.block_size
        return resumable_where(groups, num_blocks * size, lambda group, index: has(group.name, index)) // size

    def _where(self, prefixes: Sequence[_Prefix], tiers: Sequence[Tier]) -> tuple[list[_Found], list[Hold]]:
        """In which tier each content is, once; and what keeps them there meanwhile."""
        wanted: dict[Kind, dict[Name, None]] = {}
        for prefix in prefixes:
            for kind, name in prefix.missing:
                wanted.setdefault(kind, {})[name] = None
        found: list[_Found] = []
        holds: list[Hold] = []
        for kind, names in wanted.items():
            for tier in tiers:
                here = tier.in_order(kind, names)
                if here and self._layout.is_now(kind, tier.parts_of(kind)):
                    found.append(_Found(tier, kind, here, None, 0.0))
                    holds.append(tier.hold(kind, here))
                    for name in here:
                        del names[name]
        return found, holds

    def _read(self, found: _Found) -> _Found:
        """Read files. Contents in memory stay where they are."""
        if isinstance(found.tier, HostTier):
            return found
        stopwatch = Stopwatch(())
        try:
            rows = found.tier.load(found.kind, found.names)
        except OSError as error:
            logger.warning("PagedPrefixCache: blocks could not be read back, and are computed: %s", error)
            return found._replace(names=[], rows=[])
        stopwatch.stop()
        return found._replace(rows=rows, seconds=stopwatch.seconds() or 0.0)

    def _take_in(self, room: Room, prefixes: Sequence[_Prefix], found: Sequence[_Found], holder: Any) -> dict[int, str]:
        """Take blocks for what was found, as far as they can be had, let them hold it, and commit them.

        What has come up for one row is held until all have theirs.
        """
        has = {(each.kind, name) for each in found for name in each.names if each.tier.has(each.kind, name)}
        brought: dict[int, str] = {}
        held: list[Allocation] = []
        self._pool.join_streams()
        try:
            for prefix in prefixes:
                plan = self._plan(room, prefix, has, holder)
                if plan is not None:
                    held.append(self._allocator.allocate(namespace=prefix.namespace))
                    brought |= self._bring(room, plan, prefix.namespace, found, held[-1])
        except OutOfBlocksError:  # there was no memory for so many
            pass
        finally:
            for allocation in held:
                self._let_go(allocation)
        return brought

    def _plan(self, room: Room, prefix: _Prefix, has: Collection[tuple[Kind, Name]], holder: Any) -> _Plan | None:
        """How much of a prefix can be had now; None where that is no more than there is."""
        allocator, groups = self._allocator, self._windows.groups
        most, num_taken = room.num_obtainable_blocks(holder), 0
        ids: list[int | None] = []
        for block_hash in prefix.hashes:
            at = allocator.match_prefix((block_hash,), prefix.namespace)
            if not at and self._layout.has_tensors and (BLOCKS, Name(block_hash, prefix.namespace)) not in has:
                break
            num_taken += not at or not allocator.ref_count(at[0])
            if num_taken > most:
                break
            ids.append(at[0] if at else None)

        def will_be(kind: Kind, index: int) -> bool:
            return (kind, Name(prefix.hashes[index], prefix.namespace)) in has or self._is_held(kind, ids[index])

        end = self._end(len(ids), len(ids), will_be)
        fresh = [index for index in range(end) if ids[index] is None]
        spans = [self._span(group, end) for group in groups]
        lacking = [
            [index for index in span if not self._is_held(group.window, ids[index])]
            for group, span in zip(groups, spans, strict=True)
        ]
        if not end or not (fresh or any(lacking) or self._states):
            return None
        room.make_room(max([len(fresh), *map(len, lacking)]))
        for group, span, indices in zip(groups, spans, lacking, strict=True):
            num_held = group.num_to_take([ids[index] or 0 for index in span if index not in indices])
            if num_held + len(indices) > min(group.num_spare, group.num_free + group.num_idle):
                return None
        return _Plan(prefix.hashes[:end], fresh, spans, lacking)

    def _bring(
        self, room: Room, plan: _Plan, namespace: bytes, found: Sequence[_Found], allocation: Allocation
    ) -> dict[int, str]:
        """Let `allocation`, which is empty, hold a prefix, with its contents where it has new blocks.

        Interrupted anywhere, new blocks are free again, and no block has a window block that was not written.
        """
        allocator, groups = self._allocator, self._windows.groups
        names = [Name(block_hash, namespace) for block_hash in plan.hashes]
        for group in groups:
            group.begin()
        allocator.allocate_immutable(allocation, plan.hashes)  # holds what is cached before it takes others
        block_ids = allocation.block_ids
        fresh = [block_ids[index] for index in plan.fresh]
        allocation.resumption = Resumption.at(len(block_ids) * allocator.block_size)
        targets: dict[tuple[Kind, Name], int] = {}  # what comes up -> block, or window block
        if self._layout.has_tensors:
            targets |= {(BLOCKS, names[index]): block_ids[index] for index in plan.fresh}
        for group, span, lacking in zip(groups, plan.spans, plan.lacking, strict=True):
            group.hold(block_ids[span.start : span.stop])
            places = group.take_places(fresh, len(lacking))
            targets |= {(group.window, names[i]): place for i, place in zip(lacking, places, strict=True)}
        room.make_copies()
        tier_of = self._fill(found, targets)
        allocator.mark_computed(fresh)
        for group, lacking in zip(groups, plan.lacking, strict=True):
            for index in lacking:
                group.give_place(block_ids[index], targets[group.window, names[index]])
            group.end()
        if self._states:
            tier_of |= self._keep_snapshot(found, names[-1], block_ids[-1])
        if self._layout.has_tensors:
            return {block_ids[index]: tier_of[BLOCKS, names[index]] for index in plan.fresh}
        return {block_id: tier for tier in tier_of.values() for block_id in fresh}

    def _let_go(self, allocation: Allocation) -> None:
        """The blocks of a prefix are cached; its end is where others are likely to go on."""
        block_ids, resumption = list(allocation.block_ids), allocation.resumption or Resumption.at(0)
        allocation.free()
        for group in self._windows.groups:
            group.leave(block_ids, resumption)

    def _fill(self, found: Sequence[_Found], targets: Mapping[tuple[Kind, Name], Any]) -> dict[tuple[Kind, Name], str]:
        """Copy contents into the pool, some MB at a time; says from which tier each came."""
        pool, tier_of = self._pool, {}
        for each in found:
            if each.kind == STATES:
                continue
            parts = each.tier.parts_of(each.kind)
            at = [index for index, name in enumerate(each.names) if (each.kind, name) in targets]
            if not at:
                continue
            names = [each.names[index] for index in at]
            stopwatch = Stopwatch(part.device for part in parts)
            if each.rows is None:
                loaded = each.tier.load(each.kind, names)
            else:
                is_all = len(at) == len(each.names)
                loaded = each.rows if is_all else [_chosen(fragments, at) for fragments in each.rows]
            ids = [targets[each.kind, name] for name in names]
            for part, fragments in zip(parts, loaded, strict=True):
                done = 0
                for some in _some(fragments, max(1, _MOST_STAGED_BYTES // part.num_bytes)):
                    number = sum(map(len, some))
                    write_blocks(pool, part, ids[done : done + number], to_device(part, some))
                    done += number
            stopwatch.stop()
            each.tier.touch(each.kind, names)
            if each.kind == BLOCKS or not self._layout.has_tensors:
                self._worth[each.tier.name].read.add(_Longer(stopwatch, each.seconds), len(names))
            tier_of.update({(each.kind, name): each.tier.name for name in names})
        return tier_of

    def _keep_snapshot(self, found: Sequence[_Found], name: Name, block_id: int) -> dict[tuple[Kind, Name], str]:
        """A prefix comes up with the snapshot at its end, if that is not there yet."""
        for each in found:
            if each.kind == STATES and name in each.names and not self._states.kept.has(block_id):
                if each.rows is None:
                    rows = [fragments[0][0] for fragments in each.tier.load(STATES, (name,))]
                else:
                    rows = [_chosen(fragments, [each.names.index(name)])[0][0] for fragments in each.rows]
                self._states.kept.keep(block_id, states_of_row(zip(each.tier.parts_of(STATES), rows, strict=True)))
                each.tier.touch(STATES, (name,))
                return {(STATES, name): each.tier.name}
        return {}


class _Longer(Stopwatch):
    """A measurement, and what was measured before it."""

    def __init__(self, stopwatch: Stopwatch, before: float) -> None:
        self._stopwatch = stopwatch
        self._before = before

    def seconds(self) -> float | None:
        seconds = self._stopwatch.seconds()
        return None if seconds is None else seconds + self._before


def _chosen(fragments: Sequence[Tensor], at: Sequence[int]) -> list[Tensor]:
    """Of rows in some tensors, those with these numbers, which ascend: as few tensors as they lie in."""
    chosen, start = [], 0
    for fragment in fragments:
        here = [number - start for number in at if start <= number < start + len(fragment)]
        chosen += [fragment[here[first] : here[first] + length] for first, length in runs(here)]
        start += len(fragment)
    return chosen


def _some(fragments: Sequence[Tensor], most: int) -> Iterable[list[Tensor]]:
    """The same rows, at most so many at a time."""
    held: list[Tensor] = []
    for fragment in fragments:
        for start in range(0, len(fragment), most):
            piece = fragment[start : start + most]
            if held and sum(map(len, held)) + len(piece) > most:
                yield held
                held = []
            held.append(piece)
    if held:
        yield held
