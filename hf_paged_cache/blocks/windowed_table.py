"""Owns which window blocks one sequence needs, beside its tokens and blocks. Refuses to hit a prefix that a window cannot go on from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from ..errors import OutOfBlocksError
from .allocation import Resumption
from .allocator import PrefixCachingBlockAllocator
from .block_table import BlockTable
from .hashing import BlockHash, HashChain, token_array
from .ledger import check_not_negative
from .window_blocks import WindowBlocks


class WindowedTable(BlockTable):
    """A `BlockTable` of a model some of whose layers see a window.

    Blocks, in tokens, of a group of layers with the window W:
        [0, n - W) passed: may have window blocks, as long as nobody else takes them | [n - W + 1, n) needed
    where n is where the sequence goes on; see `Resumption`.

    Args:
        groups: of all windows, one each.
    Example:
        >>> from . import PrefixCachingBlockAllocator, root_hash
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=16, block_size=2)
        >>> group = WindowBlocks(allocator, window=3, num_blocks=4)
        >>> table = WindowedTable(allocator, root_hash(b"model"), groups=[group])
        >>> table.append_tokens(range(12)), table.let_pass(), len(table.block_ids), group.num_needed
        (None, None, 6, 1)
    """

    __slots__ = ("_end", "_groups", "_num_matched")

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
        self._num_matched = 0

    @property
    def _resumption(self) -> Resumption:
        return self._allocation.resumption or Resumption(0, 0, 0)

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
        self._go_on(Resumption(num_hit, num_hit, num_hit))
        self._end = num_hit
        self._done()
        return num_hit

    def _hashes_to_hit(self, chain: HashChain) -> Iterator[BlockHash]:
        matched = self._allocator.match_prefix(chain.hashes(), self.namespace)
        self._num_matched = len(matched) * self._block_size
        return islice(chain.hashes(), self._num_resumable(matched, self._num_matched) // self._block_size)

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the last hit would have had without windows."""
        return self._num_matched

    def num_resumable_tokens(self, num_tokens: int) -> int:
        return self._num_resumable(self.block_ids, num_tokens)

    def _num_resumable(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """The most tokens, up to `num_tokens`, before which each window has all blocks that it sees; one pass from the end."""
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
        self._go_on(self._resumption._replace(start=num_tokens))
        self._done()

    def append_tokens(
        self, token_ids: Sequence[int] | array[int], num_lookahead_slots: int = 0, *, cut: int | None = None
    ) -> None:
        self._begin()
        start, block_ids = self.num_tokens, self.block_ids
        stop = start + len(token_ids)
        cut = stop if cut is None else max(start, min(cut, stop))
        first, end = start // self._block_size, -(-stop // self._block_size)
        partial = block_ids[first] if start % self._block_size else None
        for group in self._groups:
            span = group.span(cut, stop)
            held = block_ids[span.start : span.stop]
            is_copied = partial is not None and stop > start and not self._allocator.is_writable(partial)
            group.require(group.num_missing(held) + max(0, len(span) - len(held)) + is_copied)
        super().append_tokens(token_ids, num_lookahead_slots)
        is_copied = partial is not None and partial != block_ids[first]
        for group in self._groups:
            needed_from = max(first, group.span(cut, stop).start)
            copied = range(first, min(first + is_copied, needed_from))  # read by this forward, whatever it leaves
            needed = [*(block_ids[index] for index in copied), *block_ids[needed_from:end]]
            group.attach(needed, block_ids[first + len(copied) : needed_from])
        self._allocation.resumption = Resumption(min(self._resumption.start, start), cut, stop)
        if partial is not None and is_copied:
            self._copy(partial, block_ids[first])
        self._done()

    def append_token(self, token_id: int) -> int:
        self._begin()
        num_tokens, block_ids = self.num_tokens, self.block_ids
        index, offset = divmod(num_tokens, self._block_size)
        partial = block_ids[index] if offset else None
        self._go_on(Resumption(num_tokens, num_tokens, num_tokens))
        for group in self._groups:
            group.require(1)
        slot = super().append_token(token_id)
        block_id = block_ids[index]
        for group in self._groups:
            group.attach((block_id,))
        self._allocation.resumption = Resumption(num_tokens, num_tokens, num_tokens + 1)
        if partial is not None and partial != block_id:
            self._copy(partial, block_id)
        self._done()
        return slot

    def let_pass(self) -> None:
        _, cut, stop = self._resumption
        self._begin()
        self._end = stop
        self._go_on(Resumption(cut, cut, stop))
        self._done()

    def commit_full_blocks(self, num_computed_tokens: int) -> Sequence[BlockHash]:
        start, stop = self._num_committed, num_computed_tokens // self._block_size
        if start >= stop:
            return super().commit_full_blocks(num_computed_tokens)
        self._begin()
        equal = self._equal_blocks(start, stop)
        shared = [
            (group, index, other, group.share(self.block_ids[index], other))
            for index, other in equal.items()
            for group in self._groups
        ]
        own_ids = {index: self.block_ids[index] for index in equal}
        committed = super().commit_full_blocks(num_computed_tokens)
        for group, index, other, is_shared in shared:
            group.end_share(own_ids[index], other, replaced=self.block_ids[index] == other, shared=is_shared)
            if is_shared and index not in group.span(self._resumption.start, self._resumption.stop):
                group.release((other,), num_own=1, is_end=False)
        if equal:
            self._go_on(self._resumption)
        self._done()
        return committed

    def _equal_blocks(self, start: int, stop: int) -> dict[int, int]:
        """Logical index -> block that may replace the table's own when it is committed."""
        equal = {}
        for index, block_hash in enumerate(self._chain.hashes_of(start, stop), start):
            found = self._allocator.match_prefix((block_hash,), self.namespace)
            if found and found[0] != self.block_ids[index]:
                equal[index] = found[0]
        return equal

    def truncate(self, num_tokens: int) -> None:
        self._begin()
        before = list(self.block_ids)
        super().truncate(num_tokens)
        self._end = min(self._end, num_tokens)
        start, cut, _ = self._resumption
        self._go_on(Resumption(min(start, num_tokens), min(cut, num_tokens), num_tokens), before)
        self._done()

    def fork(self) -> WindowedTable:
        forked = super().fork()
        assert isinstance(forked, WindowedTable)
        forked._groups, forked._end, forked._num_matched = self._groups, self._end, self._num_matched
        forked._allocation.resumption = self._allocation.resumption
        return forked

    def free(self) -> None:
        before, (start, _, stop) = list(self.block_ids), self._resumption
        self._begin()
        super().free()
        for group in self._groups:
            span = group.span(start, stop)
            group.release(before[span.start : span.stop], num_own=0, is_end=True)
        self._done()

    def _go_on(self, new: Resumption, before: Sequence[int] | None = None) -> None:
        """Need what `new` says, and let go of what is needed no more.

        Args:
            before: the blocks before some were cut off; None: they are the same.
        """
        old, block_ids = self._resumption, self.block_ids
        self._allocation.resumption = new
        for group in self._groups:
            now, then = group.span(new.start, new.stop), group.span(old.start, old.stop)
            group.hold(block_ids[now.start : now.stop])
            passed = block_ids[then.start : min(then.stop, now.start)]
            if passed:
                end = group.span(self._end, self._end)
                num_not_end = max(0, end.start - then.start)
                group.release(passed[:num_not_end], num_own=1, is_end=False)
                group.release(passed[num_not_end:], num_own=1, is_end=self._end > then.start * self._block_size)
            if before is not None:
                group.release(before[len(block_ids) :], num_own=0, is_end=True)

    def _copy(self, source: int, destination: int) -> None:
        """A block was copied on write."""
        for group in self._groups:
            group.copy(source, destination)
            group.release((source,), num_own=0, is_end=True)

    def _begin(self) -> None:
        for group in self._groups:
            group.begin()

    def _done(self) -> None:
        for group in self._groups:
            group.end()
