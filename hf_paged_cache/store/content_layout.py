"""What the contents of a store's blocks look like now: of each kind, what a row of bytes is made of, and its part of a budget.

Read off the pool, and anew when its layers have other tensors. The store's lock is held.
"""

from collections.abc import Mapping, Sequence

from ..kv.block_pool import BlockPool
from ..kv.contents import Part, parts_of_pool, parts_of_states
from ..kv.states import States
from ..tiers.base import BLOCKS, STATES, Kind, Tier
from ..tiers.host import HostTier, shares_of
from .state_snapshots import StateSnapshots
from .window_groups import WindowGroups


class ContentLayout:
    """The parts of each kind of content.

    Args:
        tiers: told where that has changed.
    """

    def __init__(self, pool: BlockPool, windows: WindowGroups, states: StateSnapshots, tiers: Sequence[Tier]) -> None:
        self._pool = pool
        self._windows = windows
        self._states = states
        self._tiers = tiers
        self.forget()

    def forget(self) -> None:
        """Look anew."""
        self._looked_at = -1  # the pool's layout
        self._parts: dict[Kind, list[Part]] = {}
        self._state_parts: list[Part] = []

    @property
    def kinds(self) -> list[Kind]:
        """Those that blocks of this store may have, blocks themselves first."""
        return [BLOCKS, *(group.window for group in self._windows.groups), STATES]

    @property
    def has_tensors(self) -> bool:
        """Whether any layer holds all tokens; if none does, blocks hold nothing but windows and snapshots."""
        return bool(self.parts().get(BLOCKS))

    def see_states(self, states: States) -> None:
        """The states of a row, the first that anybody keeps."""
        if not self._state_parts:
            self._state_parts, self._looked_at = parts_of_states(states), -1

    def parts(self) -> dict[Kind, list[Part]]:
        """Of each kind, what a row is made of now."""
        pool = self._pool
        if self._looked_at != pool.num_layouts:
            parts: dict[Kind, list[Part]] = {}
            for part in parts_of_pool(pool):
                parts.setdefault(BLOCKS if part.window is None else part.window, []).append(part)
            if self._state_parts:
                parts[STATES] = self._state_parts
            for tier in self._tiers:
                if isinstance(tier, HostTier):
                    tier.lay_out(parts, self._shares(parts))
            self._looked_at, self._parts = pool.num_layouts, parts
        return self._parts

    def is_now(self, kind: Kind, parts: Sequence[Part]) -> bool:
        """Whether rows made of these parts can be written into the pool."""
        now = self.parts().get(kind)
        return (now is None and kind == STATES) or now == [*parts]

    def _shares(self, parts: Mapping[Kind, Sequence[Part]]) -> dict[Kind, float]:
        """The budget is divided as the pool's: window blocks beside blocks, and as many bytes for snapshots."""
        num_bytes = {kind: sum(part.num_bytes for part in made) for kind, made in parts.items()}
        weights: dict[Kind, float] = {kind: 1.0 if kind == BLOCKS else self._windows.share for kind in parts}
        if self._states:
            of_blocks = sum(num_bytes[kind] * weights[kind] for kind in parts if kind != STATES)
            num_bytes[STATES] = num_bytes.get(STATES, 1)
            weights[STATES] = of_blocks / num_bytes[STATES] if of_blocks else 1.0
        return shares_of(num_bytes, weights)
