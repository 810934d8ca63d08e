"""A snapshot is found with its block, and gone with it or before."""

import pytest

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, Snapshots, resumable, root_hash
from hf_paged_cache.errors import BlockStateError

ROOT = root_hash(b"model")


def table_of(allocator: PrefixCachingBlockAllocator, *tokens: int, namespace: bytes = b"") -> BlockTable:
    table = BlockTable(allocator, ROOT + namespace, namespace=namespace)
    table.allocate(tokens)
    table.commit_full_blocks(table.num_tokens)
    return table


@pytest.fixture
def allocator() -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(num_blocks=8, block_size=2)


def test_the_deepest_snapshot_of_a_sequence_is_found_and_nothing_changes(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    table, snapshots = table_of(allocator, 1, 2, 3, 4, 5, 6, 7), Snapshots[str](allocator, 3)
    assert resumable([snapshots], table.block_ids, 7) == 0
    snapshots.keep(table.block_ids[0], "2")
    snapshots.keep(table.block_ids[1], "4")
    snapshots.keep(table.block_ids[3], "7")  # a block that is not full is not hit
    before = list(snapshots._contents)
    assert resumable([snapshots], table.block_ids, 7) == 4
    assert [resumable([snapshots], table.block_ids, number) for number in (4, 3, 2, 1)] == [4, 2, 2, 0]
    assert resumable([snapshots], table.block_ids[:2], 40) == 4, "more tokens than these blocks have"
    assert list(snapshots._contents) == before
    assert [snapshots.has(block_id) for block_id in table.block_ids] == [True, True, False, False]


def test_what_was_kept_first_stays(allocator: PrefixCachingBlockAllocator) -> None:
    table, snapshots = table_of(allocator, 1, 2, 3, 4), Snapshots[str](allocator, 3)
    snapshots.keep(table.block_ids[0], "first")
    snapshots.keep(table.block_ids[0], "second")
    assert snapshots.use(table.block_ids[0]) == "first"


def test_the_least_recently_used_one_makes_room(allocator: PrefixCachingBlockAllocator) -> None:
    table, snapshots = table_of(allocator, *range(8)), Snapshots[int](allocator, 2)
    first, second, third, fourth = table.block_ids
    snapshots.keep(first, 1)
    snapshots.keep(second, 2)
    snapshots.use(first)
    snapshots.keep(third, 3)
    assert [snapshots.has(block_id) for block_id in table.block_ids] == [True, False, True, False]
    snapshots.limit(1)
    assert snapshots.has(third)
    snapshots.limit(0)
    snapshots.keep(fourth, 4)
    assert len(snapshots) == 0


def test_a_pinned_one_makes_no_room(allocator: PrefixCachingBlockAllocator) -> None:
    table, snapshots = table_of(allocator, *range(8)), Snapshots[int](allocator, 2)
    first, second, third, fourth = table.block_ids
    snapshots.keep(first, 1)
    snapshots.keep(second, 2)
    snapshots.pinned = frozenset({allocator.digest_of(first) or b""})
    snapshots.keep(third, 3)
    assert [snapshots.has(block_id) for block_id in table.block_ids] == [True, False, True, False]
    snapshots.limit(1)
    assert snapshots.has(first)
    snapshots.keep(fourth, 4)
    assert not snapshots.has(fourth)
    snapshots.limit(0)
    snapshots.check()


def test_it_goes_with_its_block(allocator: PrefixCachingBlockAllocator) -> None:
    table, snapshots = table_of(allocator, 1, 2, 3, 4), Snapshots[int](allocator, 4)
    for block_id in table.block_ids:
        snapshots.keep(block_id, block_id)
    table.free()
    assert len(snapshots) == 2, "cached blocks keep theirs"
    with allocator.allocate(num_mutable_blocks=6):  # all but one are taken: the end of the sequence goes first
        assert len(snapshots) == 1
        snapshots.check()
        assert resumable([snapshots], table_of(allocator, 1, 2).block_ids, 2) == 2


def test_one_without_its_block_is_found_out(allocator: PrefixCachingBlockAllocator) -> None:
    table, snapshots = table_of(allocator, 1, 2), Snapshots[int](allocator, 4)
    snapshots.keep(table.block_ids[0], 1)
    snapshots._contents[b"no block"] = 2
    with pytest.raises(BlockStateError, match="1 of 2 snapshots of at most 4 have no block"):
        snapshots.check()


def test_each_is_of_the_namespace_of_its_block(allocator: PrefixCachingBlockAllocator) -> None:
    snapshots = Snapshots[int](allocator, 4)
    for namespace in (b"a", b"b", b"b"):
        for block_id in table_of(allocator, 1, 2, namespace=namespace).block_ids:
            snapshots.keep(block_id, 1)
    assert [snapshots.num_of(namespace) for namespace in (b"a", b"b", b"c")] == [1, 1, 0]
