"""What nobody wrote is never read: NaN in the room of rows changes nothing; of blocks test_tenants.py asks it.

A NaN survives masking: attention multiplies it by zero, which gives NaN. So one read of one such slot shows in the
logits.
"""

import copy
from collections.abc import Callable

import pytest
import torch

from hf_paged_cache import PagedPrefixCache

from ..conformance.player import Measured, Player
from ..conformance.scenes import SCENES
from ..internals import spoil_room_before_each_write
from ..reference import batch, is_same, row, run
from ..tiny_models import build, tiny
from .test_ways_to_generate import many_turns

MOVING = ("padded batch", "known and unknown rows", "batched beams", "chunked prefill", "after eviction")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("scene", [*(SCENES[name] for name in MOVING), many_turns], ids=lambda scene: scene.__name__)
def test_poison_in_room_that_was_never_written_changes_nothing(
    scene: Callable[[Player], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    spoil_room_before_each_write(monkeypatch, torch.nan, numbers)
    scene(Player("", tiny(name), Measured(), [], zeroed=False))
    assert max(numbers) > 0


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
