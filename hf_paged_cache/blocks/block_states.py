"""Owns the state of each block and the moves between states. Refuses to drop a block that nobody holds.

free (ref_count 0, no hash) | in use (ref_count > 0) | cached (ref_count 0, computed, in the index).
This module does not know who holds what: `PrefixCachingBlockAllocator` does, and it alone calls this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby

from ..errors import BlockStateError, CacheArgumentError
from .evicted_hashes import EvictedHashes
from .eviction import END, NEXT, NUM_LINES, ONCE, Reuse
from .free_queue import FreeBlockQueue
from .hashing import BlockHash
from .prefix_index import PrefixIndex

OnEvict = Callable[[int, BlockHash, bytes], None]
"""Function called with the id, hash and namespace of a cached block that is handed out. It must neither ask anything of
the allocator nor raise."""

_FREE = 0  # number of the queue's line of free blocks
_MARGIN = 0.7  # a block goes before the least recently used one if its density is below this share of that one's
NEVER = 1 << 63  # a time later than any other, and a density above any other
_TOGETHER = 16  # at most about 1/16 of the pool is evicted from one line before the other lines are looked at


class BlockStates:
    """`BlockStates` changes ref counts, the queue of allocatable blocks and the prefix index together.

    The queue holds free blocks in line 0, the last freed first, so that memory once touched is used again. Cached
    blocks come after them, in a line for each kind (see `Reuse`), the least recently used first. Time is a counter: it
    advances by one for each block dropped or touched. The next block to be evicted is the least recently used one of
    all lines, unless the first block of another line is less dense. A line is chosen once for many evictions
    (`_choose`), and blocks change state a run of one kind at a time. Until as many blocks were evicted as there are,
    eviction is LRU.

    Args:
        num_blocks: number of blocks with the null block 0. Ids 1 to num_blocks - 1 are handed out, at first the lowest
            first.
        eviction: "reuse", or "lru", which treats all blocks as one kind.
        on_evict: function called for each cached block that is handed out, just before it loses its hash; None: no
            function.
    """

    def __init__(self, num_blocks: int, eviction: str = "reuse", on_evict: OnEvict | None = None) -> None:
        if num_blocks < 2:
            raise CacheArgumentError(f"num_blocks is {num_blocks}; give at least 2, as block 0 is never handed out")
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.ref_counts = [0] * num_blocks  # block id -> number of holders
        self.index = PrefixIndex(num_blocks)
        self.queue = FreeBlockQueue(num_blocks, range(1, num_blocks), num_lines=NUM_LINES)
        self.kinds = [ONCE] * num_blocks  # block id -> kind; anything for a free block
        self.reuse = Reuse(num_blocks, learns=eviction == "reuse")
        self.evicted = EvictedHashes(num_blocks)
        self.last_access = [0] * num_blocks  # block id -> time of its last drop or touch
        self.clock = 0
        self._line, self._num_chosen, self._latest = END, 0, 0  # line, number and latest time of the next evictions
        self.spared_from = NEVER  # blocks given back after this time are evicted only as the least recently used
        self.num_cached = 0
        self.num_evictions = 0
        self.num_missed = 0  # hashes that came again before as many further blocks were evicted as there are

    def take(self, num_blocks: int, namespace: bytes = b"") -> list[int]:
        """Hand out blocks with ref_count 1 and no hash: first free blocks, then cached ones, which lose their hash.

        Cached blocks of any namespace are taken. The caller has checked that there are so many.
        """
        num_free = self.queue.length - self.num_cached
        taken = self.queue.popleft(_FREE, min(num_blocks, num_free)) if num_free else []
        if len(taken) < num_blocks:
            taken += self._evict(num_blocks - len(taken))
        ref_counts, namespaces, kinds = self.ref_counts, self.index.namespaces, self.kinds
        for block_id in taken:
            ref_counts[block_id] = 1
            namespaces[block_id] = namespace
            kinds[block_id] = ONCE
        return taken

    def _evict(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` cached blocks out of the queue, and remember the hashes that they lose."""
        index, namespaces, kinds, times = self.index, self.index.namespaces, self.kinds, self.last_access
        blocks, digests, evicted = index.blocks, index.digests, self.evicted.newer
        taken: list[int] = []
        while num_missing := num_blocks - len(taken):
            run = self.queue.popleft(self._line, min(num_missing, self._num_chosen), times, self._latest)
            if not run:
                self._choose()
                continue
            self._num_chosen -= len(run)
            taken += run
            if self.on_evict is not None:
                for block_id in run:
                    if (block_hash := index.hash_of(block_id)) is not None:
                        self.on_evict(block_id, block_hash, namespaces[block_id])
            kind, what = 0, (0, 0, 0)
            for block_id in run:
                if (digest := digests[block_id]) is None:
                    raise BlockStateError(f"block {block_id} is cached without a hash")
                digests[block_id] = None
                del blocks[digest]
                if kinds[block_id] != kind:
                    kind = kinds[block_id]
                    what = (kind, times[run[0]], self.num_evictions)
                evicted[digest] = what
            evicted = self.evicted.turn()
        self.num_cached -= num_blocks
        self.num_evictions += num_blocks
        return taken

    def _choose(self) -> None:
        """Choose the line to evict from next, how many blocks of it, and the latest time of their last use.

        A block that a pending copy reads is spared, unless it is the least recently used one.
        """
        times, kinds, clock, reuse = self.last_access, self.kinds, self.clock, self.reuse
        oldest = second = NEVER  # the two earliest times of lines' first blocks
        line = sparsest = of_sparsest = 0
        least: float = NEVER
        of_oldest = 0.0  # density of the block with the time `oldest`
        for each, block_id in enumerate(self.queue.firsts()):
            if block_id < 0 or each == _FREE:
                continue
            time = times[block_id]
            density = reuse.density(kinds[block_id], clock - time) if time <= self.spared_from else NEVER
            if time < oldest:
                oldest, second, line, of_oldest = time, oldest, each, density
            elif time < second:
                second = time
            if density < least:
                least, sparsest, of_sparsest = density, each, time
        self._num_chosen = together = 1 + self.num_blocks // _TOGETHER
        if least < _MARGIN * of_oldest:
            self._line, self._latest = sparsest, min(reuse.latest_of(of_sparsest, clock), self.spared_from)
        else:
            self._line, self._latest = line, max(oldest, min(second + together // 4, self.spared_from))

    def spare_from_now(self) -> None:
        """Spare blocks that are given back from now on until `spared_from` is set back, as they are to be copied."""
        self.spared_from = min(self.spared_from, self.clock)
        self._num_chosen = 0

    def remember(self, block_ids: Sequence[int]) -> None:
        """Restore how often blocks, which follow one another, had been used before their hashes were evicted."""
        evicted, digests = self.evicted, self.index.digests
        if not block_ids or digests[block_ids[0]] not in evicted:
            return
        found = evicted.take([digests[block_id] for block_id in block_ids])
        kinds, start = self.kinds, 0
        before = self.num_evictions - len(block_ids)  # in a larger pool these blocks would not have evicted others
        for (kind, time, num_evictions), same in groupby(found):
            stop = start + len([*same])
            for block_id in block_ids[start:stop]:
                kinds[block_id] = NEXT[kind]
            if before - num_evictions <= self.num_blocks:
                self.num_missed += stop - start
            self.reuse.used_again(kind, self.clock - time, stop - start)
            start = stop

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block; a cached block leaves the queue, and counts as used once more."""
        ref_counts, kinds, kind = self.ref_counts, self.kinds, 0
        idle: list[int] = []
        runs: list[tuple[int, int]] = []  # kind of a run, number of idle blocks before the run
        for block_id in block_ids:
            if count := ref_counts[block_id]:
                ref_counts[block_id] = count + 1
                continue
            ref_counts[block_id] = 1
            if kinds[block_id] != kind:
                kind = kinds[block_id]
                runs.append((kind, len(idle)))
            idle.append(block_id)
        if idle:
            self.queue.remove(idle)
            self._use_again(idle, runs)
            self.num_cached -= len(idle)

    def _use_again(self, block_ids: list[int], runs: list[tuple[int, int]]) -> None:
        kinds, clock, stop = self.kinds, self.clock, len(block_ids)
        for kind, start in reversed(runs):
            self.reuse.used_again(kind, clock - self.last_access[block_ids[start]], stop - start)
            if (after := NEXT[kind]) != kind:
                for block_id in block_ids[start:stop]:
                    kinds[block_id] = after
            stop = start

    def drop(self, block_ids: Iterable[int]) -> None:
        """Take one holder from each block, in the order given.

        A block without a holder is cached if it has a hash and is computed; otherwise it becomes free, without a hash.

        Raises:
            BlockStateError: a block has no holder.
        """
        ref_counts, digests, uncomputed = self.ref_counts, self.index.digests, self.index.uncomputed
        last_access, clock, kinds, kind = self.last_access, self.clock, self.kinds, 0
        free: list[int] = []
        run: list[int] = []  # blocks of the last entry of `cached`
        cached: list[tuple[int, list[int]]] = []  # kind of a run, blocks of the run
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            if count > 0:
                ref_counts[block_id] = count
                continue
            if count < 0:
                raise BlockStateError(f"block {block_id} freed with ref_count 0")
            ref_counts[block_id] = 0
            clock += 1
            last_access[block_id] = clock
            if digests[block_id] is None:
                free.append(block_id)
            elif uncomputed and block_id in uncomputed:
                self.index.remove(block_id)
                free.append(block_id)
            elif kinds[block_id] == kind:
                run.append(block_id)
            else:
                kind = kinds[block_id]
                if kind == ONCE and not cached:
                    kind = kinds[block_id] = END
                run = [block_id]
                cached.append((kind, run))
        self.clock = clock
        if not free and not cached:
            return
        reuse = self.reuse
        for kind, run in cached:
            self.num_cached += len(run)
            self.queue.extend(run, reuse.lines[kind])
            reuse.given_back(kind, len(run))
        self.queue.extendleft(free)
        if cached and clock >= reuse.next_time and self.num_evictions >= self.num_blocks:
            reuse.compute(clock)
            self._num_chosen = 0

    def touch(self, block_ids: Iterable[int]) -> None:
        """Make cached blocks the last to be evicted, in the order given; skip all other blocks."""
        for block_id in block_ids:
            if not self.ref_counts[block_id] and self.index.digests[block_id] is not None:
                self.queue.remove((block_id,))
                self.queue.extend((block_id,), self.reuse.lines[self.kinds[block_id]])
                self.clock = self.last_access[block_id] = self.clock + 1

    def cached_blocks(self, namespace: bytes | None = None) -> list[int]:
        """Return the cached blocks, of one namespace or of all, the least recently used first."""
        cached = chain.from_iterable(map(self.queue.line, range(_FREE + 1, NUM_LINES)))
        namespaces = self.index.namespaces
        found = [block_id for block_id in cached if namespace is None or namespaces[block_id] == namespace]
        return sorted(found, key=self.last_access.__getitem__)

    def forget(self, block_ids: list[int]) -> None:
        """Take the hashes of these blocks away. Those that nobody holds become free, and are handed out next."""
        for block_id in block_ids:
            self.index.remove(block_id)
        idle = [block_id for block_id in block_ids if not self.ref_counts[block_id]]
        self.queue.remove(idle)
        self.queue.extendleft(reversed(idle))
        self.num_cached -= len(idle)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks, which are handed out first, the lowest of them first."""
        added = num_blocks - self.num_blocks
        self.ref_counts.extend([0] * added)
        self.last_access.extend([0] * added)
        self.kinds.extend([ONCE] * added)
        self.index.grow(num_blocks)
        self.queue.grow(num_blocks)
        self.queue.extendleft(reversed(range(self.num_blocks, num_blocks)))
        self.evicted.grow(num_blocks)
        self.reuse = Reuse(num_blocks, self.reuse.learns)  # classes of age depend on the size of the pool
        self._num_chosen = 0
        self.num_blocks = num_blocks  # last: until here, `rebuild` cuts all lists to the old number

    def rebuild(self, holders: Iterable[list[int]]) -> None:
        """Derive the state again from `holders` and from the blocks' digests, kinds and times."""
        counts = Counter(chain.from_iterable(holders))
        self.ref_counts = ref_counts = [counts[block_id] for block_id in range(self.num_blocks)]
        self.index.rebuild(ref_counts)
        del self.last_access[self.num_blocks :], self.kinds[self.num_blocks :]
        digests, times = self.index.digests, self.last_access
        idle = [block_id for block_id in range(1, self.num_blocks) if not ref_counts[block_id]]
        free = [block_id for block_id in idle if digests[block_id] is None]
        cached = [block_id for block_id in idle if digests[block_id] is not None]
        free.sort(key=lambda block_id: -times[block_id])
        cached.sort(key=times.__getitem__)
        self.queue = FreeBlockQueue(self.num_blocks, free, num_lines=NUM_LINES)
        for block_id in cached:
            self.queue.extend((block_id,), self.reuse.lines[self.kinds[block_id]])
        self._num_chosen = 0
        self.num_cached = len(cached)

    def check(self, holders: list[list[int]]) -> None:
        """Raise BlockStateError unless invariants (1) to (4) of `PrefixCachingBlockAllocator.check` hold."""
        for block_ids in holders:
            if len(set(block_ids)) != len(block_ids):
                raise BlockStateError(f"a holder has a block twice: {block_ids}")
            for block_id in block_ids:
                if not 0 < block_id < self.num_blocks:
                    raise BlockStateError(f"block {block_id} is held; blocks are 1 to {self.num_blocks - 1}")
        held = Counter(chain.from_iterable(holders))
        counts = [held[block_id] for block_id in range(self.num_blocks)]
        if counts != self.ref_counts:
            raise BlockStateError(f"ref counts are {self.ref_counts}, by what holders have {counts}")
        self.queue.check()
        queued = list(self.queue)
        in_use = {block_id for block_id, count in enumerate(counts) if count}
        if in_use & set(queued) or len(in_use) + len(queued) != self.num_blocks - 1:
            raise BlockStateError(f"each block must be in use {sorted(in_use)} or queued {queued}")
        num_free = len(queued) - self.num_cached
        hashed = [self.index.digests[block_id] is not None for block_id in queued]
        if hashed != [False] * num_free + [True] * self.num_cached:
            raise BlockStateError(f"the queue must hold {num_free} free, then {self.num_cached} cached: {queued}")
        for line in range(_FREE + 1, NUM_LINES):
            of_line = [*self.queue.line(line)]
            times = [self.last_access[block_id] for block_id in of_line]
            if times != sorted(times):
                raise BlockStateError(f"cached blocks {of_line} are not in the order of their times {times}")
        self.index.check(in_use)
