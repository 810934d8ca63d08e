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


def test_between_what_is_seen_and_what_is_written_nothing_is_needed(group) -> None:
    seen, kept = group.needed_of(Resumption(start=4, first=20, cut=24, stop=26))
    assert (list(seen), list(kept)) == ([0, 1], [10, 11, 12])
    assert list(group.needed_of(Resumption(4, 20, 20, 26))[1]) == [8, 9, 10, 11, 12]


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


def test_a_copy_has_a_window_block_of_its_own_or_where_there_is_none_the_sources(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=7) as holder:
        source, destination, other, *more = holder.block_ids
        group.attach([source])
        group.attach([], copied=(source, destination))
        assert group.copies == [(group.places[source], group.places[destination])]
        assert len(set(group.places.values())) == 2
        group.copies.clear()
        group.attach([*more[:2], other])
        group.hold([source])
        place = group.places[destination]
        group.attach([], copied=(destination, more[2]))  # nothing is free or idle
        assert group.places[more[2]] == place
        assert destination not in group.places
        assert not group.copies


def test_release_drops_what_cannot_be_hit_and_keeps_what_can(allocator, group, cache_sequence) -> None:
    (cached,) = cache_sequence([1, 2])
    free = allocator.allocate(num_mutable_blocks=1)
    (block,) = free.block_ids
    group.attach([cached, block])
    free.free()
    group.release([cached, block], num_own=0, is_end=True)
    assert list(group.places) == [cached]
    assert group.num_idle == 1
    allocator.forget_cached_blocks()
    group.drop_lost([cached])
    assert not group.places


def test_growing_hands_out_the_lowest_new_window_block_first(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=8) as holder:
        group.attach(holder.block_ids[:5])
        group.grow(9)
        group.attach(holder.block_ids[5:])
        assert [group.places[block] for block in holder.block_ids] == [1, 2, 3, 4, 5, 6, 7, 8]


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


def test_a_reset_forgets_everything(allocator, group) -> None:
    with allocator.allocate(num_mutable_blocks=3) as holder:
        group.attach(holder.block_ids)
        group.attach([], copied=(holder.block_ids[0], holder.block_ids[1]))
        group.release(holder.block_ids, num_own=1, is_end=True)
    group.reset(4)
    assert (group.num_free, group.num_idle, group.num_needed, group.num_blocks) == (3, 0, 0, 4)
    assert not group.copies
    group.check()


def test_idle_window_blocks_are_counted_by_namespace(allocator, group) -> None:
    for namespace, number in ((b"", 1), (b"tenant", 3)):
        holder = allocator.allocate(num_mutable_blocks=number, namespace=namespace)
        group.attach(holder.block_ids)
        group.release(holder.block_ids[:1], num_own=1, is_end=True)
        group.release(holder.block_ids[1:], num_own=1, is_end=False)
    assert (group.num_idle_of(b""), group.num_idle_of(b"tenant")) == (1, 3)
