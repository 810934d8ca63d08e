"""Window blocks: which a sequence needs, who gets one when there are few, and what an idle one is still good for."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks import PrefixCachingBlockAllocator, WindowBlocks
from hf_paged_cache.blocks.allocation import Resumption
from hf_paged_cache.blocks.sight import Window
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


def test_idle_window_blocks_are_taken_passed_before_ends_and_each_the_oldest_first(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=9) as holder:
        a, b, c, d, e, *others = holder.block_ids
        group.attach([a, b, c, d, e])
        assert group.num_free == 0
        group.release([d, e], num_own=1, is_end=True)
        group.release([a, b], num_own=1, is_end=False)
        group.release([d], num_own=1, is_end=True)  # used once more
        for block, taken in zip(others, (a, b, e, d), strict=True):
            assert taken in group.places
            group.attach([block])
            assert taken not in group.places
        holder.resumption = Resumption(0, 0, 18, 18)
        with pytest.raises(OutOfBlocksError, match="need 1 blocks of layers with a window of 4 tokens: 0 free"):
            group.attach([a])


def test_what_is_not_required_takes_half_of_what_is_spare_and_no_end(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=8) as holder:
        blocks = holder.block_ids
        group.attach(blocks[:2])
        group.attach([], blocks[2:6])
        assert [block in group.places for block in blocks] == [True] * 4 + [False] * 4  # of 5, 2 needed, half of 3 left
        group.attach(blocks[3:5])
        group.release(blocks[:1], num_own=1, is_end=True)
        group.attach([], blocks[5:6])
        assert blocks[5] not in group.places
        group.release(blocks[1:2], num_own=1, is_end=False)
        group.attach([], blocks[5:6])
        assert blocks[5] in group.places


def test_what_was_in_a_block_before_is_not_kept_where_it_is_not_spare(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=2) as holder:
        group.attach(holder.block_ids)
        group.release(holder.block_ids, num_own=1, is_end=False)
        group.most = 1
        group.attach([], holder.block_ids)
        assert not group.places
        assert group.num_free == 5


def test_a_sweep_finds_what_was_collected(allocator, group) -> None:
    holder = allocator.allocate(num_mutable_blocks=2)
    holder.resumption = Resumption.at(4)
    group.attach(holder.block_ids)
    group.check()
    assert group.num_needed == 2
    del holder
    group.require(5)  # it looks before it refuses
    assert (group.num_needed, group.num_free) == (0, 5)


def test_check_names_what_a_sequence_lacks_to_go_on(allocator, group) -> None:
    holder = allocator.allocate(num_mutable_blocks=2)
    holder.resumption = Resumption.at(4)
    group.attach(holder.block_ids[:1])
    with pytest.raises(BlockStateError, match=r"blocks \[2\] of .* have no window block, and it resumes from 4"):
        group.check()
    group.attach(holder.block_ids[1:])
    group.check()


def test_idle_window_blocks_are_counted_by_namespace(allocator, group) -> None:
    for namespace, number in ((b"", 1), (b"tenant", 3)):
        holder = allocator.allocate(num_mutable_blocks=number, namespace=namespace)
        group.attach(holder.block_ids)
        group.release(holder.block_ids[:1], num_own=1, is_end=True)
        group.release(holder.block_ids[1:], num_own=1, is_end=False)
    assert (group.num_idle_of(b""), group.num_idle_of(b"tenant")) == (1, 3)
