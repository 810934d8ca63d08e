"""What nobody wrote is never read: NaN in all blocks that hold nothing, and in the room of rows, changes nothing.

A NaN survives masking: attention multiplies it by zero, which gives NaN. So one read of one such slot shows in the
logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.rows.layers import RowsLayer

from ..internals import (
    before_each_write,
    spoil_one_written_slot,
    spoil_room_before_each_write,
    spoil_unwritten_slots,
)
from ..reference import batch, is_same, row, run
from ..tiny_models import build, tiny
from .test_generate_equivalence import MOVING, Player

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Poisoned:
    """Stores whose free room is poisoned, and how much of it was: slots of their pools, numbers of rows."""

    stores: list[PrefixStore] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Poisoned:
    """Poison a layer before each of its writes, in rows and in pools."""
    poisoned = Poisoned()

    def poison(layer: RowsLayer) -> None:
        for store in poisoned.stores:
            if layer.layer_idx in store.blocks.pool.layer_indices:
                poisoned.slots.append(spoil_unwritten_slots(store.blocks, layer.layer_idx, torch.nan))

    before_each_write(monkeypatch, poison)
    spoil_room_before_each_write(monkeypatch, torch.nan, poisoned.numbers)
    return poisoned


class PoisonedPlayer(Player):
    """Says which stores it plays on."""

    def __init__(self, model: PreTrainedModel, poisoned: Poisoned) -> None:
        self._poisoned = poisoned
        super().__init__(model, [])

    def build(self, **sizes: int) -> None:
        super().build(**sizes)
        self._poisoned.stores.append(self.store)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("scene", MOVING, ids=lambda scene: scene.__name__)
def test_poison_in_what_was_never_written_changes_nothing(
    scene: Callable[[Player], None], name: str, poisoned: Poisoned
) -> None:
    scene(PoisonedPlayer(tiny(name), poisoned))
    assert max(poisoned.slots) > 0
    assert max(poisoned.numbers) > 0


def test_poison_in_one_slot_that_is_read_is_seen() -> None:
    """The aid itself works: one reused slot that holds NaN makes NaN of the logits."""
    model = tiny("llama")
    cache = PagedPrefixCache(model)
    reference = run(model, **batch(row((1, 50))))
    run(model, cache, **batch(row((1, 50))))
    cache.reset()
    spoil_one_written_slot(cache, torch.nan)
    output = run(model, cache, **batch(row((1, 50))))
    assert not is_same(reference, output)
    assert output.logits[0].isnan().any()


def test_a_call_that_gave_nan_leaves_none_to_calls_behind_it() -> None:
    """A row has padding where a row of the call before had tokens, whose keys and values were not finite."""
    model = build("llama")
    weights = copy.deepcopy(model.state_dict())
    cache, given = PagedPrefixCache(model), batch(row((1, 40)), row((2, 24)))
    reference = run(model, **given)
    run(model, cache, **given)
    for weight in model.parameters():
        weight.data.fill_(torch.nan)  # what torch does not count as a change is none once it is undone
    assert run(model, cache, **batch(row((3, 45)), row((4, 45)))).logits[0].isnan().all()
    for name, weight in model.named_parameters():
        weight.data.copy_(weights[name])
    for _ in range(2):
        assert is_same(reference, run(model, cache, **given))
        assert cache.last_call.reused_tokens > 0
