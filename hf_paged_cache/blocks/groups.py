"""Owns what blocks keep for layers that need more than keys and values of all tokens, and finds where all can resume.

A group is the layers that need the same of a sequence to resume it. Those with one window keep a block's tokens in a
*window block*, a place of the group's own; there may be far fewer of these than blocks. Those that carry a state keep a
*snapshot* at a block's end. Layers that see every token are in no group: a cached block is all that they need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from ..errors import BlockStateError, OutOfBlocksError
from .allocator import Allocation, PrefixCachingBlockAllocator, Resumption
from .hashing import BlockHash

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class Window:
    """`Window` lets a query see itself and the `size - 1` tokens before it.

    Examples:
        >>> Window(8).handed_from(20), Window(8).needed(20)
        (13, range(13, 20))
    """

    size: int

    @property
    def most_needed(self) -> int:
        """Most tokens that `needed` returns: the last token is always kept."""
        return max(1, self.size - 1)

    def needed(self, num_tokens: int) -> range:
        """Return the positions of the tokens that must be kept to resume after `num_tokens` tokens."""
        return range(max(0, num_tokens - self.most_needed), num_tokens)

    def handed_from(self, start: int) -> int:
        """Return the first column that attention is handed in a forward from column `start` on."""
        return max(0, start - self.size + 1)


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
    """`WindowBlocks` is the group of all layers with one window, and hands out their window blocks.

    The number of a window block is its id in the layers' tensors; number 0 is never handed out. A window block is

    free | needed, by a live allocation's `resumption` | idle: its block may still be hit, until it is taken

    What is idle is taken when nothing is free: window blocks that a sequence has *passed* before those at an *end* of a
    sequence, and of either the least recently used first.

    Args:
        num_blocks: number of window blocks at first, with number 0.

    Attributes:
        name: name of the group, in the pool and in files.
        places: block id -> number of its window block.
        copies: (source, destination) window blocks, to be copied in this order before the next write.
        most: most window blocks that there can be.
        num_evictions: number of idle window blocks that were taken so far.
        on_evict: function called for each of these with the group's name, the window block's number, and the hash and
            namespace of its block. The content is there until the next write. None: no function.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator, window: Window, num_blocks: int) -> None:
        self.name, self.window = window.size, window
        self.most: float = num_blocks
        self.copies: list[tuple[int, int]] = []
        self._allocator = allocator
        self._block_size = allocator.block_size
        self.is_dirty = True  # see `Changing`
        self.num_evictions = 0
        self.on_evict: Callable[[int | str, int, BlockHash, bytes], None] | None = None
        self.reset(num_blocks)

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
        """Return logical indices of the blocks that must be kept to resume after `num_tokens` tokens."""
        return self.span(num_tokens, num_tokens)

    def has(self, block_id: int) -> bool:
        """Return whether a block has a window block."""
        return block_id in self.places

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """Return an upper bound of the tokens after which these layers can resume, exact if it is `num_tokens`.

        `has` says whether what they need of the block with a logical index is kept.
        """
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

        `num_own` is 1 if the holder still holds the blocks, else 0; at an end, others are likely to resume.
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
        """Raise the number of window blocks."""
        self.num_blocks, self.is_dirty = num_blocks, True
        self.settle()

    def reset(self, num_blocks: int) -> None:
        """Forget everything and begin with `num_blocks` window blocks; no block may be in use."""
        self.is_dirty = True
        self.num_blocks = num_blocks
        self.places: dict[int, int] = {}
        self._passed: OrderedDict[int, None] = OrderedDict()  # ids of blocks that a sequence has passed
        self._ends: OrderedDict[int, None] = OrderedDict()
        self.copies.clear()
        self.settle()

    def sweep(self) -> None:
        """Derive what is free, needed and idle from the places, the allocations and the allocator, in O(num_blocks)."""
        allocator = self._allocator
        needed = self.needed_by(allocator.allocations())
        there = range(allocator.num_blocks)  # after an interrupted reset, fewer than before
        of_use = {i for i in self.places if i in needed or (i in there and allocator.digest_of(i) is not None)}
        self.places = {block_id: place for block_id, place in self.places.items() if block_id in of_use}
        taken = set(self.places.values())
        self._free = [place for place in range(self.num_blocks - 1, 0, -1) if place not in taken]
        idle = dict.fromkeys(block_id for block_id in self.places if block_id not in needed)
        self._ends = ends = OrderedDict.fromkeys(block_id for block_id in self._ends if block_id in idle)
        passed = (block_id for block_id in (*self._passed, *idle) if block_id in idle and block_id not in ends)
        self._passed, self._version = OrderedDict.fromkeys(passed), allocator.version

    def check(self) -> None:
        """Raise BlockStateError, with the whole state, unless each window block but number 0 is free, needed or idle,
        and has one block in the latter cases, and allocations have all that they need to resume.
        """
        self.settle()
        needed = self.needed_by(self._allocator.allocations())
        if missing := needed - self.places.keys():
            problem = f"blocks {sorted(missing)} have no window block, and a sequence resumes from them"
        elif sorted([*self.places.values(), *self._free]) != list(range(1, self.num_blocks)):
            problem = "each window block must be free or have one block"
        elif sorted([*self._passed, *self._ends]) != sorted(self.places.keys() - needed):
            problem = f"blocks {sorted(needed)} need their window blocks, and all others are idle"
        else:
            return
        raise BlockStateError(f"{problem}\n{vars(self)}")


class Snapshots(Generic[Content]):
    """`Snapshots` is the `Group` of layers with a state: it maps the digest of a block to its snapshot.

    If there are too many, the least recently used one goes. `settle` drops snapshots whose blocks have gone.

    Attributes:
        most: most snapshots that there can be.
        pinned: digests of blocks whose snapshots give way to no others.
        on_evict: function called with the block's digest and the content of each snapshot that gives way; None: none.
    """

    name = "states"

    def __init__(self, allocator: PrefixCachingBlockAllocator, most: int = 0) -> None:
        self.most = most
        self.pinned: frozenset[bytes] = frozenset()
        self.on_evict: Callable[[bytes, Content], None] | None = None
        self._allocator = allocator
        self._contents: OrderedDict[bytes, Content] = OrderedDict()  # digest -> snapshot, the least recently used first
        self._seen = (0, 0)  # the allocator's evictions and version when all snapshots were looked at last

    def __len__(self) -> int:
        """Return the number of snapshots."""
        self.settle()
        return len(self._contents)

    @property
    def num_free(self) -> int:
        """Number of snapshots that can be kept beside those that there are."""
        return self.most - len(self)

    def num_of(self, namespace: bytes) -> int:
        """Return the number of snapshots of one namespace's blocks, after a look at each."""
        blocks = map(self._allocator.hash_of_digest, self._contents)
        return sum(block is not None and block[1] == namespace for block in blocks)

    def keep(self, block_id: int, content: Content) -> None:
        """Keep a snapshot at the end of a block that can be hit and has none, if there is room beside pinned ones."""
        digest = self._allocator.digest_of(block_id)
        self.settle()
        if digest is not None and digest not in self._contents and len(self.pinned & self._contents.keys()) < self.most:
            self._shrink(self.most - 1)
            self._contents[digest] = content

    def seen(self, num_tokens: int) -> range:
        """Return the logical index of the last full block, as a range."""
        num_blocks = num_tokens // self._allocator.block_size
        return range(max(0, num_blocks - 1), num_blocks)

    def has(self, block_id: int) -> bool:
        """Return whether a block has a snapshot."""
        return self._allocator.digest_of(block_id) in self._contents

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """Return the tokens up to the end of the last block with a snapshot, or 0; `has` is asked by logical index."""
        size = self._allocator.block_size
        return next((index * size for index in range(num_tokens // size, 0, -1) if has(index - 1)), 0)

    def use(self, block_id: int) -> Content:
        """Return the snapshot of a block, which has one, and make it the most recently used."""
        digest = self._allocator.digest_of(block_id) or b""
        self._contents.move_to_end(digest)
        return self._contents[digest]

    def of_digest(self, digest: bytes) -> Content | None:
        """Return the snapshot at the end of the block with this digest, or None. This does not count as a use."""
        return self._contents.get(digest)

    def limit(self, most: int) -> None:
        """Allow `most` snapshots from now on; the least recently used ones beyond that number go, pinned ones last."""
        self.most = most
        self._shrink(most)

    def _shrink(self, most: int) -> None:
        while len(self._contents) > most:
            oldest = next(iter(self._contents))
            digest = next((each for each in self._contents if each not in self.pinned), oldest)
            content = self._contents.pop(digest)
            if self.on_evict is not None:
                self.on_evict(digest, content)

    def settle(self) -> None:
        """Forget snapshots whose blocks have gone."""
        now = (self._allocator.num_evictions, self._allocator.version)
        if self._seen != now:
            for digest in [each for each in self._contents if self._allocator.hash_of_digest(each) is None]:
                del self._contents[digest]
            self._seen = now

    def reset(self) -> None:
        """Forget all snapshots."""
        self._contents.clear()

    def check(self) -> None:
        """Raise BlockStateError unless each snapshot's block can be hit, and there are at most `most` snapshots."""
        num_kept, gone = len(self), [each for each in self._contents if self._allocator.hash_of_digest(each) is None]
        if gone or num_kept > max(0, self.most):
            raise BlockStateError(f"{len(gone)} of {num_kept} snapshots of at most {self.most} have no block: {gone}")


Group: TypeAlias = "WindowBlocks | Snapshots[Any]"  # both say what they have `seen`, `has` and where it is `resumable`


def resumable(groups: Iterable[Group], block_ids: Sequence[int], num_tokens: int) -> int:
    """Return the most tokens, of the first `num_tokens` in these blocks, after which every group can resume.

    There may be fewer blocks than `num_tokens` tokens need.

    Examples:
        >>> from . import PrefixCachingBlockAllocator, WindowBlocks
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=2)
        >>> group = WindowBlocks(allocator, Window(3), num_blocks=4)
        >>> group.places.update({1: 3, 2: 1})  # block -> window block
        >>> resumable([group], [1, 2, 5], 6)
        4
    """
    held = len(block_ids)
    return resumable_where(groups, num_tokens, lambda group, index: index < held and group.has(block_ids[index]))


def resumable_where(groups: Iterable[Group], num_tokens: int, has: Callable[[Group, int], bool]) -> int:
    """Do what `resumable` does; `has` says whether a group has what it needs of the block with a logical index."""
    most = None
    while most != num_tokens:
        most = num_tokens
        for group in groups:
            num_tokens = group.resumable(num_tokens, partial(has, group))
    return num_tokens
