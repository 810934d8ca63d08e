"""Offloads what is evicted to the tiers below a store's pool.

An evicted block's content stays in the pool until the next write. Evictions are noted, and contents are copied out
before that write.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch

from ..blocks import BlockHash, PrefixCachingBlockAllocator
from ..kv.block_pool import BlockPool
from ..kv.contents import BLOCKS, STATES, Kind
from ..kv.states import States
from ..stats import TierStats
from ..tiers.base import Name, Tier
from ..tiers.disk import DiskTier
from .content_layout import ContentLayout
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups

_MOST_ROOTS = 2**17  # most blocks whose roots are remembered
MOST_STAGED_BYTES = 2**26  # bytes of rows that are copied at once, beside the pool


class _Evicted(NamedTuple):
    kind: Kind
    name: Name
    source: Any  # a block, a window block, or the states of a snapshot


class LowerTiers:
    """`LowerTiers` has the tiers below a store's pool, the nearest first. Without tiers it is false, and notes nothing.

    The caller holds the store's lock.

    Attributes:
        disk: the tier that keeps files, if there is one.
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        pool: BlockPool,
        windows: WindowGroups,
        states: StateSnapshots,
        tiers: Sequence[Tier],
    ) -> None:
        self.tiers = list(tiers)
        self.layout = ContentLayout(pool, windows, states)
        self.disk = next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)
        self._allocator, self._windows = allocator, windows
        self._roots: dict[bytes, bytes] = {}  # digest of a block -> root of its sequence
        self._evicted: list[_Evicted] = []  # evictions whose contents are still where they were
        if self.tiers:
            allocator.watch_evictions(_weakly(self._note_block))
            states.kept.on_evict = _weakly(self._note_snapshot)
            self.watch_windows()

    def __bool__(self) -> bool:
        """Return whether there is a tier."""
        return bool(self.tiers)

    def watch_windows(self) -> None:
        """Note evictions in the windows' groups, which are new."""
        if self.tiers:
            for group in self._windows.groups:
                group.on_evict = _weakly(self._note_window_block)

    def _note_block(self, block_id: int, block_hash: BlockHash, namespace: bytes) -> None:
        name = self._name(block_hash, namespace)
        for kind, source in self.layout.contents_of(block_id, block_hash.digest):
            self._evicted.append(_Evicted(kind, name, source))

    def _note_window_block(self, kind: Kind, place: int, block_hash: BlockHash, namespace: bytes) -> None:
        self._evicted.append(_Evicted(kind, self._name(block_hash, namespace), place))

    def _note_snapshot(self, digest: bytes, states: States) -> None:
        if (found := self._allocator.hash_of_digest(digest)) is not None:
            self.layout.see_states(states)
            self._evicted.append(_Evicted(STATES, self._name(*found), states))

    def _name(self, block_hash: BlockHash, namespace: bytes) -> Name:
        """Return the name by which a content is found, with the root of its sequence if a file may have it."""
        if self.disk is None or namespace:
            return Name(block_hash, namespace)
        if len(self._roots) > _MOST_ROOTS:
            self._roots.clear()
        path, parent = [block_hash.digest], block_hash.parent
        while parent not in self._roots and (before := self._allocator.hash_of_digest(parent)) is not None:
            path.append(parent)
            parent = before[0].parent
        root = self._roots.get(parent, parent)
        self._roots.update(dict.fromkeys(path, root))
        return Name(block_hash, namespace, root)

    def offload(self) -> None:
        """Copy out what was evicted since the last call, before anything is written.

        Where there is no memory for the copies, what was evicted is lost.
        """
        evicted = self._evicted[:]
        if not evicted:
            return
        tier, parts_of = self.tiers[0], self.layout.parts()
        of_kind: dict[Kind, dict[Name, Any]] = {}
        for kind, name, source in evicted:
            of_kind.setdefault(kind, {})[name] = source
        if self.disk is not None and BLOCKS in parts_of:
            self._add_what_is_before(tier, of_kind)
        for kind, sources in of_kind.items():
            parts = parts_of.get(kind, [])
            tier.touch(kind, sources)
            names = [name for name in sources if not tier.has(kind, name)] if parts else []
            step = max(1, MOST_STAGED_BYTES // max(1, sum(part.num_bytes for part in parts)))
            with suppress(torch.OutOfMemoryError):
                for start in range(0, len(names), step):
                    some = names[start : start + step]
                    tier.put(kind, parts, some, self.layout.rows_of(kind, [sources[name] for name in some]))
        del self._evicted[: len(evicted)]

    def _add_what_is_before(self, tier: Tier, of_kind: dict[Kind, dict[Name, Any]]) -> None:
        """Offload blocks that others may find together with the blocks before them, without which nobody finds them."""
        sources = of_kind.setdefault(BLOCKS, {})
        for name in [name for names in of_kind.values() for name in names if name.root]:
            parent = name.block_hash.parent
            while (found := self._allocator.hash_of_digest(parent)) is not None:
                before = Name(*found, name.root)
                at = self._allocator.match_prefix(found[:1], before.namespace)
                if not at or before in sources or tier.has(BLOCKS, before):
                    break
                sources[before] = at[0]
                parent = found[0].parent

    def forget_namespace(self, namespace: bytes) -> None:
        """Forget all contents of a namespace."""
        self._evicted = [each for each in self._evicted if each.name.namespace != namespace]
        for tier in self.tiers:
            tier.forget_namespace(namespace)

    def forget_files(self) -> None:
        """Remove the files that this process has written, and find no others any more.

        What was computed may have been wrong all along: other processes are not to find it.
        """
        if self.disk is not None:
            self.disk.reset()

    def reset(self) -> None:
        """Forget all contents, and give memory and files back."""
        self._evicted = []
        for tier in self.tiers:
            tier.reset()
        self.layout.forget()

    def lose_pool(self) -> None:
        """Forget what was evicted and not copied, since the pool's content goes. What tiers have stays."""
        self._evicted = []

    def stats(self, salt: bytes) -> tuple[TierStats, ...]:
        """Return the numbers of each tier; given a salt, of its contents alone."""
        found = []
        for tier in self.tiers:
            num_blocks = next((number for kind in self.layout.kinds if (number := tier.num_of(kind, salt or None))), 0)
            moved = (tier.num_down, tier.num_up, tier.num_dropped, tier.num_refused)
            of_all = () if salt else (tier.num_bytes, tier.max_bytes, *moved)
            found.append(TierStats(tier.name, num_blocks, *of_all))
        return tuple(found)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object lives, and that does not keep the object's memory."""
    held = WeakMethod(method)

    def call(*args: Any) -> None:
        if (method := held()) is not None:
            method(*args)

    return call
