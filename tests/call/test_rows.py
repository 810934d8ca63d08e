"""The rows of a call: how they part, move and are cut, and that no block is lost or held twice on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.blocks import PrefixCachingBlockAllocator
from hf_paged_cache.call.rows import Rows, group_equal

from .bench import BLOCK_SIZE, commit, make_row, make_rows, num_hit, tokens_in_batch


@pytest.fixture
def allocator() -> Iterator[PrefixCachingBlockAllocator]:
    made = PrefixCachingBlockAllocator(100, BLOCK_SIZE)
    yield made
    made.check()


def rows_that_differ(allocator: PrefixCachingBlockAllocator, num_rows: int) -> Rows:
    """Of six tokens each, from the first one on."""
    return make_rows(allocator, *(range(100 * i, 100 * i + 6) for i in range(num_rows)))


# Equal rows


@given(st.lists(st.integers(0, 3), max_size=8))
def test_rows_are_in_one_group_exactly_when_their_keys_are_equal(keys: list[int]) -> None:
    groups = group_equal(keys)
    for i, left in enumerate(keys):
        for j, right in enumerate(keys):
            assert (groups.group_of[i] == groups.group_of[j]) == (left == right)
    assert groups.members == [groups.group_of.index(number) for number in range(len(groups.members))]


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_groups_first_row_is_never_left_of_its_number(keys: list[int]) -> None:  # rows can be moved in place
    assert all(member >= number for number, member in enumerate(group_equal(keys).members))


# One row


def test_only_confirmed_tokens_are_committed(allocator: PrefixCachingBlockAllocator) -> None:
    row = make_row(allocator, range(12))
    row.num_confirmed = 7
    commit(row)
    assert num_hit(allocator, list(range(12))) == 4


@pytest.mark.parametrize(("end", "hit"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (99, 12), (None, 12)])
def test_tokens_from_the_end_of_commits_on_are_never_committed(
    allocator: PrefixCachingBlockAllocator, end: int | None, hit: int
) -> None:
    row = make_row(allocator, range(12))
    if end is not None:
        row.stop_commits(end)
    commit(row)
    assert num_hit(allocator, list(range(12))) == hit
    assert len(row.true_token_ids) == min(12, 99 if end is None else end)


@pytest.mark.parametrize(
    ("end", "num_trusted", "may"), [(None, 0, True), (0, 0, False), (5, 4, True), (5, 5, False), (5, 12, False)]
)
def test_conditions_matter_as_long_as_what_is_not_trusted_may_be_committed(
    allocator: PrefixCachingBlockAllocator, end: int | None, num_trusted: int, may: bool
) -> None:
    row = make_row(allocator, range(12))
    row.num_known = row._num_judged = num_trusted
    if end is not None:
        row.stop_commits(end)
    rows = Rows([row], [0], 12)
    assert rows.may_commit is may
    assert rows.are_trusted is not may


def test_conditions_matter_where_blocks_were_committed_that_nobody_trusts(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    row = make_row(allocator, range(12))
    row.num_known = row._num_judged = 0
    rows = Rows([row], [0], 12)
    rows.commit()
    row.stop_commits(0)
    assert rows.may_commit
    assert not rows.are_trusted
    rows.trust()
    assert not rows.may_commit
    assert rows.are_trusted


def test_the_end_of_commits_only_moves_towards_the_front(allocator: PrefixCachingBlockAllocator) -> None:
    row = make_row(allocator, range(12))
    row.stop_commits(9)
    row.stop_commits(11)
    assert row.commit_end == 9
    row.stop_commits(5)
    assert row.commit_end == 5


@pytest.mark.parametrize(("cut_to", "left"), [(4, None), (5, 5), (8, 5)])
def test_a_row_cut_below_its_end_of_commits_may_be_committed_again(
    allocator: PrefixCachingBlockAllocator, cut_to: int, left: int | None
) -> None:
    """What is after the cut is computed anew; what stood after the end and before the cut is not."""
    row = make_row(allocator, range(12))
    row.stop_commits(5)
    row.truncate(cut_to)
    assert row.commit_end == left
    row.table.append_tokens([7] * 8)
    row.num_confirmed = row.table.num_tokens
    commit(row)
    assert num_hit(allocator, list(row.table.token_ids)) == (4 if left else 12)


def test_a_row_is_cut_in_all_its_counts_and_never_grows_by_it(allocator: PrefixCachingBlockAllocator) -> None:
    row = make_row(allocator, range(10))
    row.num_known = 8
    row.truncate(99)
    assert (row.table.num_tokens, row.num_confirmed, row.num_known) == (10, 10, 8)
    row.truncate(5)
    assert (row.table.num_tokens, row.num_confirmed, row.num_known) == (5, 5, 5)
    assert len(row.table.block_ids) == 2


def test_a_fork_is_the_same_row_in_the_same_blocks_and_goes_its_own_way(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    row = make_row(allocator, range(6), pad=3)
    row.first_position, row.num_known = 2, 4
    row.stop_commits(5)
    twin = row.fork()
    for name in ("pad", "root", "commit_end", "num_known", "num_confirmed", "first_position"):
        assert getattr(twin, name) == getattr(row, name), name
    assert twin.table.block_ids == row.table.block_ids
    twin.table.append_tokens([9])
    twin.stop_commits(0)
    assert (row.table.num_tokens, row.commit_end) == (6, 5)
    assert twin.table.block_ids[1] != row.table.block_ids[1]  # copied before it is written


# Aliases


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.data())
def test_rows_part_into_groups_that_keep_their_tokens_and_share_their_blocks(
    alias: list[int], data: st.DataObject
) -> None:
    allocator = PrefixCachingBlockAllocator(100, BLOCK_SIZE)
    numbers = sorted(set(alias), key=alias.index)
    alias = [numbers.index(number) for number in alias]
    rows = Rows([make_row(allocator, range(100 * i, 100 * i + 6)) for i in range(len(numbers))], alias, 6)
    before, blocks = tokens_in_batch(rows), allocator.num_blocks_in_use
    # Each alias may part further; a group never holds rows of two aliases.
    keys = [(number, data.draw(st.integers(0, 1))) for number in alias]
    members = [keys.index(key) for key in sorted(set(keys), key=keys.index)]
    group_of = [members.index(keys.index(key)) for key in keys]
    old = list(rows.distinct)
    origins, _ = rows.select(members, group_of)
    assert tokens_in_batch(rows) == before
    assert rows.alias == group_of
    assert len({id(row.table) for row in rows.distinct}) == len(members)  # no two write through one table
    assert origins == [alias[member] for member in members]
    assert all(origin <= i for i, origin in enumerate(origins))  # what a view that grows may rely on
    assert {id(row) for row in old} <= {id(row) for row in rows.distinct}  # none is lost with its blocks
    assert allocator.num_blocks_in_use == blocks
    rows.free()
    assert allocator.num_blocks_in_use == 0
    allocator.check()


# Beams


def test_beams_that_stay_within_their_prompt_share_its_columns_and_others_nothing(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    def beams() -> Rows:
        rows = Rows([make_row(allocator, range(6)), make_row(allocator, range(50, 56))], [0, 0, 1, 1], 6)
        rows.select(range(len(rows)))
        return rows

    assert beams().select([1, 0, 3, 3]) == ([1, 0, 3, 3], 6)
    assert beams().select([2, 0, 3, 3])[1] == 0  # a row continues as another prompt's
    assert beams().select([0, 0, 1, 1, 2, 2, 3, 3])[1] == 0  # another number of rows
    cropped = beams()
    cropped.crop(3)
    assert cropped.select([1, 1, 2, 2])[1] == 3


def test_groups_follow_the_rows_that_moved(allocator: PrefixCachingBlockAllocator) -> None:
    rows = Rows([make_row(allocator, range(6)), make_row(allocator, range(50, 56))], [0, 0, 1], 6)
    rows.select(range(len(rows)))
    rows.select([2, 0, 1])
    assert rows.group == [1, 0, 0]
    assert rows.select([0, 2, 2])[1] == 6
    assert rows.select([1, 1, 1])[1] == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_reorders_and_appends_keep_every_rows_tokens_and_leak_no_block(
    allocator: PrefixCachingBlockAllocator, seed: int
) -> None:
    chance = random.Random(seed)
    rows = rows_that_differ(allocator, 3)
    naive = tokens_in_batch(rows)
    for _ in range(60):
        number = chance.choice([len(rows)] * 4 + [1, 2, 5])
        sources = [chance.randrange(len(rows)) for _ in range(number)]
        _, shared = rows.select(sources)
        assert all(naive[i][:shared] == naive[source][:shared] for i, source in enumerate(sources) if i < len(naive))
        naive = [list(naive[source]) for source in sources]
        for row, tokens in zip(rows.distinct, naive, strict=True):
            new = [chance.randint(0, 1)]
            row.table.append_tokens(new)
            tokens.extend(new)
        rows.confirm(rows.num_columns + 1)
        rows.commit()
        if chance.random() < 0.2:
            kept = chance.randint(1, rows.num_columns)
            rows.crop(kept)
            naive = [tokens[:kept] for tokens in naive]
        assert tokens_in_batch(rows) == naive
        allocator.take_copies()
        allocator.check()
    rows.free()
    assert allocator.num_blocks_in_use == 0


# Cuts


def test_a_crop_takes_columns_of_every_row_whatever_its_padding(allocator: PrefixCachingBlockAllocator) -> None:
    rows = Rows([make_row(allocator, range(8)), make_row(allocator, range(5), pad=3)], [0, 1], 8)
    rows.crop(6)
    assert [row.table.num_tokens for row in rows.distinct] == [6, 3]
    assert (rows.num_columns, [row.pad for row in rows.distinct]) == (6, [0, 3])
    rows.crop(2)  # into the padding
    assert [row.table.num_tokens for row in rows.distinct] == [2, 0]
    assert (rows.num_columns, [row.pad for row in rows.distinct]) == (2, [0, 2])


# The end


def test_forked_rows_hold_the_same_blocks_and_live_on_alone(allocator: PrefixCachingBlockAllocator) -> None:
    rows = Rows([make_row(allocator, range(6)), make_row(allocator, range(50, 56))], [0, 0, 1], 6)
    rows.select(range(len(rows)))
    twin = rows.fork()
    assert (twin.alias, twin.group, twin.num_columns, twin.shared_columns) == ([0, 1, 2], [0, 0, 1], 6, 6)
    assert allocator.num_blocks_in_use == 4
    before = tokens_in_batch(rows)
    rows.free()
    assert tokens_in_batch(twin) == before
    twin.select([2, 2, 0])
    twin.free()
    assert allocator.num_blocks_in_use == 0


def test_rows_that_are_ended_leave_their_confirmed_blocks_to_be_hit_and_nothing_else(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    rows = Rows([make_row(allocator, range(9))], [0], 9)
    rows.distinct[0].table.append_tokens(range(9, 16))  # scheduled, never confirmed
    rows.end()
    assert allocator.num_blocks_in_use == 0
    assert num_hit(allocator, list(range(16))) == 8
    assert len(rows) == 0
