"""The moves between states that no allocation can ask for wrongly, asked for wrongly."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks import BlockHash
from hf_paged_cache.blocks.block_states import BlockStates
from hf_paged_cache.blocks.eviction import END, NUM_LINES, ONCE, Reuse
from hf_paged_cache.errors import BlockStateError, CacheArgumentError


def test_dropping_what_nobody_holds_is_refused_at_the_block():
    states = BlockStates(9)
    states.take(2)
    with pytest.raises(BlockStateError, match="block 7 freed with ref_count 0"):
        states.drop([7])
    states.check([[1, 2]])


def test_states_without_a_block_to_hand_out_are_refused():
    with pytest.raises(CacheArgumentError, match="num_blocks is 1; give at least 2, as block 0 is never handed out"):
        BlockStates(1)


def test_rebuild_after_an_interrupted_growth_cuts_to_the_old_number():
    states = BlockStates(3)
    states.ref_counts.extend([0, 0])
    states.index.grow(5)
    states.last_access.extend([0, 0])
    states.rebuild([])
    states.check([])
    states.grow(5)
    states.check([])
    assert list(states.queue) == [3, 4, 1, 2]


@pytest.mark.parametrize(("num_blocks", "density_of_ends"), [(17, 0.0), (113, 1.0)], ids=["sparsest", "oldest"])
def test_what_a_copy_reads_is_spared_inside_a_run_that_is_evicted(num_blocks: int, density_of_ends: float) -> None:
    """Its line is chosen for the blocks before it, and it is no older by class of age, or by little."""
    states = BlockStates(num_blocks)
    states.reuse.lines = bytes(range(NUM_LINES))
    states.reuse.densities[END][:], states.reuse.densities[ONCE][:] = [density_of_ends] * 16, [1.0] * 16
    first, second, third, source = taken = states.take(num_blocks - 1)[:4]
    for block_id in taken:
        states.index.insert(block_id, BlockHash(bytes([block_id]) * 32, b""), computed=True)
    states.drop([first, second])
    states.drop([third])
    states.spare_from_now()
    states.drop([source])
    assert states.take(4) == [first, third, second, source]


def test_what_is_given_back_counts_before_any_block_is_evicted() -> None:
    states, counted = BlockStates(101), Reuse(101)
    taken = states.take(100)
    for block_id in taken:
        states.index.insert(block_id, BlockHash(bytes([block_id]) * 32, b""), computed=True)
    states.drop(taken)
    states.hold(taken[50:60])
    states.drop(taken[50:60])
    counted.given_back(END, 1)
    counted.given_back(ONCE, 99)
    counted.used_again(ONCE, age=49, num_blocks=10)
    counted.given_back(3, 10)
    for reuse in (states.reuse, counted):
        reuse.compute(110)
    assert (states.num_evictions, states.reuse.densities) == (0, counted.densities)
