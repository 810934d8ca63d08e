"""What the layers of one forward write: only what was scheduled, each layer once, and none left out."""

from __future__ import annotations

import re
from array import array
from typing import Any

import pytest
import torch

from hf_paged_cache import ForwardMismatchError, PoolArgumentError
from hf_paged_cache.attention.contiguous import ContiguousReader
from hf_paged_cache.attention.gather import GatherReader
from hf_paged_cache.call.layer_writes import LayerWrites
from hf_paged_cache.call.scheduled_forward import ScheduledForward
from hf_paged_cache.kv.slot_mapping import ReadSource, RowLayout, SlotMapping
from hf_paged_cache.store.block_store import BlockStore

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
    writes = LayerWrites(store, GatherReader(store.pool))
    writes.start()
    return writes


def test_what_was_scheduled_is_written_and_read(writes: LayerWrites, store: BlockStore) -> None:
    read = writes.write(1, states(1, 2, 3, 5), FORWARD)
    assert read["key"].shape == (1, 2, 3, 5)
    assert writes.written == {(1, "key"), (1, "value")}
    assert store.pool.layer_indices == [1]
    writes.require_all()


@pytest.mark.parametrize("shape", [(2, 2, 3, 5), (1, 2, 4, 5)])
def test_other_rows_and_tokens_than_scheduled_change_nothing(
    writes: LayerWrites, store: BlockStore, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ForwardMismatchError, match=f"writes key of {shape[0]} rows and {shape[2]} tokens"):
        writes.write(0, states(*shape), FORWARD)
    assert store.pool.layer_indices == []
    assert writes.written == set()


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


def test_a_layer_writes_once_in_a_forward(writes: LayerWrites, store: BlockStore) -> None:
    writes.write(0, {"key": torch.zeros(1, 2, 3, 5)}, FORWARD)
    with pytest.raises(ForwardMismatchError, match="layer 0 writes twice"):
        writes.write(0, states(1, 2, 3, 5), FORWARD)
    assert not store.pool.gather(0, ReadSource(torch.tensor([[4, 5, 6]])))["key"].any()
    writes.start()
    writes.write(0, states(1, 2, 3, 5), FORWARD)


def test_a_step_is_written_and_read_once_in_fewer_lines(writes: LayerWrites, store: BlockStore) -> None:
    prompt, slot_mapping = states(1, 2, 3, 5), SlotMapping([7])
    writes.write(0, prompt, FORWARD)
    writes.start()
    layout = RowLayout(b"", 0, array("q", range(4)), [1])
    writes._reader.start_forward(lambda: [layout], 1, 3, 4)
    new = {name: torch.full((1, 2, 1, 5), 2.0) for name in ("key", "value")}
    with torch.no_grad():
        read = writes.write_pair(0, **new, slot_mapping=slot_mapping)
        assert read is not None
        for name, tensor in zip(new, read, strict=True):
            assert tensor.equal(torch.cat((prompt[name], new[name]), dim=2))
        assert writes.written == {(0, "key"), (0, "value")}
        assert writes.write_pair(0, **new, slot_mapping=slot_mapping) is None  # `write` says what is wrong
        assert writes.write_pair(1, **new, slot_mapping=slot_mapping) is None  # a layer that is new
    assert writes.written == {(0, "key"), (0, "value")}


@pytest.mark.parametrize("attention", [ContiguousReader, GatherReader])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])  # in a block, and over the ends of three
def test_the_tokens_of_one_row_are_written_and_read_in_fewer_lines(
    store: BlockStore, attention: Any, num_tokens: int
) -> None:
    reader = attention(store.pool)
    writes, length = LayerWrites(store, reader), 5 + num_tokens
    layout = RowLayout(b"", 0, array("q", range(length)), [1, 2, 3])
    past, new = states(1, 2, 5, 5), {name: torch.rand(1, 2, num_tokens, 5) for name in ("key", "value")}
    slots = SlotMapping(range(4, 9))
    reader.start_forward(lambda: [layout], 1, 0, 5)
    writes.write(0, past, FORWARD._replace(start=0, stop=5, slot_mapping=slots))
    writes.start()
    reader.start_forward(lambda: [layout], 1, 5, length)
    with torch.no_grad():
        read = writes.write_pair(0, **new, slot_mapping=SlotMapping(range(9, 9 + num_tokens)))
    assert read is not None
    held = store.pool.gather(0, ReadSource(torch.arange(4, 4 + length)[None]))
    for name, tensor in zip(new, read, strict=True):
        whole = torch.cat((past[name], new[name]), dim=2)
        assert tensor.equal(whole)
        assert held[name].equal(whole)


@pytest.mark.parametrize(
    "slot_mapping",
    [SlotMapping([4, 5, 7]), SlotMapping([4, 5], [0, 2]), SlotMapping([4, 5]), SlotMapping(range(4, 8))],
    ids=["apart", "chosen", "too few", "too many"],
)
def test_tokens_without_slots_side_by_side_are_left_to_write(store: BlockStore, slot_mapping: SlotMapping) -> None:
    pool, new = store.pool, states(1, 2, 3, 5)
    pool.write(0, new, SlotMapping(range(10, 13)))
    before = [tensor.clone() for tensor in pool.all]
    assert not pool.write_pair(0, new["key"], new["value"], slot_mapping)
    assert not pool.write_pair(0, new["key"][0], new["value"][0], SlotMapping(range(4, 6)))
    assert not pool.write_pair(
        0, new["key"].repeat(2, 1, 1, 1), new["value"].repeat(2, 1, 1, 1), SlotMapping(range(4, 10))
    )
    for tensor, was in zip(pool.all, before, strict=True):
        assert tensor.equal(was)


def test_a_layer_that_always_writes_must_write(writes: LayerWrites, store: BlockStore) -> None:
    with pytest.raises(ForwardMismatchError, match="did not write any layer"):
        writes.require_all()
    store.writing_layers = frozenset({(0, "key"), (2, "key"), (2, "value")})
    writes.write(0, states(1, 2, 3, 5), FORWARD)
    with pytest.raises(ForwardMismatchError, match=r"did not write layers \[2\]"):
        writes.require_all()
