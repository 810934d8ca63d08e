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
from ..kv.states import States
from ..tiers.saved_file import SavedFile
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups


class ContentLayout:
    """`ContentLayout` knows the parts of each kind of content."""

    def __init__(self, pool: BlockPool, windows: WindowGroups, states: StateSnapshots) -> None:
        self._pool, self._windows, self._states = pool, windows, states
        self.forget()

    def forget(self) -> None:
        """Look at the pool anew at the next question."""
        self._looked_at = -1  # number of the pool's layout that was looked at
        self._parts: dict[Kind, list[Part]] = {}
        self._state_parts: list[Part] = []

    @property
    def kinds(self) -> list[Kind]:
        """Kinds that blocks of this store may have, blocks themselves first."""
        return [BLOCKS, *(group.name for group in self._windows.groups), STATES]

    @property
    def has_tensors(self) -> bool:
        """True if any layer holds all tokens; if none does, blocks have nothing but window blocks and snapshots."""
        return bool(self.parts().get(BLOCKS))

    @property
    def has_all_layers(self) -> bool:
        """True if the pool has the tensors of all layers that have keys and values."""
        return {*self._windows.layers} <= {*self._pool.layer_indices}

    def see_states(self, states: States) -> None:
        """Note how the states of a row look, unless that is known."""
        if not self._state_parts:
            self._state_parts, self._looked_at = parts_of_states(states), -1

    def parts(self) -> dict[Kind, list[Part]]:
        """Return kind -> parts of its rows now."""
        if self._looked_at != self._pool.num_layouts:
            self._parts = parts_of_pool(self._pool) | ({STATES: self._state_parts} if self._state_parts else {})
            self._looked_at = self._pool.num_layouts
        return self._parts

    def is_now(self, kind: Kind, parts: Sequence[Part]) -> bool:
        """Return whether rows made of these parts can be written into the pool."""
        now = self.parts().get(kind)
        return (now is None and kind == STATES) or now == [*parts]

    def contents_of(self, block_id: int, digest: bytes) -> Iterator[tuple[Kind, Any]]:
        """Yield what a cached block has: itself, its window blocks, and the states of the snapshot at its end."""
        yield BLOCKS, block_id
        for group in self._windows.groups:
            if (place := group.places.get(block_id)) is not None:
                yield group.name, place
        if (states := self._states.kept.of_digest(digest)) is not None:
            self.see_states(states)
            yield STATES, states

    def rows_of(self, kind: Kind, contents: Sequence[Any]) -> list[Tensor]:
        """Copy contents of a kind that has parts; return for each part [N, bytes] on its device."""
        self._pool.join_streams()
        if kind == STATES:
            return [rows_of_states(part, contents) for part in self.parts()[kind]]
        return [rows_of_blocks(self._pool, part, contents) for part in self.parts()[kind]]

    def learn(self, file: SavedFile, make_room: Callable[[int], None]) -> None:
        """Make the tensors of layers into which nothing was written yet, as a file shows them."""
        if not self._pool.layer_indices:
            make_room(0)
        lay_out_pool(self._pool, [part for each in file.contents if each.kind != STATES for part in each.parts])

    def parts_here(self, file: SavedFile, first_device: torch.device) -> dict[Kind, tuple[Part, ...] | None]:
        """Return kind -> parts of what a file holds, on this model's devices; snapshots lie on the first device.

        A kind's parts are None if its layers lie on other devices than they did where the file was written.
        """
        parts: dict[Kind, tuple[Part, ...] | None] = {}
        for kind, saved in ((content.kind, content.parts) for content in file.contents):
            here = self.parts().get(kind, [])
            if kind == STATES:
                here = [part._replace(device=first_device) for part in saved]
            anywhere = [part._replace(device=torch.device("cpu")) for part in here]
            parts[kind] = tuple(here) if anywhere == [*saved] else None
        return parts
