"""Owns which blocks are kept for layers whose attention sees a window.

A group of such layers keeps a block's tokens in a *window block*, a place of the group's own; there may be far fewer of
these than blocks. Blocks from which running sequences resume have one, and others while there is room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..errors import BlockStateError, OutOfBlocksError
from .allocator import Allocation, PrefixCachingBlockAllocator, Resumption
from .groups import Window
from .hashing import BlockHash


class Changing:
    """`Changing` marks groups while a holder of blocks changes: after an exception, they derive everything again."""

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

    free | needed, by a live allocation's `resumption` | idle: its block may still be hit, until it is taken

    What is idle is taken when nothing is free: window blocks that a sequence has *passed* before those at an *end* of a
    sequence, and of either the least recently used first. `places`, the allocations and the allocator's states say what
    is free, needed or idle.

    Args:
        num_blocks: number of window blocks at first, with number 0.

    Attributes:
        places: block id -> number of its window block.
        copies: (source, destination) window blocks, to be copied in this order before the next write.
        most: most window blocks that there can be.
        num_evictions: number of idle window blocks that were taken so far.
        on_evict: function called for each of these with the group's name, the window block's number, and the hash and
            namespace of its block. The content is there until the next write. None: no function.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator, window: Window, num_blocks: int) -> None:
        self.name, self.window = window.name, window
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
        self._version = allocator.version  # the allocator's version when everything was derived last
        self.is_dirty = False  # see `Changing`

    @property
    def num_needed(self) -> int:
        """Number of window blocks that are needed, and so cannot be taken."""
        return len(self.places) - self.num_idle

    @property
    def num_idle(self) -> int:
        """Number of window blocks that nobody needs, and whose blocks may be hit."""
        return len(self._passed) + len(self._ends)

    def num_idle_of(self, namespace: bytes) -> int:
        """Return the number of idle window blocks of one namespace's blocks, after a look at each."""
        of_block = self._allocator.namespace_of
        return sum(of_block(block_id) == namespace for ids in (self._passed, self._ends) for block_id in ids)

    @property
    def num_free(self) -> int:
        """Number of window blocks that hold nothing."""
        return len(self._free)

    def span(self, start: int, stop: int) -> range:
        """Return logical indices of the blocks with tokens `[start, stop)` and with those that token `start` sees."""
        return range(self.window.needed(start).start // self._block_size, -(-stop // self._block_size))

    def seen(self, num_tokens: int) -> range:
        """Return logical indices of the blocks that must be kept to resume after `num_tokens` tokens; see `Group`."""
        return self.span(num_tokens, num_tokens)

    def has(self, block_id: int) -> bool:
        """Return whether a block has a window block."""
        return block_id in self.places

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """Return an upper bound of the tokens after which these layers can resume; see `Group`."""
        size = self._block_size
        return next((index * size for index in reversed(self.seen(num_tokens)) if not has(index)), num_tokens)

    def needed_by(self, allocations: Iterable[Allocation]) -> set[int]:
        """Return ids of the blocks whose window blocks these allocations need."""
        needed: set[int] = set()
        for allocation in allocations:
            if allocation.resumption is not None:
                span = self.span(*allocation.resumption)
                needed.update(allocation.block_ids[span.start : span.stop])
        return needed

    def num_to_take(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have no window block that is needed."""
        return sum(
            block_id not in self.places or block_id in self._passed or block_id in self._ends for block_id in block_ids
        )

    def require(self, num_blocks: int, namespace: bytes = b"") -> None:
        """Raise OutOfBlocksError unless `num_blocks` window blocks can be taken; a namespace is told no numbers."""
        if num_blocks > len(self._free) + self.num_idle:
            self.sweep()
        if num_blocks > len(self._free) + self.num_idle:
            of_all = f"{len(self._free)} free + {self.num_idle} idle of {self.num_blocks - 1}"
            raise OutOfBlocksError(
                f"need {num_blocks} blocks of layers with a window of {self.window.size} tokens: "
                f"{'there are fewer' if namespace else of_all}; "
                "free what is no longer needed or give the pool more blocks"
            )

    def settle(self) -> None:
        """Derive everything again if a change was interrupted, or blocks have gone without their holder's doing."""
        if self.is_dirty or self._version != self._allocator.version:
            self.sweep()
            self.is_dirty = False

    # Changes. Their callers have checked by `require` that there are as many window blocks as they take.

    def attach(self, block_ids: Sequence[int]) -> None:
        """Give each of these blocks a window block, and mark it as needed."""
        self.hold(block_ids)
        for block_id in block_ids:
            if block_id not in self.places:
                self.places[block_id] = self._take()

    def copy(self, source: int, destination: int) -> None:
        """Give a block that was copied on write a window block, which is to begin with what the source's has."""
        self.attach((destination,))
        if source in self.places:
            self.copies.append((self.places[source], self.places[destination]))
            self.release((source,), num_own=0, is_end=True)

    def take_places(self, number: int) -> list[int]:
        """Take window blocks for contents; the caller puts them into `places` once the contents are there."""
        return [self._take() for _ in range(number)]

    def hold(self, block_ids: Iterable[int]) -> None:
        """Mark blocks as needed from now on; blocks without a window block are skipped."""
        for block_id in block_ids:
            self._passed.pop(block_id, None)
            self._ends.pop(block_id, None)

    def release(self, block_ids: Iterable[int], *, num_own: int, is_end: bool) -> None:
        """Note that a holder needs these blocks no more; what nobody needs becomes idle, or free if it cannot be hit.

        Args:
            num_own: 1 if the holder still holds the blocks, else 0.
            is_end: whether the blocks are the end of a sequence, where others are likely to resume.
        """
        released = [block_id for block_id in block_ids if block_id in self.places]
        are_shared = any(self._allocator.ref_count(block_id) > num_own for block_id in released)
        needed = self.needed_by(self._allocator.allocations()) if are_shared else ()
        for block_id in released:
            if block_id not in needed:
                self.hold((block_id,))
                if self._allocator.block_hash_of(block_id) is None:
                    self.drop((block_id,))
                else:
                    (self._ends if is_end else self._passed)[block_id] = None

    def leave(self, block_ids: Sequence[int], resumption: Resumption) -> None:
        """Release all these blocks for a holder that has given them back."""
        span = self.span(*resumption)
        self.release(block_ids[span.start : span.stop], num_own=0, is_end=True)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Free the window blocks of these blocks, as far as they have any."""
        for block_id in block_ids:
            self.hold((block_id,))
            place = self.places.pop(block_id, None)
            if place is not None:
                self._free.append(place)

    def _take(self) -> int:
        """Take a window block: a free one, or else that of the first idle block."""
        if self._free:
            return self._free.pop()
        block_id, _ = (self._passed or self._ends).popitem(last=False)
        self.num_evictions += 1
        place = self.places.pop(block_id)
        if self.on_evict is not None and (block_hash := self._allocator.block_hash_of(block_id)) is not None:
            self.on_evict(self.name, place, block_hash, self._allocator.namespace_of(block_id))
        return place

    # All window blocks.

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
        """Derive what is free, needed and idle from the places, the allocations and the allocator, in O(num_blocks)."""
        allocator = self._allocator
        needed = self.needed_by(allocator.allocations())

        def is_of_use(block_id: int) -> bool:
            if block_id >= allocator.num_blocks:  # after an interrupted reset
                return False
            return block_id in needed or allocator.block_hash_of(block_id) is not None

        self.places = {block_id: place for block_id, place in self.places.items() if is_of_use(block_id)}
        taken = set(self.places.values())
        self._free = [place for place in range(self.num_blocks - 1, 0, -1) if place not in taken]
        idle = dict.fromkeys(block_id for block_id in self.places if block_id not in needed)
        self._ends = ends = OrderedDict.fromkeys(block_id for block_id in self._ends if block_id in idle)
        passed = (block_id for block_id in (*self._passed, *idle) if block_id in idle and block_id not in ends)
        self._passed, self._version = OrderedDict.fromkeys(passed), allocator.version

    def check(self) -> None:
        """Prove the invariants:

        1. each window block but number 0 is free or has one block;
        2. an allocation has all window blocks that it needs to resume;
        3. all other window blocks are idle: none that a window has passed is held.

        Raises:
            BlockStateError: an invariant does not hold; the message has the whole state.
        """
        self.settle()
        allocations, idle = self._allocator.allocations(), {*self._passed, *self._ends}
        needed = self.needed_by(allocations)
        if sorted([*self.places.values(), *self._free]) != list(range(1, self.num_blocks)):
            problem = "each window block must be free or have one block"
        elif missing := needed - self.places.keys():
            problem = f"blocks {sorted(missing)} have no window block, and a sequence resumes from them"
        elif self.num_idle != len(idle) or idle != self.places.keys() - needed:
            problem = f"window blocks must be needed {sorted(needed)} or idle {sorted(idle)}"
        else:
            return
        resumptions = [(allocation.block_ids, allocation.resumption) for allocation in allocations]
        raise BlockStateError(
            f"{problem}\n{self.window}, places: {self.places}\nfree: {self._free}\npassed: {list(self._passed)}, "
            f"ends: {list(self._ends)}\nallocations: {resumptions}"
        )
