"""Every scene gives on a device what `DynamicCache` gives there, logits included, and reuses.

Each is played in bf16 on a device that is not the default, or in fp32 on two that share the model's layers; with
zeros in place of what is reused on a CPU (`tests.promise`). A simulated device sums as exactly in bf16 as in fp32, so bf16 is held to the
same tolerance: that is stricter than to differ no more than `DynamicCache` continued from the same prefix.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache
from tests.conformance import examine
from tests.promise.test_on_an_accelerator import SCENES
from tests.reference import PROMPT, TOLERANCE, assert_same, batch, row, run, zero_blocks
from tests.scenes import play

from .counts import PLACES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

PLAYED = ("bf16 on the second device", "fp32 on two devices")


@pytest.mark.parametrize("number", range(len(SCENES)), ids=[scene.__name__ for scene in SCENES])
def test_a_scene_is_the_same_on_a_device(number: int) -> None:
    """Every second scene in each place; a simulated device is slow."""
    place = PLAYED[number % 2]
    play(SCENES[number], PLACES[place](), zeroes=False)


# A model of each kind of layer that is held: with a window, in chunks, latent, with an index, and with layers that read
# the keys and values of another one.
KINDS = ("mistral", "llama4_text", "deepseek_v3", "glm_moe_dsa", "gemma4_text")
MOVING = ("full hit", "padded batch", "batched beams", "after eviction", "every row padded")


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_layer_is_identical_in_the_scenes_that_move_rows_and_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "SCENES", {scene: examine.SCENES[scene] for scene in MOVING})
    monkeypatch.setattr(
        examine, "build", lambda name, of=examine.build: of(name).to(device="sim:1", dtype=torch.bfloat16)
    )
    result = examine.examine(name, windows=(3,))
    assert (result.outcome, result.reason) == ("identical", "")
    assert {*MOVING} <= {*result.cells}
    assert set(result.cells.values()) == {examine.SAME}


# Rows by hand.


def by_hand(model: PreTrainedModel, kept: Any) -> list[torch.Tensor]:
    """The logits of forwards between which rows are cropped, multiplied, reordered, selected and copied."""
    logits = []

    def forward(rows: list[list[int]], cache: Any = kept) -> None:
        with torch.no_grad():
            output = model(
                torch.tensor(rows, device=model.device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        logits.append(output.logits)

    forward([PROMPT])
    forward([[token] for token in row((2, 7))][:1])
    kept.crop(-5)
    forward([row((3, 4))])
    kept.batch_repeat_interleave(4)
    for step in range(3):
        forward([[5 + step], [6 + step], [7 + step], [8 + step]])
        kept.reorder_cache(torch.tensor([1, 1, 3, 0], device=model.device))
    copied = copy.deepcopy(kept)
    forward([[9], [10], [11], [12]])
    forward([[13], [14], [15], [16]], copied)
    # of the host: `DynamicCache` indexes the layers of all devices with them
    kept.batch_select_indices(torch.tensor([2, 0]))
    forward([row((4, 20)), row((5, 20))])
    return logits


@pytest.mark.parametrize("place", PLAYED)
def test_rows_by_hand_are_the_same_on_a_device(place: str) -> None:
    model = PLACES[place]()
    wanted = by_hand(model, DynamicCache(config=model.config))
    cache = PagedPrefixCache(model)
    for _ in range(2):
        got = by_hand(model, cache)
        for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            distance = float((mine - theirs).abs().max()) / float(theirs.abs().max())
            assert distance <= TOLERANCE, f"forward {number}: logits differ by {distance:.1e} of their scale"
        cache.reset()
        cache.check()


@pytest.mark.parametrize("place", PLAYED)
def test_scores_are_the_same_on_a_device(place: str) -> None:
    model = PLACES[place]()
    continuations = [row((2, 3), (3, 4)), row((2, 3), (4, 20)), row((2, 3))]
    cache = PagedPrefixCache(model)
    for _ in range(2):
        for tokens, score in zip(continuations, cache.score(PROMPT, continuations), strict=True):
            ids = torch.tensor([[*PROMPT, *tokens]], device=model.device)
            with torch.no_grad():
                logits = model(ids[:, :-1], use_cache=False).logits[0, len(PROMPT) - 1 :].float()
            wanted = logits.log_softmax(dim=-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()
            assert score.log_probs == pytest.approx(wanted, rel=TOLERANCE)
    # what all begin with, and the tails, once a turn
    assert cache.stats().computed_tokens == 2 * (50 + 3 + 3 + 19) - 48


@pytest.mark.parametrize("place", PLAYED)
def test_a_look_at_cached_blocks_sees_on_a_device_what_has_changed(place: str) -> None:
    model = PLACES[place]()
    cache = PagedPrefixCache(model)
    prompts = batch(PROMPT, row((1, 45), (2, 5)))
    reference = run(model, **prompts)
    for is_known in (False, True):
        assert_same(reference, run(model, cache, **prompts))
        assert (cache.last_call.reused_tokens >= 90) == is_known
        assert not cache.verify().differing
    zero_blocks(cache)
    assert cache.verify().differing
    assert_same(reference, run(model, cache, **prompts))
