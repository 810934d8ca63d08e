"""Brings blocks up from lower tiers, before a prompt looks for them: which, into which blocks, and how they become cached ones.

A block that comes up is committed under its hash like any other; whatever holds for cached blocks holds for it from then on.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..blocks import Allocation, BlockHash, Group, HashChain, PrefixCachingBlockAllocator, WindowBlocks, resumable_where
from ..blocks.allocation import Resumption
from ..blocks.tokens import TokenIds
from ..blocks.window_blocks import Changing
from ..errors import OutOfBlocksError
from ..kv.block_pool import BlockPool
from ..kv.contents import Part, runs, states_of_row, to_device, write_blocks
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
    allocator: PrefixCachingBlockAllocator
    pool: BlockPool
    windows: WindowGroups
    states: StateSnapshots
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
    """How much of a row can be had: its leading blocks, and what of them is not in the pool."""

    hashes: list[BlockHash]
    namespace: bytes
    ids: list[int | None]  # logical index -> block, where one is cached
    missing: list[tuple[Kind, int]]  # contents, by the logical index of their block

    @property
    def is_cached(self) -> bool:
        return not self.missing and None not in self.ids

    def name(self, index: int) -> Name:
        return Name(self.hashes[index], self.namespace)


class _Found(NamedTuple):
    """Contents that a tier has."""

    tier: Tier
    kind: Kind
    names: list[Name]  # as they lie there
    rows: list[list[Tensor]] | None  # None: read with the lock held, for the device alone reads them
    seconds: float  # that it took to read them


class BringUp:
    """What comes up into one store. Made for one call.

    Args:
        room: the store.
        layout: of contents.
        tiers: from the nearest to the furthest.
        worth: of each tier, by name.
    """

    def __init__(self, room: Room, layout: ContentLayout, tiers: Sequence[Tier], worth: Mapping[str, Worth]) -> None:
        self._room = room
        self._allocator = room.allocator
        self._pool = room.pool
        self._windows = room.windows
        self._states = room.states
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
        lock = self._room.lock
        with lock:
            tiers = [tier for tier in self._tiers if self._may_have(tier)]
            prefixes = [prefix for row in rows if (prefix := self._missing(row, tiers)) is not None]
            found, holds = self._where(prefixes, tiers)
        if not prefixes:
            return {}
        found = [self._read(each) for each in found]
        try:
            with lock:
                return self._take_in(prefixes, found, holder)
        except torch.OutOfMemoryError:  # not even for what is copied at once: the prompt is computed
            return {}
        finally:
            del holds

    def look_up(self, row: Wanted) -> tuple[int, str | None] | None:
        """Of a row's leading tokens, how many would be known if all came up that pays, and from which tier the furthest of it.

        Effects: none. None where tiers have no more than is cached.
        """
        tiers = [tier for tier in self._tiers if self._has_any(tier) and self._worth[tier.name].is_cheaper]
        prefix = self._missing(row, tiers)
        if prefix is None:
            return None
        furthest = max(
            (
                next(at for at, tier in enumerate(tiers) if tier.has(kind, prefix.name(index)))
                for kind, index in prefix.missing
            ),
            default=None,
        )
        num_tokens = len(prefix.hashes) * self._allocator.block_size
        return num_tokens, None if furthest is None else tiers[furthest].name

    def _has_any(self, tier: Tier) -> bool:
        return any(tier.num_of(kind) for kind in self._layout.kinds)

    def _may_have(self, tier: Tier) -> bool:
        return self._has_any(tier) and self._worth[tier.name].is_worth_it()

    def _missing(self, row: Wanted, tiers: Sequence[Tier]) -> _Prefix | None:
        """What tiers have of a row's prefix, beyond what is cached; None where they have no more."""
        if not tiers or (self._windows.layers and not self._pool.layer_indices):
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
        """The longest prefix behind which all layers can go on, with what can come up.

        Args:
            hashes: of the row's blocks, from a logical index on.
            most: blocks behind which layers with a state may go on at most.
            is_below: whether a content can come up.
            num_left: blocks that can be taken, cached ones that nobody holds among them.
        """
        match, has_tensors = self._allocator.match_prefix, self._layout.has_tensors
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

        def is_anywhere(kind: Kind, index: int) -> bool:
            return self._is_held(kind, ids[index]) or is_below(kind, Name(known[index], namespace))

        end = self._end(len(ids), most, is_anywhere)
        needed: list[tuple[Kind, int]] = [(STATES, end - 1)] if self._states and end else []
        needed += [(group.window, index) for group in self._windows.groups for index in self._span(group, end)]
        missing = [(kind, index) for kind, index in needed if not self._is_held(kind, ids[index])]
        if has_tensors:
            missing += [(BLOCKS, index) for index, at in enumerate(ids[:end]) if at is None]
        return _Prefix(known[:end], namespace, ids[:end], missing)

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
            for kind, index in prefix.missing:
                wanted.setdefault(kind, {})[prefix.name(index)] = None
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

    def _take_in(self, prefixes: Sequence[_Prefix], found: Sequence[_Found], holder: Any) -> dict[int, str]:
        """Take blocks for what was found, as far as they can be had, let them hold it, and commit them.

        What has come up for one row is held until all have theirs.
        """
        has = {(each.kind, name) for each in found for name in each.names if each.tier.has(each.kind, name)}
        brought: dict[int, str] = {}
        held: list[Allocation] = []
        self._pool.join_streams()
        try:
            for prefix in prefixes:
                if self._make_room(now := self._available(prefix, has, holder)):
                    held.append(self._allocator.allocate(namespace=prefix.namespace))
                    brought |= self._bring(now, found, held[-1])
        except OutOfBlocksError:  # there was no memory for so many
            pass
        finally:
            for allocation in held:
                self._let_go(allocation)
        return brought

    def _available(self, prefix: _Prefix, has: Collection[tuple[Kind, Name]], holder: Any) -> _Prefix:
        """How much of a prefix can be had now."""
        hashes, most = prefix.hashes, self._room.num_obtainable_blocks(holder)
        return self._reach(
            lambda start: hashes[start:], prefix.namespace, len(hashes), lambda *content: content in has, most
        )

    def _make_room(self, prefix: _Prefix) -> bool:
        """Have memory for what a prefix needs beside what is cached; whether it needs anything, and all of it can be had."""
        if prefix.is_cached:
            return False
        num_lacking = Counter(kind for kind, _ in prefix.missing)
        groups = self._windows.groups
        self._room.make_room(max([prefix.ids.count(None), *(num_lacking[group.window] for group in groups)]))
        for group in groups:
            span = [prefix.ids[index] for index in self._span(group, len(prefix.ids))]
            held = [at for at in span if at is not None and at in group.places]
            if group.num_to_take(held) + num_lacking[group.window] > min(
                group.num_spare, group.num_free + group.num_idle
            ):
                return False
        return True

    def _bring(self, prefix: _Prefix, found: Sequence[_Found], allocation: Allocation) -> dict[int, str]:
        """Let `allocation`, which is empty, hold a prefix, with its contents where it has new blocks.

        Interrupted anywhere, new blocks are free again, and no block has a window block that was not written.
        """
        allocator, groups = self._allocator, self._windows.groups
        with Changing(groups):
            allocator.allocate_immutable(allocation, prefix.hashes)  # holds what is cached before it takes others
            block_ids = allocation.block_ids
            fresh = [block_id for block_id, at in zip(block_ids, prefix.ids, strict=True) if at is None]
            allocation.resumption = Resumption.at(len(block_ids) * allocator.block_size)
            targets: dict[tuple[Kind, int], int] = {}  # what comes up -> block, or window block
            for kind, index in prefix.missing:
                if kind == BLOCKS:
                    targets[kind, index] = block_ids[index]
            for group in groups:
                span = self._span(group, len(block_ids))
                group.hold(block_ids[span.start : span.stop])
                lacking = [content for content in prefix.missing if content[0] == group.window]
                targets |= zip(lacking, group.take_places(fresh, len(lacking)), strict=True)
            self._room.make_copies()
            tier_of = self._fill(found, {(kind, prefix.name(index)): to for (kind, index), to in targets.items()})
            allocator.mark_computed(fresh)
            for group in groups:
                for (kind, index), place in targets.items():
                    if kind == group.window:
                        group.places[block_ids[index]] = place
        if (STATES, len(block_ids) - 1) in prefix.missing:
            tier_of |= self._fill(found, {(STATES, prefix.name(-1)): block_ids[-1]})
        if self._layout.has_tensors:
            return {block_ids[i]: tier_of[BLOCKS, prefix.name(i)] for kind, i in prefix.missing if kind == BLOCKS}
        return {block_id: tier for tier in tier_of.values() for block_id in fresh}

    def _let_go(self, allocation: Allocation) -> None:
        """The blocks of a prefix are cached; its end is where others are likely to go on."""
        block_ids, resumption = list(allocation.block_ids), allocation.resumption or Resumption.at(0)
        allocation.free()
        for group in self._windows.groups:
            group.leave(block_ids, resumption)

    def _fill(self, found: Sequence[_Found], targets: Mapping[tuple[Kind, Name], Any]) -> dict[tuple[Kind, Name], str]:
        """Copy contents into the pool, some MB at a time, or keep a snapshot; says from which tier each came."""
        tier_of: dict[tuple[Kind, Name], str] = {}
        for each in found:
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
            if each.kind == STATES:
                states = states_of_row((part, rows[0][0]) for part, rows in zip(parts, loaded, strict=True))
                self._states.kept.keep(ids[0], states)
            else:
                for part, fragments in zip(parts, loaded, strict=True):
                    self._write(part, ids, fragments)
            stopwatch.stop()
            each.tier.touch(each.kind, names)
            if each.kind == BLOCKS or (each.kind != STATES and not self._layout.has_tensors):
                self._worth[each.tier.name].read.add(stopwatch, len(names), each.seconds)
            tier_of.update({(each.kind, name): each.tier.name for name in names})
        return tier_of

    def _write(self, part: Part, ids: Sequence[int], fragments: Sequence[Tensor]) -> None:
        """Let blocks, or window blocks, hold these rows."""
        done = 0
        for some in _some(fragments, max(1, _MOST_STAGED_BYTES // part.num_bytes)):
            number = sum(map(len, some))
            write_blocks(self._pool, part, ids[done : done + number], to_device(part, some))
            done += number


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
