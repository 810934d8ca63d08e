"""Owns the slots of a ring of blocks, for layers that see the last tokens of a sequence.

Refuses positions beyond the ring's tokens.
"""

from __future__ import annotations

from ...errors import CacheArgumentError
from ..allocation import Allocation, BlockOwner


class Ring(Allocation):
    """`Ring` holds blocks round which the positions of a sequence run: position p + `num_slots` has the slot of p.

    The blocks have one holder. None of them is ever hashed, and the ring keeps its length: what would hash, add or cut
    blocks raises CacheArgumentError. A ring may be forked as a whole, and copied on write.

    Attributes:
        num_tokens: number of positions that run round the ring.
        window: number of last tokens that are kept.

    Examples:
        >>> from . import EngineAllocator
        >>> allocator = EngineAllocator(num_blocks=4, block_size=16)
        >>> ring = allocator.allocate(num_tokens=40, window=10)
        >>> ring.slots(0, 40) == list(range(16, 32)) * 2 + list(range(16, 24))
        True

    Source: the ring is that of text-generation-inference's `SimpleAllocator`.
    """

    __slots__ = ("num_tokens", "window")

    def __init__(
        self,
        allocator: BlockOwner,
        block_ids: list[int],
        num_tokens: int,
        window: int,
        namespace: bytes = b"",
    ) -> None:
        super().__init__(allocator, block_ids, 0, namespace)
        self.num_tokens = num_tokens
        self.window = window

    def __repr__(self) -> str:
        return f"Ring(num_blocks={len(self.block_ids)}, num_tokens={self.num_tokens}, window={self.window})"

    def of_blocks(self, block_ids: list[int]) -> Ring:
        return Ring(self._allocator, block_ids, self.num_tokens, self.window, self.namespace)

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slot of each position in `[start, stop)`.

        Any `window` positions in a row have slots of their own, also where the window is no multiple of block_size: a
        ring written in order holds its last `window` tokens. Several tokens written at once overwrite tokens that the
        first of them may still see; read the overwritten tokens before. Of more than `num_slots` tokens, write only the
        last `num_slots`: the others have the same slots.

        Raises:
            CacheArgumentError: not 0 <= start <= stop <= num_tokens.
        """
        size, block_ids = self._allocator.block_size, self.block_ids
        num_positions = self.num_tokens if block_ids else 0  # a freed ring has no positions
        if not 0 <= start <= stop <= num_positions:
            raise CacheArgumentError(f"no slots for positions [{start}, {stop}); there are {num_positions}")
        at = (divmod(position, size) for position in range(start, stop))
        return [block_ids[index % len(block_ids)] * size + offset for index, offset in at]


def num_blocks_of_ring(num_tokens: int, window: int, block_size: int) -> int:
    """Return the number of blocks for as many of `num_tokens` tokens as a window shows at once."""
    return -(-min(num_tokens, window) // block_size)
