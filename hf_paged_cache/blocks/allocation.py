"""Owns the list of blocks that one holder has.

Refuses to copy the list: `PrefixCachingBlockAllocator.fork` shares blocks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, NoReturn, Protocol
from weakref import ReferenceType, ref

from ..errors import CacheArgumentError


class BlockOwner(Protocol):
    """`BlockOwner` says what an allocation needs of the allocator that made it."""

    block_size: int
    collected: deque[ReferenceType[Allocation]]  # keys of allocations that were collected without having been freed

    def holds(self, allocation: Allocation) -> bool: ...

    def free(self, allocation: Allocation) -> None: ...


class Resumption(NamedTuple):
    """`Resumption` says after how many tokens a sequence may resume: after any number from `start` to `stop`."""

    start: int
    stop: int

    @classmethod
    def at(cls, num_tokens: int) -> Resumption:
        """Return the resumption of a sequence that resumes after `num_tokens` tokens."""
        return cls(num_tokens, num_tokens)


class Allocation:
    """`Allocation` lists the blocks of one holder until they are given back.

    `PrefixCachingBlockAllocator.allocate` makes an allocation. The blocks are given back once, by `free()`, on leaving
    a `with`, or at the allocator's next operation after the allocation was collected.

    Attributes:
        block_ids: logical block index -> block id. Read only: the allocator's ref counts are derived from this list.
        num_prefix_blocks: number of leading blocks that were a prefix hit.
        namespace: namespace of all blocks of the allocation; no block is ever held in two namespaces.
        key: key of the allocation in the allocator, valid also after the allocation was collected.
        resumption: numbers of tokens after which the holder may resume, for layers with a window; see `WindowBlocks`.

    Examples:
        >>> from . import PrefixCachingBlockAllocator
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=16)
        >>> with allocator.allocate([], num_mutable_blocks=2) as allocation:
        ...     allocation.slots(0, 3)
        [16, 17, 18]
    """

    __slots__ = ("__weakref__", "allocator", "block_ids", "key", "namespace", "num_prefix_blocks", "resumption")

    def __init__(
        self, allocator: BlockOwner, block_ids: list[int], num_prefix_blocks: int, namespace: bytes = b""
    ) -> None:
        self.allocator = allocator
        # The callback is a C function: the collector may run inside any of our lines, and must run no Python there.
        self.key = ref(self, allocator.collected.append)
        self.block_ids = block_ids
        self.num_prefix_blocks = num_prefix_blocks
        self.namespace = namespace
        self.resumption: Resumption | None = None

    def __repr__(self) -> str:
        return f"Allocation(num_blocks={len(self.block_ids)}, num_prefix_blocks={self.num_prefix_blocks})"

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens in the prefix hit."""
        return self.num_prefix_blocks * self.allocator.block_size

    @property
    def is_freed(self) -> bool:
        """True if the blocks were given back."""
        return not self.allocator.holds(self)

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slot of each position in `[start, stop)`: block id * block_size + offset.

        Raises:
            CacheArgumentError: a position lies in no block.
        """
        size, block_ids = self.allocator.block_size, self.block_ids
        if not 0 <= start <= stop <= len(block_ids) * size:
            raise CacheArgumentError(f"no slots for positions [{start}, {stop}); there are {len(block_ids) * size}")
        first = start // size
        slots: list[int] = []
        for block_id in block_ids[first : -(-stop // size)]:
            slots.extend(range(block_id * size, (block_id + 1) * size))
        return slots[start - first * size : stop - first * size]

    def free(self) -> None:
        """Give all blocks back, the last one first. Raises BlockStateError the second time."""
        self.allocator.free(self)

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.is_freed:
            self.free()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Allocation cannot be copied or pickled; allocator.fork(allocation) holds its blocks again")
