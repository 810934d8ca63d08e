"""Offloads what is evicted to the tiers below a store's pool, and loads it when a prompt asks for it.

An evicted block's content stays in the pool until the next write. Evictions are noted, and contents are copied out
before that write.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

import torch

from ..blocks import BlockHash
from ..kv.states import States
from ..stats import TierStats
from ..tiers.base import BLOCKS, STATES, Kind, Name, Tier
from ..tiers.disk import DiskTier
from ..tiers.run_files import Run
from ..tiers.sharing import why_not
from .content_layout import ContentLayout
from .tier_load import Room, TierLoad, Wanted

logger = logging.getLogger("hf_paged_cache")

_MOST_ROOTS = 2**17  # most blocks whose roots are remembered
_MOST_STAGED_BYTES = 2**26  # bytes of rows that are copied at once, beside the pool


class _Evicted(NamedTuple):
    kind: Kind
    name: Name
    source: Any  # a block, a window block, or the states of a snapshot


class LowerTiers:
    """`LowerTiers` has the tiers below a store's pool. Without tiers it is false; then nothing is noted or looked for.

    Args:
        store: store of the pool. The caller holds its lock, but for `load`.
        tiers: tiers from the nearest to the furthest. What is evicted goes into the first one.

    Attributes:
        layout: layout of contents.
    """

    def __init__(self, store: Room, tiers: Sequence[Tier]) -> None:
        self.tiers = list(tiers)
        self._disk = next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)
        self._roots: dict[bytes, bytes] = {}  # digest of a block -> root of its sequence
        self._strangers: list[Run] = []  # files that are not of this model, as far as is known
        self._num_models = 0  # identities of the model when `_strangers` were looked at last
        self._told: set[str] = set()  # reasons why files are not used, as logged
        self._must_settle = False  # True if files have shown what a block takes
        self._store = ref(store)  # the store owns this object
        self._allocator = store.allocator
        self._windows = store.windows
        self._evicted: list[_Evicted] = []  # evictions whose contents are still where they were
        self.layout = ContentLayout(store.pool, store.windows, store.states, self.tiers)
        if self.tiers:
            store.allocator.watch_evictions(_weakly(self._note_block))
            store.states.kept.on_evict = _weakly(self._note_snapshot)
            self.watch_windows()

    def __bool__(self) -> bool:
        """Return whether there is a tier."""
        return bool(self.tiers)

    def __repr__(self) -> str:
        return f"LowerTiers({', '.join(map(repr, self.tiers))})"

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
            self._evicted.append(_Evicted(STATES, self._name(*found), states))

    def _name(self, block_hash: BlockHash, namespace: bytes) -> Name:
        """Return the name by which a content is found.

        The name has the root of the content's sequence if the content may be written into a file.
        """
        if self._disk is None or namespace:
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

    def _find_files(self, disk: DiskTier) -> None:
        """Find what other processes have written. The caller holds the store's lock."""
        store = self._store()
        assert store is not None  # the store asks
        new, models = disk.look(), disk.sharing.identities()
        if len(models) != self._num_models:
            self._num_models = len(models)
            new, self._strangers = [*self._strangers, *new], []
        for run in new:
            if (file := run.file) is None:
                continue
            why = why_not(file, self._allocator.block_size, models)
            if why is None:
                self._must_settle |= self.layout.learn(file, store.make_room)
                parts = self.layout.parts_here(file, store.first_device())
                disk.adopt(run, parts, lambda block: Name(block, b""))
                if None in parts.values():
                    why = "layers lie on other devices, or have other tensors, than where it was computed"
            else:
                self._strangers.append(run)
            if why is not None and why not in self._told:
                self._told.add(why)
                logger.info("a file in disk_folder is not used, as others like it: %s: %s", run.path.name, why)

    def offload(self, *, may_wait: bool) -> None:
        """Copy out what was evicted since the last call, before anything is written.

        Where there is no memory for the copies, what was evicted is lost.

        Args:
            may_wait: True while a prompt runs, False while a token is generated.
        """
        evicted, tier = self._evicted[:], self.tiers[0]
        if not evicted:
            return
        of_kind: dict[Kind, dict[Name, Any]] = {}
        for kind, name, source in evicted:
            of_kind.setdefault(kind, {})[name] = source
            if kind == STATES:
                self.layout.see_states(source)
        parts = self.layout.parts()
        if self._disk is not None and parts.get(BLOCKS):
            self._add_what_is_before(tier, of_kind)
        for kind, sources in of_kind.items():
            tier.touch(kind, [name for name in sources if tier.has(kind, name)])
            new = {name: source for name, source in sources.items() if not tier.has(kind, name)}
            names, of_kind_parts = list(new), parts.get(kind) or []
            step = max(1, _MOST_STAGED_BYTES // max(1, sum(part.num_bytes for part in of_kind_parts)))
            with suppress(torch.OutOfMemoryError):
                for start in range(0, len(names) if of_kind_parts else 0, step):
                    some = names[start : start + step]
                    rows = self.layout.rows_of(kind, [new[name] for name in some])
                    tier.put(kind, of_kind_parts, some, rows, may_wait=may_wait)
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

    def load(self, rows: Sequence[Wanted]) -> dict[int, str]:
        """Load the blocks that these rows begin with; see `TierLoad.load`."""
        if (store := self._store()) is None:
            return {}
        if self._disk is not None:
            with store.lock:
                self._find_files(self._disk)
                must_settle, self._must_settle = self._must_settle, False
            if must_settle:
                store.read_budget()
                with store.lock:
                    store.settle_budget()
        return TierLoad(store, self.layout, self.tiers).load(rows)

    def look_up(self, row: Wanted) -> tuple[int, str | None] | None:
        """Look up how much of a row is known with the tiers; see `TierLoad.look_up`."""
        if not self.tiers or (store := self._store()) is None:
            return None
        if self._disk is not None:
            self._find_files(self._disk)
        return TierLoad(store, self.layout, self.tiers).look_up(row)

    def forget_namespace(self, namespace: bytes) -> None:
        """Forget all contents of a namespace."""
        self._evicted = [each for each in self._evicted if each.name.namespace != namespace]
        for tier in self.tiers:
            tier.forget_namespace(namespace)

    def forget_files(self) -> None:
        """Remove the files that this process has written, and find no others any more.

        What was computed may have been wrong all along: other processes are not to find it. The caller holds the
        store's lock.
        """
        if self._disk is not None:
            self._disk.reset()

    def reset(self) -> None:
        """Forget all contents, and give memory and files back."""
        self._evicted, self._strangers = [], []
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
            counts = tier.counts
            moved = (counts.num_down, counts.num_up, counts.num_dropped, counts.num_refused)
            of_all = () if salt else (tier.num_bytes, tier.max_bytes, *moved)
            found.append(TierStats(tier.name, num_blocks, *of_all))
        return tuple(found)

    def check(self) -> None:
        """Prove the invariants of each tier, or raise BlockStateError."""
        for tier in self.tiers:
            tier.check()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object lives, and that does not keep the object's memory."""
    held = WeakMethod(method)

    def call(*args: Any) -> None:
        if (method := held()) is not None:
            method(*args)

    return call
