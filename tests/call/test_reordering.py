"""Tables and reader move by the same rows, whatever number of them goes on; where one of the two did not, the reader is empty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, root_hash
from hf_paged_cache.call.reordering import reorder_rows
from hf_paged_cache.call.rows import Row, Rows
from hf_paged_cache.errors import CacheArgumentError

ROOT = root_hash(b"model")
BLOCK_SIZE = 4
NUM_TOKENS = 6


class RecordingReader:
    """Holds no tensors, only what its rows would read: the tokens of each; a row that must be read again is empty."""

    def __init__(self, rows: Rows, fails_in: str = "") -> None:
        self.rows = [list(row.table.token_ids) for row in rows.distinct]
        self.fails_in = fails_in  # the method that is interrupted after it moved its first row
        self.shared_columns = -1  # told by the last reorder

    def expand_rows(self, sources: Sequence[int]) -> None:
        self._move("expand_rows", sources)

    def reorder_rows(self, sources: Sequence[int], shared_columns: int) -> None:
        self.shared_columns = shared_columns
        self._move("reorder_rows", sources)

    def drop(self) -> None:
        self.rows = []

    def _move(self, method: str, sources: Sequence[int]) -> None:
        old = self.rows
        if method == self.fails_in:
            self.rows = [old[sources[0]], *old[1:]]
            raise KeyboardInterrupt
        self.rows = [old[source] for source in sources]


@pytest.fixture
def allocator() -> Iterator[PrefixCachingBlockAllocator]:
    made = PrefixCachingBlockAllocator(100, BLOCK_SIZE)
    yield made
    made.check()


def make_rows(allocator: PrefixCachingBlockAllocator, alias: Sequence[int]) -> Rows:
    """Rows of a batch, of which those that name the same number in `alias` are equal; the others differ from the start."""
    distinct = []
    for number in range(1 + max(alias)):
        row = Row(BlockTable(allocator, ROOT), 0, ROOT)
        row.table.append_tokens(range(100 * number, 100 * number + NUM_TOKENS))
        row.num_confirmed = NUM_TOKENS
        distinct.append(row)
    return Rows(distinct, list(alias), NUM_TOKENS)


def tokens_in_batch(rows: Rows) -> list[list[int]]:
    return [list(row.table.token_ids) for row in rows.in_batch()]


def go_on(rows: Rows, reader: Any, sources: Sequence[int]) -> list[list[int]]:
    """Reorders; returns the tokens that the rows had in this order before."""
    before = tokens_in_batch(rows)
    reorder_rows(rows, reader, sources)
    return [before[source] for source in sources]


@pytest.mark.parametrize("alias", [[0, 1, 2], [0, 0, 0], [0, 0, 1]])
@pytest.mark.parametrize("sources", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [2, 2, 0]])
def test_as_many_rows_move_alike_in_tables_and_reader(
    alias: list[int], sources: list[int], allocator: PrefixCachingBlockAllocator
) -> None:
    rows = make_rows(allocator, alias)
    reader = RecordingReader(rows)
    wanted = go_on(rows, reader, sources)
    assert tokens_in_batch(rows) == reader.rows == wanted
    assert not rows.is_aliased
    rows.free()
    assert allocator.num_blocks_in_use == 0


@pytest.mark.parametrize(("alias", "shared"), [([0, 0, 0], NUM_TOKENS), ([0, 0, 1], 0)])
def test_the_reader_is_told_which_columns_the_rows_share_with_those_they_go_on_from(
    alias: list[int], shared: int, allocator: PrefixCachingBlockAllocator
) -> None:
    rows = make_rows(allocator, alias)
    reader = RecordingReader(rows)
    reorder_rows(rows, reader, [2, 1, 0])  # in the second case a row leaves its prompt
    assert reader.shared_columns == shared
    rows.free()


@pytest.mark.parametrize("sources", [[1], [0, 0, 1, 1]])
def test_fewer_or_more_rows_leave_the_reader_nothing(
    sources: list[int], allocator: PrefixCachingBlockAllocator
) -> None:
    rows = make_rows(allocator, [0, 1])
    reader = RecordingReader(rows)
    wanted = go_on(rows, reader, sources)
    assert tokens_in_batch(rows) == wanted
    assert reader.rows == []
    rows.free()
    assert allocator.num_blocks_in_use == 0


@pytest.mark.parametrize("sources", [[], [0, 2], [-1, 0]])
def test_a_row_that_is_not_there_is_refused_and_nothing_moves(
    sources: list[int], allocator: PrefixCachingBlockAllocator
) -> None:
    rows = make_rows(allocator, [0, 0])
    reader, before = RecordingReader(rows), tokens_in_batch(rows)
    with pytest.raises(CacheArgumentError, match=r"the cache has rows 0 to 1"):
        reorder_rows(rows, reader, sources)  # type: ignore[arg-type]
    assert tokens_in_batch(rows) == before
    assert reader.rows == before[:1]
    assert rows.is_aliased
    rows.free()


@pytest.mark.parametrize("method", ["expand_rows", "reorder_rows"])
def test_a_reader_that_was_interrupted_is_empty_and_no_block_is_lost(
    method: str, allocator: PrefixCachingBlockAllocator
) -> None:
    rows = make_rows(allocator, [0, 0])
    reader = RecordingReader(rows, fails_in=method)
    with pytest.raises(KeyboardInterrupt):
        reorder_rows(rows, reader, [1, 0])  # type: ignore[arg-type]
    assert reader.rows == []
    assert tokens_in_batch(rows) == [list(range(NUM_TOKENS))] * 2
    rows.free()
    assert allocator.num_blocks_in_use == 0
