"""Window blocks: which a sequence needs, who gets one when there are few, and what an idle one is still good for."""

import pytest

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, Resumption, Window, WindowBlocks, root_hash
from hf_paged_cache.errors import BlockStateError, OutOfBlocksError


@pytest.fixture
def allocator():
    return PrefixCachingBlockAllocator(num_blocks=17, block_size=2)


@pytest.fixture
def group(allocator):
    return WindowBlocks(allocator, Window(4), num_blocks=6)


@pytest.mark.parametrize(
    ("window", "start", "stop", "expected"),
    [
        (4, 0, 0, []),
        (4, 8, 8, [2, 3]),  # tokens 5 to 7
        (4, 7, 7, [2, 3]),
        (4, 8, 11, [2, 3, 4, 5]),
        (3, 8, 8, [3]),
        (1, 8, 8, [3]),  # a window of one token sees none before it; the last one is kept all the same
        (2, 7, 7, [3]),
        (100, 8, 8, [0, 1, 2, 3]),
    ],
)
def test_a_span_has_what_is_written_and_what_the_first_token_of_it_sees(
    window, start, stop, expected, allocator
) -> None:
    assert list(WindowBlocks(allocator, Window(window), 4).span(start, stop)) == expected


def cached_blocks(allocator, number, namespace=b""):
    """Blocks that somebody holds, and that can be hit."""
    table = BlockTable(allocator, root_hash(namespace), namespace=namespace)
    table.append_tokens(range(2 * number))
    table.commit_full_blocks(2 * number)
    return table


def test_idle_window_blocks_are_taken_passed_before_ends_and_each_the_oldest_first(allocator, group) -> None:
    with cached_blocks(allocator, 9) as table:
        a, b, c, d, e, *others = table.block_ids
        group.attach([a, b, c, d, e])
        assert group.num_free == 0
        group.release([d, e], num_own=1, is_end=True)
        group.release([a, b], num_own=1, is_end=False)
        group.release([d], num_own=1, is_end=True)  # used once more
        for block, taken in zip(others, (a, b, e, d), strict=True):
            assert taken in group.places
            group.attach([block])
            assert taken not in group.places
        table.allocation.resumption = Resumption(0, 18)
        with pytest.raises(OutOfBlocksError, match="need 1 blocks of layers with a window of 4 tokens: 0 free"):
            group.require(group.num_to_take([a]))


def test_what_cannot_be_hit_is_not_idle_but_free(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=2) as holder:
        group.attach(holder.block_ids)
        group.release(holder.block_ids, num_own=1, is_end=False)
        assert (group.num_idle, group.num_free) == (0, 5)


def test_a_sweep_finds_what_was_collected(allocator, group) -> None:
    holder = allocator.allocate(num_mutable_blocks=2)
    holder.resumption = Resumption(4, 4)
    group.attach(holder.block_ids)
    group.check()
    assert group.num_needed == 2
    del holder
    group.require(5)  # it looks before it refuses
    assert (group.num_needed, group.num_free) == (0, 5)


def test_check_names_what_a_sequence_lacks_to_go_on(allocator, group) -> None:
    holder = allocator.allocate(num_mutable_blocks=2)
    holder.resumption = Resumption(4, 4)
    group.attach(holder.block_ids[:1])
    with pytest.raises(BlockStateError, match=r"blocks \[2\] have no window block, and a sequence resumes from them"):
        group.check()
    group.attach(holder.block_ids[1:])
    group.check()


def test_idle_window_blocks_are_counted_by_namespace(allocator, group) -> None:
    tables = [cached_blocks(allocator, number, namespace) for namespace, number in ((b"", 1), (b"tenant", 3))]
    for table in tables:
        group.attach(table.block_ids)
        group.release(table.block_ids[:1], num_own=1, is_end=True)
        group.release(table.block_ids[1:], num_own=1, is_end=False)
    assert (group.num_idle_of(b""), group.num_idle_of(b"tenant")) == (1, 3)
