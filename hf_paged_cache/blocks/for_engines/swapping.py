"""Moves tables between two allocators, such as a device's and its host's, and says which blocks are to be copied.

Refuses, before anything changes, tables that are not where they are to be taken from, or that do not fit. Copies
nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from ...errors import BlockStateError, CacheArgumentError
from ..allocator import PrefixCachingBlockAllocator
from ..block_table import BlockTable
from ..hashing import BlockHash


class AllocStatus(Enum):
    """`AllocStatus` says whether tables can be swapped; its value completes "they fit ..."."""

    OK = "now"
    LATER = "once others have given blocks back"
    NEVER = "into no pool of this size"


class SwapCopy(NamedTuple):
    """`SwapCopy` names one block whose content is to be copied from one side to the other."""

    source: int
    destination: int
    is_to_host: bool


# Block of the source, in the order of the tables -> what is wanted in its place: a block with the same content, or a
# fresh block with a hash or without.
_Plan: TypeAlias = dict[int, int | BlockHash | None]


class BlockSwapper:
    """`BlockSwapper` moves whole tables out to the host and back in, block by block, and keeps their tokens and hashes.

    A swap gives a table blocks of the other side, and gives its blocks so far back. Full blocks with a hash stay cached
    on the side that they leave, and are cached on the side that they come to. A block that the other side has is found
    there, and not copied. A block that several of the tables hold, such as a partial block of forks, is copied once and
    held by all of them again. Blocks without tokens stay behind.

    Ids change first, content follows: make the copies that a swap returns, in order, before any block of either side is
    written. Until `drop_copies`, the copies are also in `pending_copies`, for who was interrupted. After a Ctrl-C
    inside a swap, some of its tables may have moved: see `is_on_host`. Not thread-safe: use one lock for both sides.

    Args:
        device, host: two allocators of one block size.

    Raises:
        CacheArgumentError: the two are one allocator, or have different block sizes.

    Examples:
        >>> from .. import BlockTable, PrefixCachingBlockAllocator, root_hash
        >>> device, host = (PrefixCachingBlockAllocator(num_blocks=8, block_size=2) for _ in range(2))
        >>> swapper, table = BlockSwapper(device, host), BlockTable(device, root_hash(b"model"))
        >>> table.allocate([1, 2, 3]), len(table.commit_full_blocks(3)), swapper.num_full_blocks_touched(table)
        (0, 1, 1)
        >>> swapper.swap_out(table), device.num_blocks_in_use, table.num_tokens
        ([(1, 1), (2, 2)], 0, 3)
        >>> swapper.drop_copies(2), swapper.swap_in(table)  # the full block is on the device still
        (None, [(2, 2)])

    Source: the swapping of vLLM's first block manager (`get_num_full_blocks_touched`, `can_swap_in`, `AllocStatus`).
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

    def can_swap_out(self, *tables: BlockTable) -> AllocStatus:
        """Return whether `swap_out` of these tables would find its blocks. Raises as it, but not for lack of blocks."""
        return self._status(tables, self.device, self.host)

    def can_swap_in(self, *tables: BlockTable) -> AllocStatus:
        """Return whether `swap_in` of these tables would find its blocks; see `can_swap_out`."""
        return self._status(tables, self.host, self.device)

    def num_full_blocks_touched(self, *tables: BlockTable) -> int:
        """Return how many full blocks a swap of these tables, all on one side, copies: the other side lacks them."""
        if not tables:
            return 0
        sides = (self.host, self.device) if self.is_on_host(tables[0]) else (self.device, self.host)
        plan, size = self._plan(tables, *sides), self.device.block_size
        full = {block_id for table in tables for block_id in table.block_ids[: table.num_tokens // size]}
        return sum(not isinstance(plan[block_id], int) for block_id in full)

    def _swap(
        self,
        tables: Sequence[BlockTable],
        source: PrefixCachingBlockAllocator,
        destination: PrefixCachingBlockAllocator,
    ) -> list[tuple[int, int]]:
        plan = self._plan(tables, source, destination)
        hits = [each for each in plan.values() if isinstance(each, int)]
        destination.require(len(plan) - len(hits), hits, max((table.namespace for table in tables), default=b""))
        # First hold all blocks that the destination has, so that none is evicted for the first table. An allocation
        # that no table has is given back when it is collected: an interrupt leaves nothing held.
        guards = []
        for namespace in {table.namespace for table in tables}:
            held = [i for table in tables if table.namespace == namespace for i in self._blocks_with_tokens(table)]
            found = dict.fromkeys(plan[block_id] for block_id in held)
            guards.append(destination.allocate_as([each for each in found if isinstance(each, int)], namespace))
        placed: dict[int, int] = {}  # block of the source -> block in its place
        moves = []
        for table in tables:
            held = self._blocks_with_tokens(table)
            new = destination.allocate_as([placed.get(each, plan[each]) for each in held], table.namespace)
            new.num_prefix_blocks = min(table.allocation.num_prefix_blocks, len(held))
            placed.update(zip(held, new.block_ids, strict=True))
            moves.append((table, table.allocation, new))
        copies = [(block_id, placed[block_id]) for block_id, each in plan.items() if not isinstance(each, int)]
        # Before any table has moved: a copy too many does no harm, one too few does.
        self._pending.extend([SwapCopy(*pair, destination is self.host) for pair in copies])
        destination.mark_computed(block_id for _, block_id in copies)
        for table, old, new in moves:
            table.move_to(new)
            old.free()
        for guard in guards:
            guard.free()
        return copies

    def _plan(
        self,
        tables: Sequence[BlockTable],
        source: PrefixCachingBlockAllocator,
        destination: PrefixCachingBlockAllocator,
    ) -> _Plan:
        """Return what a swap would take.  Effects: none."""
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
        plan: _Plan = {}
        for table in tables:
            for block_id in self._blocks_with_tokens(table):
                plan[block_id] = block_hash = source.block_hash_of(block_id)
                if block_hash is not None and (found := destination.match_prefix((block_hash,), table.namespace)):
                    plan[block_id] = found[0]
        return plan

    def _blocks_with_tokens(self, table: BlockTable) -> list[int]:
        return table.block_ids[: -(-table.num_tokens // self.device.block_size)]

    def _status(
        self,
        tables: Sequence[BlockTable],
        source: PrefixCachingBlockAllocator,
        destination: PrefixCachingBlockAllocator,
    ) -> AllocStatus:
        plan = self._plan(tables, source, destination)
        num_held = sum(isinstance(each, int) and destination.ref_count(each) > 0 for each in plan.values())
        if len(plan) - num_held <= destination.num_available_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER if len(plan) < destination.num_blocks else AllocStatus.NEVER
