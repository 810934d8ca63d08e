"""Describes what the contents of a store's blocks look like now: for each kind, the parts of a row of bytes.

It is read off the pool, and read again when the pool's layers have other tensors. If nothing was written into the pool
yet, it is read off files of the same model. The caller holds the store's lock.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.contents import (
    BLOCKS,
    STATES,
    Kind,
    Part,
    lay_out_pool,
    parts_of_pool,
    parts_of_states,
    rows_of_blocks,
    rows_of_states,
)
from ..tiers.saved_file import SavedFile
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups

_CPU = torch.device("cpu")


class ContentLayout:
    """`ContentLayout` knows the parts of each kind of content.

    Args:
        make_room: grows the pool for a number of blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        windows: WindowGroups,
        states: StateSnapshots,
        make_room: Callable[[int], None],
    ) -> None:
        self._pool, self._windows, self._states, self._make_room = pool, windows, states, make_room
        self._looked_at = -1  # number of the pool's layout that was looked at
        self._parts: dict[Kind, list[Part]] = {}

    @property
    def kinds(self) -> list[Kind]:
        """Kinds that blocks of this store may have, blocks themselves first."""
        return [BLOCKS, *(group.name for group in self._windows.groups), STATES]

    @property
    def has_all_layers(self) -> bool:
        """True if the pool has the tensors of all layers that have keys and values."""
        return {*self._windows.layers} <= {*self._pool.layer_indices}

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
        for group in self._windows.groups:
            if (place := group.places.get(block_id)) is not None:
                yield group.name, place
        if (states := self._states.kept.of_digest(digest)) is not None:
            yield STATES, states

    def rows_of(self, kind: Kind, contents: Sequence[Any]) -> list[Tensor]:
        """Copy contents of a kind; return for each part [N, bytes] on its device. Without parts, there are none."""
        self._pool.join_streams()
        if kind == STATES:
            self.parts()[STATES] = parts_of_states(contents[0])
            return [rows_of_states(part, contents) for part in self.parts()[kind]]
        return [rows_of_blocks(self._pool, part, contents) for part in self.parts().get(kind, [])]

    def fits(self, file: SavedFile, first_device: torch.device) -> bool:
        """Return whether a file's rows are made as rows are here.

        The tensors of layers into which nothing was written yet are made as the file shows them. Snapshots lie on the
        first device.
        """
        if not self._pool.layer_indices:
            self._make_room(0)
        lay_out_pool(self._pool, [part for each in file.contents if each.kind != STATES for part in each.parts])
        for kind, saved, *_ in file.contents:
            if kind == STATES and kind not in self.parts():
                self._parts[kind] = [part._replace(device=first_device) for part in saved]
            if [part._replace(device=_CPU) for part in self.parts().get(kind, [])] != [*saved]:
                return False
        return True
