"""Hash <-> block, one to one. Scenarios 26 and 27."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.hashing import HashChain, root_hash
from hf_paged_cache.blocks.prefix_index import PrefixIndex
from hf_paged_cache.errors import BlockStateError


@pytest.fixture
def hashes():
    chain = HashChain(root_hash(), 2)
    chain.extend(range(12))
    return list(chain.hashes())


@pytest.fixture
def index(hashes):
    index = PrefixIndex(8)
    for block_id, block_hash in enumerate(hashes[:4], 1):
        index.insert(block_id, block_hash, computed=True)
    return index


def test_a_hole_stops_the_match(index, hashes):  # scenario 27
    index.remove(2)
    assert index.match(hashes) == [1]
    assert index.get(hashes[2]) == 3


def test_match_asks_for_no_hash_after_the_first_miss(index, hashes):
    asked = []
    assert index.match(asked.append(h) or h for h in hashes) == [1, 2, 3, 4]
    assert len(asked) == 5


def test_rebuild_derives_the_map_and_drops_what_nobody_will_compute(index, hashes):
    index.insert(5, hashes[4], computed=False)
    index.insert(6, hashes[5], computed=False)
    index.blocks = {b"wrong": 1}
    index.rebuild([0, 0, 0, 0, 0, 1, 0, 0])
    assert index.get(hashes[4]) == 5
    assert index.get(hashes[5]) is None
    assert index.uncomputed == {5}
    assert index.match(hashes) == [1, 2, 3, 4]


def test_check_notices_maps_that_are_not_inverse(index, hashes):
    index.digests[1] = None
    with pytest.raises(BlockStateError, match="not inverse"):
        index.check(in_use=())


def test_check_notices_a_cached_block_without_content(index, hashes):
    index.uncomputed.add(1)
    with pytest.raises(BlockStateError, match="must be in use"):
        index.check(in_use=())
