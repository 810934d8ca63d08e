"""What contents look like follows the pool, whatever becomes of its tensors."""

from __future__ import annotations

import torch

from hf_paged_cache.kv.states import StateKey
from hf_paged_cache.store.block_store import BlockStore
from hf_paged_cache.store.content_layout import ContentLayout
from hf_paged_cache.store.state_snapshots import StateRules
from hf_paged_cache.tiers.base import BLOCKS, STATES
from hf_paged_cache.tiers.host import HostTier

from ..kv.through_slabs import write as write_blocks


def write(store: BlockStore, dtype: torch.dtype) -> None:
    new = torch.ones(1, 2, 4, 8, dtype=dtype)
    write_blocks(store.pool, 0, {"key": new, "value": new}, [1])


def test_the_layout_is_that_of_the_tensors_there_are_now() -> None:
    tier = HostTier(2**16)
    store = BlockStore(4, 8, layers={0}, tiers=[tier])
    layout = ContentLayout(store.pool, store.windows, store.states, [tier])
    assert not layout.has_tensors
    store.pool.all.ensure_capacity(8)
    write(store, torch.float32)
    (part,) = layout.parts()[BLOCKS]
    assert part.num_bytes == 2 * 2 * 4 * 8 * 4
    assert tier.parts_of(BLOCKS) == (part,)
    assert layout.is_now(BLOCKS, (part,))
    write(store, torch.float64)  # widens the tensors
    (wider,) = layout.parts()[BLOCKS]
    assert wider.num_bytes == 2 * part.num_bytes
    assert tier.parts_of(BLOCKS) == (wider,)
    assert not layout.is_now(BLOCKS, (part,))
    store.pool.clear()
    assert not layout.has_tensors


def test_snapshots_have_as_many_bytes_as_blocks() -> None:
    tier = HostTier(2**16)
    store = BlockStore(4, 8, layers={0}, states=StateRules(256), bytes_per_block=512, tiers=[tier])
    store.pool.all.ensure_capacity(8)
    write(store, torch.float32)
    layout = ContentLayout(store.pool, store.windows, store.states, [tier])
    assert STATES not in layout.parts()
    layout.see_states({StateKey(1, "recurrent", 0): torch.ones(1, 64)})
    (part,) = layout.parts()[STATES]
    assert part.num_bytes == 256
    shelves = tier._shelves
    assert shelves[STATES].max_bytes == shelves[BLOCKS].max_bytes == 2**15
