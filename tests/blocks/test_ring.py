"""The slots of a ring of blocks, and how it begins and ends."""

import pytest

from hf_paged_cache.blocks.for_engines import Ring
from hf_paged_cache.errors import BlockStateError, CacheArgumentError

from .snapshot import snapshot_of


def test_the_slots_of_a_ring_run_round_its_blocks(make_allocator):
    ring = Ring(make_allocator(num_blocks=9, block_size=4), num_tokens=11, window=6)
    assert ring.allocation.block_ids == [1, 2]
    assert ring.slots(0, 11) == [4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_the_tokens_of_a_window_lie_in_slots_of_their_own(make_allocator, block_size, window):
    allocator = make_allocator(num_blocks=20, block_size=block_size)
    allocator.allocate((), 2).free()  # the blocks are handed out in another order
    for num_tokens in range(3 * window + 2):
        with Ring(allocator, num_tokens, window) as ring:
            assert len(ring.allocation.block_ids) == -(-min(num_tokens, window) // block_size)
            slots = ring.slots(0, num_tokens)
            assert len(slots) == num_tokens
            assert {slot // block_size for slot in slots} == set(ring.allocation.block_ids)
            written = {}  # slot -> position
            for position, slot in enumerate(slots):
                written[slot] = position
                seen = range(max(0, position + 1 - window), position + 1)
                assert [written[slots[each]] for each in seen] == list(seen)
            for start in range(num_tokens + 1):
                for stop in range(start, num_tokens + 1):
                    assert ring.slots(start, stop) == slots[start:stop]
    assert allocator.num_blocks_in_use == 0


def test_a_fork_of_a_ring_is_copied_on_write_and_keeps_its_tokens(allocator):
    ring = Ring(allocator, num_tokens=9, window=4)
    forked = ring.fork()
    assert forked.slots(0, 9) == ring.slots(0, 9)
    forked.make_writable(6)  # the second time round: its second block
    assert allocator.pending_copies == ((2, 3),)
    assert forked.allocation.block_ids == [1, 3]
    forked.make_writable(6)
    ring.make_writable(6)
    assert len(allocator.pending_copies) == 1
    ring.free()
    assert allocator.num_blocks_in_use == 2


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 8), (8, 8)])
def test_positions_beyond_the_tokens_have_no_slot(allocator, start, stop):
    ring = Ring(allocator, num_tokens=7, window=3)
    with pytest.raises(CacheArgumentError, match=r"no slots for positions .*; there are 7"):
        ring.slots(start, stop)


def test_a_freed_ring_has_no_slots(allocator):
    ring = Ring(allocator, num_tokens=7, window=3)
    ring.free()
    assert ring.slots(0, 0) == []
    with pytest.raises(CacheArgumentError, match=r"no slots for positions \[0, 1\); there are 0"):
        ring.slots(0, 1)
    with pytest.raises(BlockStateError):
        ring.free()


@pytest.mark.parametrize(
    ("num_tokens", "window", "message"),
    [
        (4, None, r"window is None; it must be an int, 1 or more \(tokens that a layer sees\)"),
        (None, 4, r"num_tokens is None; it must be an int, 0 or more \(positions in all\)"),
        (4, 0, "window is 0; it must be an int, 1 or more"),
        (4, 2.0, "window is 2.0; it must be an int, 1 or more"),
        (4, True, "window is True; it must be an int"),
        (-1, 2, "num_tokens is -1; it must be an int, 0 or more"),
    ],
)
def test_numbers_that_make_no_ring_are_refused(allocator, num_tokens, window, message):
    before = snapshot_of(allocator)
    with pytest.raises(CacheArgumentError, match=message):
        Ring(allocator, num_tokens, window)
    assert snapshot_of(allocator) == before
