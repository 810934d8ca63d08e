"""Owns which window blocks one sequence needs, beside its tokens and blocks. Refuses to hit a prefix that a window cannot go on from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from ..errors import OutOfBlocksError
from .allocation import Resumption
from .allocator import PrefixCachingBlockAllocator
from .arguments import check_not_negative
from .block_table import BlockTable
from .hashing import BlockHash, HashChain, token_array
from .window_blocks import WindowBlocks

_Taken = TypeVar("_Taken")


class WindowedTable(BlockTable):
    """A `BlockTable` of a model some of whose layers see a window.

    Blocks, in tokens, of a group of layers with the window W:
        [0, n - W + 1) passed: may have window blocks, as long as nobody else takes them | [n - W + 1, n) needed
    where n is where the sequence goes on; see `Resumption`.

    Args:
        groups: of all windows, one each.

    Examples:
        >>> from . import PrefixCachingBlockAllocator, root_hash
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=16, block_size=2)
        >>> group = WindowBlocks(allocator, window=3, num_blocks=4)
        >>> table = WindowedTable(allocator, root_hash(b"model"), groups=[group])
        >>> table.append_tokens(range(12)), table.let_pass(), len(table.block_ids), group.num_needed
        (None, None, 6, 1)
    """

    __slots__ = ("_end", "_groups", "_num_hit", "_num_matched")

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        root: bytes,
        extra_keys: Callable[[int], bytes] | None = None,
        *,
        namespace: bytes = b"",
        groups: Sequence[WindowBlocks],
    ) -> None:
        super().__init__(allocator, root, extra_keys, namespace=namespace)
        self._groups = groups
        self._end = 0  # tokens when the last forward of several had returned
        self._num_hit = 0
        self._num_matched = 0  # more, where blocks were known that a window could not go on from

    @property
    def _resumption(self) -> Resumption:
        return self._allocation.resumption or Resumption.at(0)

    def allocate(self, token_ids: Iterable[int], num_lookahead_slots: int = 0) -> int:
        check_not_negative("num_lookahead_slots", num_lookahead_slots)
        tokens = token_array(token_ids)
        num_hit = self.hold_prefix(tokens)
        try:
            self.append_tokens(tokens[num_hit:], num_lookahead_slots)
        except OutOfBlocksError:
            self.truncate(0)
            raise
        return num_hit

    def hold_prefix(self, token_ids: Iterable[int]) -> int:
        """Fill an empty table with the longest prefix hit of `token_ids` that every window can go on from."""
        self._begin()
        num_hit = super().hold_prefix(token_ids)
        self._go_on(Resumption.at(num_hit))
        self._num_hit = num_hit
        self._done()
        return num_hit

    def _hashes_to_hit(self, chain: HashChain) -> Iterator[BlockHash]:
        matched = self._allocator.match_prefix(chain.hashes(), self.namespace)
        self._num_matched = len(matched) * self._block_size
        return islice(chain.hashes(), self.num_resumable_of(matched, self._num_matched) // self._block_size)

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the last hit would have had without windows."""
        return self._num_matched

    def num_resumable_tokens(self, num_tokens: int) -> int:
        return self.num_resumable_of(self.block_ids, num_tokens)

    def num_resumable_of(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """The most tokens, up to `num_tokens`, before which each window has all blocks that it sees.

        From the end: a block that a window lacks is looked at once for each group, and what follows it no more.
        """
        is_settled = False
        while not is_settled:
            is_settled = True
            for group in self._groups:
                span = group.span(num_tokens, num_tokens)
                for index in reversed(span):
                    if block_ids[index] not in group.places:
                        num_tokens, is_settled = index * self._block_size, False
                        break
        return num_tokens

    def hold_window(self, num_tokens: int) -> None:
        self._begin()
        self._go_on(Resumption(num_tokens, *(max(number, num_tokens) for number in self._resumption[1:])))
        self._done()

    def append_tokens(
        self, token_ids: Sequence[int] | array[int], num_lookahead_slots: int = 0, *, cut: int | None = None
    ) -> None:
        check_not_negative("num_lookahead_slots", num_lookahead_slots)
        tokens = token_array(token_ids)
        before, start = self._resumption, self.num_tokens
        stop, num_slots = start + len(tokens), len(tokens) + num_lookahead_slots
        cut = stop if cut is None else max(start, min(cut, stop))
        forward = Resumption(min(before.start, start), min(before.first, start), cut, stop)
        self._begin()
        self._take(forward, num_slots, partial(super().ensure_num_empty_slots, num_slots))
        self._chain.token_ids.extend(tokens)
        self._done()

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        self.append_tokens((), num_empty_slots)

    def append_token(self, token_id: int) -> int:
        start = self.num_tokens
        self._begin()
        slot = self._take(Resumption(start, start, start, start + 1), 1, partial(super().append_token, token_id))
        self._done()
        return slot

    def _take(self, forward: Resumption, num_slots: int, take: Callable[[], _Taken]) -> _Taken:
        """Have the window blocks that a forward needs, where `take` appends the blocks of so many slots.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        before, start, block_ids = self._resumption, self.num_tokens, self.block_ids
        index, offset = divmod(start, self._block_size)
        source = None  # the block that is copied on write
        if offset and num_slots and not self._allocator.is_writable(block_ids[index]):
            source = block_ids[index]
        first, end = index + (source is not None), -(-forward.stop // self._block_size)
        self._go_on(forward._replace(stop=start))
        needed_from = [max(first, group.span(forward.cut, forward.stop).start) for group in self._groups]
        try:
            for group, needed in zip(self._groups, needed_from, strict=True):
                held = block_ids[needed:end]
                num_taken = group.num_to_take(held) + max(0, end - needed - len(held))
                is_shared = source is not None and group.is_needed_by_others(source, self._allocation)
                group.require(num_taken + is_shared, self.namespace)
            taken = take()
        except OutOfBlocksError:
            self._go_on(before)
            self._done()
            raise
        copied = None if source is None else (source, block_ids[index])
        for group, needed in zip(self._groups, needed_from, strict=True):
            parting = group.span(self._num_matched, self._num_matched)
            likely = block_ids[max(first, parting.start) : min(needed, parting.stop)]
            group.attach(block_ids[needed:end], block_ids[first:needed], copied, likely=likely)
        self._allocation.resumption = forward
        return taken

    def let_pass(self) -> None:
        _, _, cut, stop = self._resumption
        self._begin()
        self._end = stop
        self._go_on(Resumption(cut, cut, cut, stop))
        self._done()

    def commit_full_blocks(self, num_computed_tokens: int) -> Sequence[BlockHash]:
        """As of a `BlockTable`. But a block that forks hold, too, waits, and all behind it, where an equal one would replace it
        that a window could not go on from.
        """
        start, stop = self._num_committed, num_computed_tokens // self._block_size
        if start >= stop or num_computed_tokens > self.num_tokens:
            return super().commit_full_blocks(num_computed_tokens)
        self._begin()
        equal = self._equal_blocks(start, stop)
        waiting = next((index for index, other in equal.items() if self._must_wait(index, other)), stop)
        replaced = {index: (self.block_ids[index], other) for index, other in equal.items() if index < waiting}
        shared = {
            (index, group.window): group.share(own, other)
            for index, (own, other) in replaced.items()
            for group in self._groups
        }
        committed = super().commit_full_blocks(waiting * self._block_size)
        for group in self._groups:
            seen, kept = group.needed_of(self._resumption)
            for index, (own, other) in replaced.items():
                is_replaced = self.block_ids[index] == other
                if shared[index, group.window]:
                    group.end_share(own, other, replaced=is_replaced)
                    if index not in seen and index not in kept:
                        group.release((other,), num_own=1, is_end=self._is_end(group, index))
                elif is_replaced:
                    group.release((own,), num_own=0, is_end=False)
        if replaced:
            self._go_on(self._resumption)
        self._done()
        return committed

    def _must_wait(self, index: int, other: int) -> bool:
        """Whether a block, replaced by `other`, would leave this table or a fork without a window block that it needs."""
        return self._allocator.ref_count(self.block_ids[index]) > 1 and any(
            other not in group.places and any(index in span for span in group.needed_of(self._resumption))
            for group in self._groups
        )

    def _equal_blocks(self, start: int, stop: int) -> dict[int, int]:
        """Logical index -> block that may replace the table's own when it is committed."""
        equal = {}
        for index, block_hash in enumerate(self._chain.hashes_of(start, stop), start):
            found = self._allocator.match_prefix((block_hash,), self.namespace)
            if found and found[0] != self.block_ids[index]:
                equal[index] = found[0]
        return equal

    def truncate(self, num_tokens: int) -> None:
        """As of a `BlockTable`, to where it can go on from: see `num_resumable_tokens`."""
        self._begin()
        before, stop = list(self.block_ids), self._resumption.stop
        shorter = Resumption(*(min(number, num_tokens) for number in self._resumption))
        if 0 <= num_tokens <= self.num_tokens:
            # Interrupted, it needs too much, never too little.
            self._allocation.resumption = shorter._replace(stop=stop)
        super().truncate(num_tokens)
        self._end = min(self._end, num_tokens)
        self._go_on(shorter._replace(stop=num_tokens), before)
        self._done()

    def fork(self) -> WindowedTable:
        forked = super().fork()
        assert isinstance(forked, WindowedTable)
        forked._groups, forked._num_matched = self._groups, self._num_matched
        forked._end, forked._num_hit = self._end, self._num_hit
        forked._allocation.resumption = self._allocation.resumption
        return forked

    def free(self) -> None:
        before, resumption = list(self.block_ids), self._resumption
        self._begin()
        super().free()
        for group in self._groups:
            for span in group.needed_of(resumption):
                group.release(before[span.start : span.stop], num_own=0, is_end=True)
            group.drop_lost(before)
        self._done()

    def _go_on(self, new: Resumption, before: Sequence[int] = ()) -> None:
        """Need what `new` says, and let go of what is needed no more.

        Args:
            before: the blocks, where some were cut off since.
        """
        old, block_ids = self._resumption, self.block_ids
        self._allocation.resumption = new
        for group in self._groups:
            seen, kept = group.needed_of(new)
            for span in (seen, kept):
                group.hold(block_ids[span.start : span.stop])
            cut_off = len(block_ids)
            for span in group.needed_of(old):
                passed = [i for i in range(span.start, min(span.stop, cut_off)) if i not in seen and i not in kept]
                for is_end in (False, True):
                    released = [block_ids[i] for i in passed if self._is_end(group, i) == is_end]
                    group.release(released, num_own=1, is_end=is_end)
                group.release(before[max(cut_off, span.start) : span.stop], num_own=0, is_end=True)

    def _is_end(self, group: WindowBlocks, block_index: int) -> bool:
        """Whether others are likely to go on behind a block: where the prompt ends, or where it parted from what was known."""
        places = (self._end, self._num_hit, self._num_matched)
        return any(block_index in group.span(num_tokens, num_tokens) for num_tokens in places if num_tokens)

    def _begin(self) -> None:
        for group in self._groups:
            group.begin()

    def _done(self) -> None:
        for group in self._groups:
            group.end()
