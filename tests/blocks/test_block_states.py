"""The moves between states that no allocation can ask for wrongly, asked for wrongly."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.block_states import BlockStates
from hf_paged_cache.errors import BlockStateError, CacheArgumentError


def test_dropping_what_nobody_holds_is_refused_at_the_block():
    states = BlockStates(9)
    states.take(2)
    with pytest.raises(BlockStateError, match="block 7 freed with ref_count 0"):
        states.drop([7])
    states.check([[1, 2]])


def test_taking_more_than_there_is_changes_nothing():
    states = BlockStates(3)
    with pytest.raises(BlockStateError):
        states.take(3)
    states.check([])


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
