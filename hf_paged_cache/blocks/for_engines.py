"""Serves schedulers and engines that run their own forwards with what this package's cache does not use.

Tables that grow token by token, with lookahead slots and copies on write, are `BlockTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ..errors import BlockStateError, CacheArgumentError
from .allocator import Allocation, PrefixCachingBlockAllocator
from .arguments import int_of_at_least
from .block_table import BlockTable
from .hashing import BlockHash


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
        >>> from . import PrefixCachingBlockAllocator
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
        """Return the slot of each position in `[start, stop)`; CacheArgumentError beyond the ring's positions.

        Any `window` positions in a row have slots of their own. Several tokens written at once overwrite tokens that
        the first of them may still see: read these before. Of more tokens than there are slots, write the last ones.
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


class SwapCopy(NamedTuple):
    """`SwapCopy` names one block whose content is to be copied from one side to the other."""

    source: int
    destination: int
    is_to_host: bool


class BlockSwapper:
    """`BlockSwapper` moves whole tables between two allocators, such as a device's and its host's, block by block.

    A swap gives a table blocks of the other side, and gives its blocks so far back; tokens and hashes stay. Full blocks
    with a hash stay cached on the side that they leave, and are cached on the side that they come to. A block that the
    other side has is found there, and not copied. A block that several of the tables hold, such as a partial block of
    forks, is copied once and held by all of them again. Blocks without tokens stay behind.

    Ids change first, content follows: make the copies that a swap returns, in order, before any block of either side is
    written. Until `drop_copies`, the copies are also in `pending_copies`, for who was interrupted. After a Ctrl-C
    inside a swap, some of its tables may have moved: see `is_on_host`. Not thread-safe: use one lock for both sides.

    Args:
        device, host: two allocators of one block size; for others, CacheArgumentError is raised.

    Examples:
        >>> from . import BlockTable, PrefixCachingBlockAllocator, root_hash
        >>> device, host = (PrefixCachingBlockAllocator(num_blocks=8, block_size=2) for _ in range(2))
        >>> swapper, table = BlockSwapper(device, host), BlockTable(device, root_hash(b"model"))
        >>> table.allocate([1, 2, 3]), len(table.commit_full_blocks(3))
        (0, 1)
        >>> swapper.swap_out(table), device.num_blocks_in_use, table.num_tokens
        ([(1, 1), (2, 2)], 0, 3)
        >>> swapper.drop_copies(2), swapper.swap_in(table)  # the full block is on the device still
        (None, [(2, 2)])
    """

    def __init__(self, device: PrefixCachingBlockAllocator, host: PrefixCachingBlockAllocator) -> None:
        if device is host:
            raise CacheArgumentError("device and host are one allocator; give two")
        if device.block_size != host.block_size:
            raise CacheArgumentError(
                f"block_size is {device.block_size} on the device and {host.block_size} on the host; "
                "a block needs one size"
            )
        self.device = device
        self.host = host
        self._pending: list[SwapCopy] = []

    @property
    def pending_copies(self) -> tuple[SwapCopy, ...]:
        """Copies that swaps have returned and nobody has dropped, in the order in which they must be made."""
        return tuple(self._pending)

    def drop_copies(self, num_copies: int) -> None:
        """Forget the first `num_copies` of `pending_copies`, which were made."""
        del self._pending[:num_copies]

    def is_on_host(self, table: BlockTable) -> bool:
        """Return whether a table's blocks are the host's. Raises BlockStateError if they are on neither side."""
        for side in (self.host, self.device):
            if side.holds(table.allocation):
                return side is self.host
        raise BlockStateError(f"{table!r} was freed, or is of another allocator than these two")

    def swap_out(self, *tables: BlockTable) -> list[tuple[int, int]]:
        """Move tables from the device to the host; return (device's block, host's block) for each copy to be made.

        Raises:
            OutOfBlocksError: the host lacks blocks; nothing has changed.
            BlockStateError: a table is not on the device, or copies on write are pending there: make them first.
            CacheArgumentError: a table is given twice, or is of a model with windows.
        """
        return self._swap(tables, self.device, self.host)

    def swap_in(self, *tables: BlockTable) -> list[tuple[int, int]]:
        """Move tables from the host to the device. Returns and raises as `swap_out` does, with the sides exchanged."""
        return self._swap(tables, self.host, self.device)

    def _swap(
        self,
        tables: Sequence[BlockTable],
        source: PrefixCachingBlockAllocator,
        destination: PrefixCachingBlockAllocator,
    ) -> list[tuple[int, int]]:
        self._check(tables, source)
        held = [table.block_ids[: -(-table.num_tokens // source.block_size)] for table in tables]
        found: dict[int, int] = {}  # block of the source -> block of the destination with the same content
        missing: dict[int, BlockHash | None] = {}  # block of the source -> its hash
        for block_id in dict.fromkeys(chain.from_iterable(held)):
            block_hash, namespace = source.block_hash_of(block_id), source.namespace_of(block_id)
            hit = [] if block_hash is None else destination.match_prefix((block_hash,), namespace)
            if hit:
                found[block_id] = hit[0]
            else:
                missing[block_id] = block_hash
        destination.require(len(missing), found.values(), max((table.namespace for table in tables), default=b""))
        # What the destination has is held first, so that it is not evicted for the rest. An allocation that no table
        # has is given back when it is collected: an interrupt leaves nothing held.
        guards: dict[int, Allocation] = {}
        for block_id, wanted in [*found.items(), *missing.items()]:
            guards[block_id] = destination.allocate_as((wanted,), source.namespace_of(block_id))
        placed = {block_id: guard.block_ids[0] for block_id, guard in guards.items()}
        moves = []
        for table, block_ids in zip(tables, held, strict=True):
            new = destination.allocate_as([placed[block_id] for block_id in block_ids], table.namespace)
            new.num_prefix_blocks = min(table.allocation.num_prefix_blocks, len(block_ids))
            moves.append((table, table.allocation, new))
        copies = [(block_id, placed[block_id]) for block_id in missing]
        # Before any table has moved: a copy too many does no harm, one too few does.
        self._pending.extend([SwapCopy(*pair, destination is self.host) for pair in copies])
        destination.mark_computed(block_id for _, block_id in copies)
        for table, old, new in moves:
            table.move_to(new)
            old.free()
        for guard in guards.values():
            guard.free()
        return copies

    def _check(self, tables: Sequence[BlockTable], source: PrefixCachingBlockAllocator) -> None:
        where = "the device" if source is self.device else "the host"
        for table in tables:
            if table.groups:
                raise CacheArgumentError(f"{table!r} has window blocks beside its blocks, and is not swapped")
            if tables.count(table) > 1:
                raise CacheArgumentError(f"{table!r} is given twice; give each table once")
            if not source.holds(table.allocation):
                raise BlockStateError(
                    f"{table!r} is not on {where}: it was swapped or freed, or is of another allocator"
                )
        if source.pending_copies:
            raise BlockStateError(
                f"{len(source.pending_copies)} copies on write are pending on {where}; make them before blocks leave it"
            )
