"""What nobody wrote is never read: NaN in all free blocks and in the unwritten slots of blocks in use changes nothing.

A NaN survives masking: attention multiplies it by zero, which gives NaN. So one read of one such slot shows in the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from hf_paged_cache import PagedPrefixCache

from ..internals import (
    before_each_write,
    spoil_one_written_slot,
    spoil_room_before_each_write,
    spoil_unwritten_slots,
)
from ..reference import batch, is_same, row, run
from ..tiny_models import build, tiny
from .test_generate_equivalence import SCENES, Player

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Poison a layer before each of its writes; gets the numbers of slots, and on rows of numbers."""
    counts: list[int] = []
    before_each_write(
        monkeypatch, lambda blocks, layer_idx: counts.append(spoil_unwritten_slots(blocks, layer_idx, torch.nan))
    )
    spoil_room_before_each_write(monkeypatch, torch.nan, counts)
    return counts


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_poison_in_what_was_never_written_changes_nothing(
    scene: Callable[[Player], None], attention: str, name: str, poisoned: list[int]
) -> None:
    scene(Player(tiny(name), attention, [], zeroed_hit=None))
    assert max(poisoned) > 0


@pytest.mark.parametrize("attention", ["paged", "gather"])
def test_poison_in_one_slot_that_is_read_is_seen(attention: str) -> None:
    """The aid itself works: one reused slot that holds NaN makes NaN of the logits."""
    model = tiny("llama")
    cache = PagedPrefixCache(model, attention=attention)
    reference = run(model, **batch(row((1, 50))))
    run(model, cache, **batch(row((1, 50))))
    cache.reset()
    spoil_one_written_slot(cache, torch.nan)
    output = run(model, cache, **batch(row((1, 50))))
    assert not is_same(reference, output)
    assert output.logits[0].isnan().any()


@pytest.mark.parametrize("attention", ["paged", "gather"])
def test_a_call_that_gave_nan_leaves_none_to_calls_behind_it(attention: str) -> None:
    """A row has padding where a row of the call before had tokens, whose keys and values were not finite."""
    model = build("llama")
    weights = copy.deepcopy(model.state_dict())
    cache, given = PagedPrefixCache(model, attention=attention), batch(row((1, 40)), row((2, 24)))
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
