"""What no allocation can ask for wrongly, asked for wrongly; matching, and what a repair derives."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.block_states import BlockStates
from hf_paged_cache.errors import BlockStateError, CacheArgumentError


@pytest.fixture
def chain(hashes):
    return hashes(range(12))


@pytest.fixture
def states(chain):
    """Blocks 1 to 6 are held, the first four of them with their hashes."""
    states = BlockStates(9)
    for block_id, block_hash in zip(states.take(6, b""), chain[:4], strict=False):
        states.set_hash(block_id, block_hash)
    return states


def test_dropping_what_nobody_holds_is_refused_at_the_block(states):
    with pytest.raises(BlockStateError, match="block 7 freed with ref_count 0"):
        states.drop([7])
    states.check([[1, 2, 3, 4, 5, 6]])


def test_states_without_a_block_to_hand_out_are_refused():
    with pytest.raises(CacheArgumentError, match="num_blocks is 1; give at least 2, as block 0 is never handed out"):
        BlockStates(1)


def test_a_hole_stops_the_match(states, chain):  # scenario 27
    states.remove_hash(2)
    assert states.match(chain, b"") == [1]
    assert states.find(chain[2], b"") == 3


def test_match_asks_for_no_hash_after_the_first_miss(states, chain):
    asked = []
    assert states.match((asked.append(h) or h for h in chain), b"") == [1, 2, 3, 4]
    assert len(asked) == 5


def test_rebuild_derives_the_map_and_drops_what_nobody_will_compute(states, chain):
    states.set_hash(5, chain[4], is_computed=False)
    states.set_hash(6, chain[5], is_computed=False)
    states.blocks = {b"wrong": 1}
    states.rebuild([[5]])
    states.check([[5]])
    assert (states.find(chain[4], b""), states.find(chain[5], b"")) == (5, None)
    assert states.uncomputed == {5}
    assert states.match(chain, b"") == [1, 2, 3, 4]


def test_rebuild_after_an_interrupted_growth_cuts_to_the_old_number():
    states = BlockStates(3)
    states.ref_counts.extend([0, 0])
    states.hashes.extend([None, None])
    states.free += [4, 3]
    states.rebuild([])
    states.check([])
    states.grow(5)
    states.check([])
    assert states.free == [2, 1, 4, 3]
