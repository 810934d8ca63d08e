"""Reads blocks' contents off a store's pool, and offloads what is evicted to the tiers below.

An evicted block's content stays in the pool until the next write. Evictions are noted, and contents are copied out
before that write. The caller holds the store's lock.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from ..blocks import BlockHash, PrefixCachingBlockAllocator, Snapshots, WindowBlocks
from ..kv.block_pool import BLOCKS, BlockPool
from ..kv.contents import (
    STATES,
    Kind,
    Part,
    lay_out_pool,
    parts_of,
    parts_of_pool,
    rows_of_blocks,
    rows_of_states,
)
from ..kv.states import States
from ..tiers.saved_file import SavedFile
from ..tiers.tiers import Name, Tiers

_CPU = torch.device("cpu")
_MOST_STAGED_BYTES = 2**26  # bytes of rows that are copied at once, beside the pool


class Contents:
    """`Contents` knows what the contents of blocks look like now, and copies what is evicted into tiers.

    A content is a row of bytes, in parts, which are those of the pool's tensors.
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        pool: BlockPool,
        windows: Sequence[WindowBlocks],
        snapshots: Snapshots[States],
        layers: Set[int],
        tiers: Tiers | None,
    ) -> None:
        self._allocator, self._pool, self._windows, self._snapshots = allocator, pool, windows, snapshots
        self._layers, self._tiers = layers, tiers
        self._looked_at = -1  # number of the pool's layout that was looked at
        self._parts: dict[Kind, list[Part]] = {}
        # kind -> name -> a block, a window block, or the states of a snapshot, where the content still is
        self.evicted: dict[Kind, dict[Name, Any]] = {}
        if tiers is not None:
            allocator.watch_evictions(_weakly(self._note_block))
            snapshots.on_evict = _weakly(self._note_snapshot)
            for group in windows:
                group.on_evict = _weakly(self._note_window_block)

    @property
    def has_all_layers(self) -> bool:
        """True if the pool has the tensors of all layers that have keys and values."""
        return self._layers <= {layer_idx for layer_idx, _ in self._pool.named()}

    def parts(self) -> dict[Kind, list[Part]]:
        """Return kind -> parts of its rows now.

        Where no layer holds all tokens there are no parts of BLOCKS: blocks have nothing but window blocks and
        snapshots.
        """
        if self._looked_at != self._pool.num_layouts:
            of_states = self._parts.get(STATES)
            self._parts = parts_of_pool(self._pool)
            if of_states is not None:
                self._parts[STATES] = of_states
            self._looked_at = self._pool.num_layouts
        return self._parts

    def contents_of(self, block_id: int, digest: bytes) -> Iterator[tuple[Kind, Any]]:
        """Yield what a cached block has: itself, its window blocks, and the states of the snapshot at its end."""
        yield BLOCKS, block_id
        for group in self._windows:
            if (place := group.places.get(block_id)) is not None:
                yield group.name, place
        if (states := self._snapshots.of_digest(digest)) is not None:
            yield STATES, states

    def rows_of(self, kind: Kind, contents: Sequence[Any]) -> list[Tensor]:
        """Copy contents of a kind; return for each part [N, bytes] on its device. Without parts, there are none."""
        self._pool.join_streams()
        if kind == STATES:
            self.parts()[STATES] = parts_of(STATES, contents[0])
            return [rows_of_states(part, contents) for part in self.parts()[kind]]
        return [rows_of_blocks(self._pool, part, contents) for part in self.parts().get(kind, [])]

    def fits(self, file: SavedFile) -> bool:
        """Return whether a file's rows are made as rows are here.

        The tensors of layers into which nothing was written yet are made as the file shows them. Snapshots lie on the
        first device.
        """
        lay_out_pool(self._pool, [part for each in file.contents if each.kind != STATES for part in each.parts])
        for kind, saved, *_ in file.contents:
            if kind == STATES and kind not in self.parts():
                self._parts[kind] = [part._replace(device=self._pool.first_device()) for part in saved]
            if [part._replace(device=_CPU) for part in self.parts().get(kind, [])] != [*saved]:
                return False
        return True

    def _note_block(self, block_id: int, block_hash: BlockHash, namespace: bytes) -> None:
        for kind, source in self.contents_of(block_id, block_hash.digest):
            self.evicted.setdefault(kind, {})[block_hash, namespace] = source

    def _note_window_block(self, kind: Kind, place: int, block_hash: BlockHash, namespace: bytes) -> None:
        self.evicted.setdefault(kind, {})[block_hash, namespace] = place

    def _note_snapshot(self, digest: bytes, states: States) -> None:
        if (name := self._allocator.hash_of_digest(digest)) is not None:
            self.evicted.setdefault(STATES, {})[name] = states

    def offload(self) -> None:
        """Copy out what was evicted since the last call, before anything is written.

        Where there is no memory for the copies, it is lost.
        """
        tiers = self._tiers
        if tiers is None or not self.evicted:
            return
        roots = {} if tiers.folder is None else self._roots()
        for kind, sources in self.evicted.items():
            names = tiers.touch(kind, sources)
            row_bytes = sum(part.num_bytes for part in self.parts().get(kind, []))
            step = max(1, _MOST_STAGED_BYTES // max(1, row_bytes))
            with suppress(torch.OutOfMemoryError):
                for start in range(0, len(names), step):
                    some = names[start : start + step]
                    if rows := self.rows_of(kind, [sources[name] for name in some]):
                        contents = [(name, roots.get(name[0].digest, b"")) for name in some]
                        tiers.put(kind, self.parts()[kind], contents, rows)
        self.evicted = {}

    def _roots(self) -> dict[bytes, bytes]:
        """Return digest of a block that was evicted -> root of its sequence.

        The blocks before it are offloaded, too: without them no other process finds it.
        """
        names = [name for sources in self.evicted.values() for name in sources if not name[1]]
        here, blocks = {name[0].digest: name for name in names}, self.evicted.setdefault(BLOCKS, {})
        roots: dict[bytes, bytes] = {}
        for name in names:
            path, parent = [name[0].digest], name[0].parent
            while parent not in roots:
                before = here.get(parent) or self._allocator.hash_of_digest(parent)
                if before is None:
                    roots[parent] = parent
                    break
                if before not in blocks and (at := self._allocator.match_prefix(before[:1], before[1])):
                    blocks[before] = at[0]
                path.append(parent)
                parent = before[0].parent
            roots |= dict.fromkeys(path, roots[parent])
        return roots


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object lives, and that does not keep the object's memory."""
    held = WeakMethod(method)

    def call(*args: Any) -> None:
        if (method := held()) is not None:
            method(*args)

    return call
