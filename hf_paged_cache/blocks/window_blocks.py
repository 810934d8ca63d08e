"""Owns which blocks are kept for layers whose attention sees a window.

These are the blocks from which running sequences resume, and others while there is room. A block has one identity, the
allocator's. A group of layers with a window keeps a block's tokens in a *window block*, a place of the group's own;
there may be far fewer of these than blocks. Blocks that a window has passed have no window block, or one that the next
sequence may take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..errors import BlockStateError, OutOfBlocksError
from .allocation import Allocation, Resumption
from .allocator import PrefixCachingBlockAllocator
from .hashing import BlockHash
from .sight import Sight


class Changing:
    """`Changing` marks groups while a holder of blocks changes.

    If the `with` is left by an exception, whoever uses these groups next derives again what they derive.
    """

    __slots__ = ("_groups",)

    def __init__(self, groups: Iterable[WindowBlocks]) -> None:
        self._groups = groups

    def __enter__(self) -> None:
        for group in self._groups:
            group.settle()
            group.is_dirty = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for group in self._groups:
                group.is_dirty = False


class WindowBlocks:
    """`WindowBlocks` hands out the window blocks of all layers with one window.

    The number of a window block is its id in the layers' tensors; number 0 is never handed out. A window block is

    free | needed, by a live allocation's `resumption` | idle: its block may still be hit, and it is taken when none is
    free

    Idle window blocks that a sequence has *passed* are taken before those at an *end* of a sequence; of either, the
    least recently used one is taken first.

    Every operation finishes or changes nothing. What is free, needed or idle follows from `places`, the allocations and
    the allocator's states; after an interrupt it is derived again.

    Args:
        allocator: allocator of the blocks.
        sight: what the layers see.
        num_blocks: number of window blocks at first, with number 0.

    Attributes:
        places: block id -> number of its window block.
        copies: (source, destination) window blocks, to be copied in this order before the next write.
        most: most window blocks that there can be.
        num_evictions: number of idle window blocks that were taken so far.
        on_evict: function called for each of these with the group's name, the window block's number, and the hash and
            namespace of its block. The content is there until the next write. None: no function.

    Examples:
        >>> from .sight import Window
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=2)
        >>> group = WindowBlocks(allocator, Window(3), num_blocks=4)
        >>> group.span(8, 8)
        range(3, 4)
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator, sight: Sight, num_blocks: int) -> None:
        self.name, self.sight = sight.name, sight
        self.num_blocks = num_blocks
        self.most: float = num_blocks
        self.places: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []
        self._allocator = allocator
        self._block_size = allocator.block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()  # ids of blocks that a sequence has passed
        self._ends: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0
        self.on_evict: Callable[[int | str, int, BlockHash, bytes], None] | None = None
        self._num_lapses = 0  # the allocator's number when everything was derived last
        self.is_dirty = False  # see `Changing`

    def __repr__(self) -> str:
        return f"WindowBlocks({self.sight.words}, num_blocks={self.num_blocks}, needed={self.num_needed}, free={len(self._free)})"

    @property
    def num_needed(self) -> int:
        """Number of window blocks that are needed, and so cannot be taken."""
        return len(self.places) - len(self._passed) - len(self._ends)

    @property
    def num_idle(self) -> int:
        """Number of window blocks that nobody needs, and whose blocks may be hit."""
        return len(self._passed) + len(self._ends)

    def num_idle_of(self, namespace: bytes) -> int:
        """Return the number of idle window blocks of one namespace's blocks.  Cost: a look at each."""
        of_block = self._allocator.namespace_of
        return sum(of_block(block_id) == namespace for ids in (self._passed, self._ends) for block_id in ids)

    @property
    def num_free(self) -> int:
        """Number of window blocks that hold nothing."""
        return len(self._free)

    @property
    def num_spare(self) -> float:
        """Number of window blocks that may go to blocks which nobody needs, so that running calls still get theirs."""
        return self.most - 1 - self.num_needed

    def span(self, start: int, stop: int) -> range:
        """Return logical indices of the blocks with tokens `[start, stop)` and with those that token `start` sees."""
        return range(self.sight.needed(start).start // self._block_size, -(-stop // self._block_size))

    def seen(self, num_tokens: int) -> range:
        """Return logical indices of the blocks that must be kept to resume after `num_tokens` tokens; see `Group`."""
        return self.span(num_tokens, num_tokens)

    def has(self, block_id: int) -> bool:
        """Return whether a block has a window block."""
        return block_id in self.places

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """Return an upper bound of the tokens after which these layers can resume; see `Group`.

        Blocks are looked at from the end; no block before one that is not there is looked at.
        """
        size = self._block_size
        return next((index * size for index in reversed(self.seen(num_tokens)) if not has(index)), num_tokens)

    def needed_of(self, resumption: Resumption) -> tuple[range, range]:
        """Return logical indices of the blocks that a resumption needs.

        The first range has the blocks that are seen, the second those that are written or may be resumed from.
        """
        start, first, cut, stop = resumption
        kept = self.span(cut, stop)
        return self.seen(start), range(min(kept.start, first // self._block_size), kept.stop)

    def needed_by(self, allocations: Iterable[Allocation]) -> set[int]:
        """Return ids of the blocks whose window blocks these allocations need."""
        return self._needed_by(allocations) & self.places.keys()

    def _needed_by(self, allocations: Iterable[Allocation]) -> set[int]:
        """Return ids of the blocks that these allocations need here, with or without a window block."""
        needed: set[int] = set()
        for allocation in allocations:
            if allocation.resumption is not None:
                for span in self.needed_of(allocation.resumption):
                    needed.update(allocation.block_ids[span.start : span.stop])
        return needed

    def num_to_take(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have no window block that is needed."""
        return sum(
            block_id not in self.places or block_id in self._passed or block_id in self._ends for block_id in block_ids
        )

    def is_needed_by_others(self, block_id: int, allocation: Allocation) -> bool:
        """Return whether any allocation but `allocation` needs a block here."""
        if self._allocator.ref_count(block_id) < 2:
            return False
        return block_id in self.needed_by(other for other in self._allocator.allocations() if other is not allocation)

    def require(self, num_blocks: int, namespace: bytes = b"") -> None:
        """Raise OutOfBlocksError unless `num_blocks` window blocks can be taken.

        The message tells the numbers, except to a caller with a namespace.
        """
        if num_blocks > len(self._free) + self.num_idle:
            self.sweep()
        if num_blocks > len(self._free) + self.num_idle:
            of_all = f"{len(self._free)} free + {self.num_idle} idle of {self.num_blocks - 1}"
            raise OutOfBlocksError(
                f"need {num_blocks} blocks of layers with {self.sight.words}: "
                f"{'there are fewer' if namespace else of_all}; free what is no longer needed or give the pool more blocks"
            )

    def settle(self) -> None:
        """Derive everything again if a change was interrupted, or blocks have gone without their holder's doing."""
        if self.is_dirty or self._num_lapses != self._allocator.num_lapses:
            self.sweep()
            self.is_dirty = False

    def attach(
        self,
        required: Iterable[int],
        optional: Iterable[int] = (),
        copied: tuple[int, int] | None = None,
        *,
        likely: Iterable[int] = (),
    ) -> None:
        """Give each required block a window block, and mark it needed.

        Args:
            optional: other blocks, which get a window block if one is spare and not at the end of another sequence.
                Half of what is spare is left to who asks before these blocks have been written.
            copied: a block, and the block that takes its place for one holder; the second is required, and begins with
                the content of the first.
            likely: optional blocks that may take all that is spare, also from the end of another sequence.

        Raises:
            OutOfBlocksError: there are not enough window blocks; nothing has changed.
        """
        required = list(required)
        num_copied = 0  # number of copies that leave their source's window block to others
        if copied is not None:
            num_copied = copied[0] in self.needed_by(self._allocator.allocations())
        self.require(self.num_to_take(required) + num_copied)
        self.hold(required)
        if copied is not None:
            self._copy(*copied)
        for block_id in required:
            if block_id not in self.places:
                self.places[block_id] = self._take()
        for block_ids, may_take_ends in ((likely, True), (optional, False)):
            num_spare = self.num_spare if may_take_ends else self.num_spare / 2
            for block_id in block_ids:
                if self.num_to_take((block_id,)):
                    if block_id in self.places:  # window block of what was in the block before
                        self._drop(block_id)
                    if num_spare > 0 and (self._free or self._passed or (may_take_ends and self._ends)):
                        num_spare -= 1
                        self.places[block_id] = self._take()

    def _copy(self, source: int, destination: int) -> None:
        """Copy a block's window block before the next write, after the block was copied on write.

        The window block is moved, not copied, where there is no other.
        """
        self.hold((destination,))
        if destination not in self.places and not self._free and not self.num_idle:
            self.places[destination] = self.places[source]
            del self.places[source]
            return
        place = self.places[destination] if destination in self.places else self._take()
        if source in self.places:  # else the source's window block is the one that was taken
            self.copies.append((self.places[source], place))  # first: a copy too many does no harm, one too few does
        self.places[destination] = place
        self.release((source,), num_own=0, is_end=True)

    def take_places(self, fresh: Iterable[int], number: int) -> list[int]:
        """Take window blocks for contents that are to be loaded.

        The caller puts them into `places` once the contents are there. Until then, whoever derives everything again
        gets the window blocks back. The caller has checked that there are so many.

        Args:
            fresh: blocks that were taken for such contents, too; what these blocks had here before is dropped.
        """
        for block_id in fresh:
            if block_id in self.places:
                self._drop(block_id)
        return [self._take() for _ in range(number)]

    def hold(self, block_ids: Iterable[int]) -> None:
        """Mark blocks as needed from now on; blocks without a window block are skipped."""
        for block_id in block_ids:
            self._passed.pop(block_id, None)
            self._ends.pop(block_id, None)

    def release(self, block_ids: Iterable[int], *, num_own: int, is_end: bool) -> None:
        """Note that a holder needs these blocks no more.

        Blocks that nobody needs become idle; where they cannot be hit, their window blocks become free.

        Args:
            num_own: 1 if the holder still holds the blocks, else 0.
            is_end: True if the blocks are the end of a sequence, where others are likely to resume.
        """
        released = [block_id for block_id in block_ids if block_id in self.places]
        are_shared = any(count > num_own for count in self._allocator.ref_counts(released))
        needed = self.needed_by(self._allocator.allocations()) if are_shared else ()
        for block_id in released:
            if not self._is_of_use(block_id):
                self._drop(block_id)
            elif block_id not in needed:
                self.hold((block_id,))
                (self._ends if is_end else self._passed)[block_id] = None

    def drop_lost(self, block_ids: Iterable[int]) -> None:
        """Drop the window blocks of blocks that were given back, and that nobody holds and nobody can hit."""
        for block_id in block_ids:
            if block_id in self.places and not self._is_of_use(block_id):
                self._drop(block_id)

    def leave(self, block_ids: Sequence[int], resumption: Resumption) -> None:
        """Release all these blocks for a holder that has given them back."""
        for span in self.needed_of(resumption):
            self.release(block_ids[span.start : span.stop], num_own=0, is_end=True)
        self.drop_lost(block_ids)

    def share(self, source: int, destination: int) -> bool:
        """Let `destination`, a block of equal content, share the window block of `source`; return whether it does.

        The two share it until `end_share`.
        """
        if destination in self.places or source not in self.places or self._allocator.ref_count(source) > 1:
            return False
        self.places[destination] = self.places[source]
        return True

    def end_share(self, source: int, destination: int, *, replaced: bool) -> None:
        """Leave the window block to `destination` if it has `replaced` `source`, else to `source`."""
        if replaced:
            self.hold((source,))
        del self.places[source if replaced else destination]

    def grow(self, num_blocks: int) -> None:
        """Raise the number of window blocks; the lowest new one is handed out first."""
        with Changing((self,)):
            added = range(num_blocks - 1, self.num_blocks - 1, -1)
            self.num_blocks = num_blocks
            self._free.extend(added)

    def reset(self, num_blocks: int) -> None:
        """Forget everything and begin with `num_blocks` window blocks; no block may be in use."""
        self.is_dirty = True
        self.num_blocks = num_blocks
        self.places, self._free = {}, list(range(num_blocks - 1, 0, -1))
        self._passed, self._ends = OrderedDict(), OrderedDict()
        self.copies.clear()
        self.is_dirty = False

    def sweep(self) -> None:
        """Derive what is free, needed and idle from the places, the allocations and the allocator.

        Cost: O(num_blocks).
        """
        allocator, kept, taken = self._allocator, {}, {}
        for block_id, place in self.places.items():  # a block that shares a place comes after the place's first block
            is_block = block_id < allocator.num_blocks  # blocks may be missing after an interrupted reset
            if place not in taken and is_block and self._is_of_use(block_id):
                kept[block_id] = place
                taken[place] = block_id
        self.places = kept
        self._free = [place for place in range(self.num_blocks - 1, 0, -1) if place not in taken]
        needed = self._needed_by(allocator.allocations())
        idle = dict.fromkeys(block_id for block_id in kept if block_id not in needed)
        self._ends = ends = OrderedDict.fromkeys(block_id for block_id in self._ends if block_id in idle)
        passed = (block_id for block_id in (*self._passed, *idle) if block_id in idle and block_id not in ends)
        self._passed, self._num_lapses = OrderedDict.fromkeys(passed), allocator.num_lapses
        missing = needed - kept.keys()
        for source, destination in allocator.pending_copies:  # interrupted between a copy on write and its window block
            if destination in missing and source in kept:
                self._copy(source, destination)

    def check(self) -> None:
        """Prove the invariants:

        1. each window block but number 0 is free or has one block;
        2. the needed window blocks are those that live allocations need, and no others: none that a window has passed
           is held;
        3. an allocation has all that it needs to resume.

        Raises:
            BlockStateError: an invariant does not hold; the message has the whole state.
        """
        self.settle()
        problem = self._problem()
        if problem:
            resumptions = [
                (allocation.block_ids, allocation.resumption) for allocation in self._allocator.allocations()
            ]
            raise BlockStateError(
                f"{problem}\n{self.sight.words}, places: {self.places}\nfree: {self._free}\npassed: {list(self._passed)}, "
                f"ends: {list(self._ends)}\nallocations: {resumptions}"
            )

    def _problem(self) -> str | None:
        used = list(self.places.values())
        if sorted([*used, *self._free]) != list(range(1, self.num_blocks)):
            return "each window block must be free or have one block"
        idle = {*self._passed, *self._ends}
        needed = self.needed_by(self._allocator.allocations())
        if len(idle) != len(self._passed) + len(self._ends) or idle | needed != set(self.places) or idle & needed:
            return f"window blocks must be needed {sorted(needed)} or idle {sorted(idle)}"
        for allocation in self._allocator.allocations():
            if allocation.resumption is not None:
                start, _, cut, stop = allocation.resumption
                for span in (self.seen(start), self.span(cut, stop)):
                    missing = [i for i in allocation.block_ids[span.start : span.stop] if i not in self.places]
                    if missing:
                        return f"blocks {missing} of {allocation!r} have no window block, and it resumes from {start}"
        return None

    def _is_of_use(self, block_id: int) -> bool:
        """Return whether somebody holds a block or can hit it."""
        return self._allocator.ref_count(block_id) > 0 or self._allocator.block_hash_of(block_id) is not None

    def _take(self) -> int:
        """Take a window block: a free one, or else that of the first idle block."""
        if self._free:
            return self._free.pop()
        victims = self._passed or self._ends
        block_id, _ = victims.popitem(last=False)
        self.num_evictions += 1
        place = self.places.pop(block_id)
        if self.on_evict is not None and (block_hash := self._allocator.block_hash_of(block_id)) is not None:
            self.on_evict(self.name, place, block_hash, self._allocator.namespace_of(block_id))
        return place

    def _drop(self, block_id: int) -> None:
        """Take a block's window block away, and make it free."""
        self.hold((block_id,))
        place = self.places.pop(block_id, None)
        if place is not None:
            self._free.append(place)
