"""What nobody wrote is never read: NaN in all free blocks and in the unwritten slots of blocks in use changes nothing.

A NaN survives masking: attention multiplies it by zero, which gives NaN. So one read of one such slot shows in the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.call.call import Call
from hf_paged_cache.store.block_store import BlockStore

from ..reference import batch, is_same, row, run
from ..tiny_models import build, tiny
from .test_generate_equivalence import SCENES, Player


def written_slots(store: BlockStore) -> set[int]:
    """Slots that hold K/V that somebody computed: of cached blocks, and of the confirmed tokens of all rows."""
    allocator, block_size = store.allocator, store.block_size
    slots = {
        block_id * block_size + offset
        for block_id in range(1, allocator.num_blocks)
        if allocator.block_hash_of(block_id) is not None
        for offset in range(block_size)
    }
    for call in store.holders():
        for held in [*call.rows.distinct, *call.ended]:
            num_written = max(held.num_known, held.num_confirmed)
            slots |= set(held.table.slots(0, min(num_written, held.table.num_tokens)))
    return slots


def poison(store: BlockStore, layer_idx: int) -> int:
    """Write NaN into all slots of a layer that hold nothing; returns how many. The null block is left as it is."""
    layer, size = store.pool._tensors.get(layer_idx, {}), store.block_size
    empty: list[int] = []
    for held in layer.values():
        empty = sorted(set(range(size, held.shape[0] * size)) - written_slots(store))
        held.transpose(1, 2)[[slot // size for slot in empty], [slot % size for slot in empty]] = torch.nan
    return len(empty)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Poison a layer before each of its writes; yields the numbers of slots."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    counts: list[int] = []

    def poisoning(write: Any) -> Any:
        def poisoning_write(call: Call, layer_idx: int, *states: Any) -> Any:
            counts.append(poison(call.store, layer_idx))
            return write(call, layer_idx, *states)

        return poisoning_write

    monkeypatch.setattr(Call, "write", poisoning(Call.write))
    monkeypatch.setattr(Call, "write_step", poisoning(Call.write_step))
    yield counts
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
@pytest.mark.parametrize("attention", ["contiguous", "gather"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_poison_in_what_was_never_written_changes_nothing(
    scene: Callable[[Player], None], attention: str, name: str, poisoned: list[int]
) -> None:
    scene(Player(tiny(name), attention, [], zeroed_hit=None))
    assert max(poisoned) > 0


@pytest.mark.parametrize("attention", ["contiguous", "gather"])
def test_poison_in_one_slot_that_is_read_is_seen(attention: str) -> None:
    """The aid itself works: one reused slot that holds NaN makes NaN of the logits."""
    model = tiny("llama")
    cache = PagedPrefixCache(model, attention=attention)
    reference = run(model, **batch(row((1, 50))))
    run(model, cache, **batch(row((1, 50))))
    cache.reset()
    store = cache.store.blocks
    slot = min(written_slots(store))
    store.pool._tensors[1]["value"][slot // store.block_size, :, slot % store.block_size] = torch.nan
    output = run(model, cache, **batch(row((1, 50))))
    assert not is_same(reference, output)
    assert output.logits[0].isnan().any()


@pytest.mark.parametrize("attention", ["contiguous", "gather"])
def test_a_call_that_gave_nan_leaves_none_to_calls_behind_it(attention: str) -> None:
    """A row has padding where a row of the call before had tokens, whose keys and values were not finite."""
    model = build("llama")
    weights = copy.deepcopy(model.state_dict())
    cache, given = PagedPrefixCache(model, attention=attention), batch(row((1, 40)), row((2, 24)))
    reference = run(model, **given)
    run(model, cache, **given)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    assert run(model, cache, **batch(row((3, 45)), row((4, 45)))).logits[0].isnan().all()
    model.load_state_dict(weights)
    for _ in range(2):
        assert is_same(reference, run(model, cache, **given))
        assert cache.last_call.reused_tokens > 0
