"""Owns the slots of a ring of blocks, for layers that see the last tokens of a sequence.

Refuses positions beyond the ring's tokens.
"""

from __future__ import annotations

from ...errors import CacheArgumentError
from ..allocator import Allocation, PrefixCachingBlockAllocator
from ..arguments import int_of_at_least


class Ring:
    """`Ring` holds blocks round which the positions of a sequence run: a position takes the slot of one long before.

    None of its blocks is ever hashed, and it keeps its length. The blocks are given back by `free()`, on leaving a
    `with`, or when the ring is collected.

    Args:
        num_tokens: number of positions that run round the ring.
        window: number of last tokens that are kept.
        namespace: see `PrefixCachingBlockAllocator.allocate`.

    Attributes:
        allocation: holder of the ring's blocks, as many as `min(num_tokens, window)` tokens fill.

    Raises:
        OutOfBlocksError: nothing has changed.
        CacheArgumentError: `num_tokens` is no int of 0 or more, or `window` is no int of 1 or more.

    Examples:
        >>> from .. import PrefixCachingBlockAllocator
        >>> ring = Ring(PrefixCachingBlockAllocator(num_blocks=4, block_size=16), num_tokens=40, window=10)
        >>> ring.slots(0, 40) == list(range(16, 32)) * 2 + list(range(16, 24))
        True

    Source: the ring is that of text-generation-inference's `SimpleAllocator`.
    """

    def __init__(
        self, allocator: PrefixCachingBlockAllocator, num_tokens: int, window: int, namespace: bytes = b""
    ) -> None:
        self.num_tokens = int_of_at_least("num_tokens", num_tokens, 0, "positions in all")
        self.window = int_of_at_least("window", window, 1, "tokens that a layer sees")
        self._allocator = allocator
        num_blocks = -(-min(num_tokens, window) // allocator.block_size)
        self.allocation: Allocation = allocator.allocate((), num_blocks, namespace=namespace)

    def fork(self) -> Ring:
        """Return a second ring in the same blocks, which are copied on write."""
        forked = Ring(self._allocator, 0, self.window)
        forked.num_tokens, forked.allocation = self.num_tokens, self._allocator.fork(self.allocation)
        return forked

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slot of each position in `[start, stop)`.

        Any `window` positions in a row have slots of their own, also where the window is no multiple of block_size: a
        ring written in order holds its last `window` tokens. Several tokens written at once overwrite tokens that the
        first of them may still see; read the overwritten tokens before. Of more tokens than the blocks have slots,
        write only the last ones: the others have the same slots.

        Raises:
            CacheArgumentError: not 0 <= start <= stop <= num_tokens.
        """
        size, block_ids = self._allocator.block_size, self.allocation.block_ids
        num_positions = self.num_tokens if block_ids else 0  # a freed ring has no positions
        if not 0 <= start <= stop <= num_positions:
            raise CacheArgumentError(f"no slots for positions [{start}, {stop}); there are {num_positions}")
        at = (divmod(position, size) for position in range(start, stop))
        return [block_ids[index % len(block_ids)] * size + offset for index, offset in at]

    def make_writable(self, position: int) -> None:
        """Copy the block of a position on write, if forks hold it; see `PrefixCachingBlockAllocator.make_writable`."""
        index = position // self._allocator.block_size % len(self.allocation.block_ids)
        self._allocator.make_writable(self.allocation, index)

    def free(self) -> None:
        """Give all blocks back. Raises BlockStateError the second time."""
        self.allocation.free()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *raised: object) -> None:
        self.allocation.__exit__()
