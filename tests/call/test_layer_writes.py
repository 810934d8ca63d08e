"""What the layers of one forward write: only what was scheduled, each layer once, and none left out."""

from __future__ import annotations

import re
from array import array

import pytest
import torch

from hf_paged_cache import PoolArgumentError
from hf_paged_cache.attention.group_columns import Forward
from hf_paged_cache.attention.view import View
from hf_paged_cache.call.held_steps import HeldSteps
from hf_paged_cache.call.layer_writes import LayerWrites
from hf_paged_cache.call.scheduled_forward import ScheduledForward
from hf_paged_cache.kv.slot_mapping import RowLayout, SlotMapping
from hf_paged_cache.store.block_store import BlockStore

from ..kv.reading import of_slots

FORWARD = ScheduledForward(0, 3, (0,), None, SlotMapping([4, 5, 6]))  # one row of three tokens


def states(*shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name in ("key", "value")}


@pytest.fixture
def store() -> BlockStore:
    store = BlockStore(4, 8)
    store.pool.all.ensure_capacity(8)
    return store


@pytest.fixture
def writes(store: BlockStore) -> LayerWrites:
    view = View(store.pool, {}, keeps_copies=False)
    writes = LayerWrites(store, view, HeldSteps(store, view))
    writes.start()
    return writes


def test_what_was_scheduled_is_written_and_read(writes: LayerWrites, store: BlockStore) -> None:
    read = writes.write(1, states(1, 2, 3, 5), FORWARD)
    assert read["key"].shape == (1, 2, 3, 5)
    assert writes.written == {(1, "key"), (1, "value")}
    assert store.pool.layer_indices == [1]
    writes.require_all()


@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 3, 5), (1, 1, 2, 3, 5)])
def test_states_that_have_no_four_dimensions_are_refused_by_their_shape(
    writes: LayerWrites, shape: tuple[int, ...]
) -> None:
    with pytest.raises(PoolArgumentError, match=re.escape(str(shape))):
        writes.write(0, states(*shape), FORWARD)
    writes.write(1, states(1, 2, 3, 5), FORWARD)
    with pytest.raises(PoolArgumentError, match=re.escape(str(shape))):  # of a layer that was written before, too
        writes.write(1, {"other": torch.ones(shape)}, FORWARD)
    assert writes.written == {(1, "key"), (1, "value")}


@pytest.mark.parametrize("keeps_copies", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])  # in a block, and over the ends of three
def test_the_tokens_of_one_row_are_written_and_read(store: BlockStore, num_tokens: int, *, keeps_copies: bool) -> None:
    view = View(store.pool, {}, keeps_copies=keeps_copies)
    writes, length = LayerWrites(store, view, HeldSteps(store, view)), 5 + num_tokens
    layout = RowLayout(b"", 0, array("q", range(length)), [1, 2, 3])
    past, new = states(1, 2, 5, 5), {name: torch.rand(1, 2, num_tokens, 5) for name in ("key", "value")}
    view.start_forward(Forward(lambda: [layout], 1, 0, 5))
    writes.write(0, past, FORWARD._replace(start=0, stop=5, slot_mapping=SlotMapping(range(4, 9))))
    writes.start()
    view.start_forward(Forward(lambda: [layout], 1, 5, length))
    slots = SlotMapping(range(9, 9 + num_tokens))
    with torch.no_grad():
        read = writes.write(0, new, FORWARD._replace(start=5, stop=length, slot_mapping=slots))
    held = store.pool.gather(0, of_slots(torch.arange(4, 4 + length)[None]))
    for name, tensor in read.items():
        whole = torch.cat((past[name], new[name]), dim=2)
        assert tensor.equal(whole)
        assert held[name].equal(whole)
