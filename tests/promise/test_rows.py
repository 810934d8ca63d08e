"""Rows of a call, as a cache of transformers: what they answer is what a `DynamicCache` answers."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import TOLERANCE, AtStep, assert_same, batch, row, run


def test_rows_that_go_on_with_new_tokens_are_nobody_elses_meanwhile(model: PreTrainedModel) -> None:
    """A call that begins inside of theirs has the same prefix, and would go on in their memory."""
    cache, prompt = PagedPrefixCache(model), row((1, 60))
    for _ in range(2):  # the second one knows how keys and values look
        said = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=4, do_sample=False)
    turn = torch.cat([said, torch.tensor([row((2, 5))])], 1)
    other = torch.tensor([prompt + row((3, 30))])
    new = {"input_ids": turn[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(turn)}
    wanted = run(model, input_ids=turn, max_new_tokens=12)
    nested = AtStep(3, lambda: run(model, cache, input_ids=other))
    assert_same(wanted, run(model, cache, **new, max_new_tokens=12, logits_processor=[nested]))


# Each of these gave other logits than a `DynamicCache`, in silence.


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices"])
def test_rows_of_beams_change_places_whole_once_their_call_is_over(move: str, model: PreTrainedModel) -> None:
    prompts, found = batch(row((1, 12)), row((2, 9))), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=4)):
        run(model, cache, **prompts, num_beams=2, num_return_sequences=2)
        getattr(cache, move)(torch.tensor([2, 3, 0, 1]))
        mask = torch.tensor([[0] * 3 + [1] * 15] * 2 + [[1] * 18] * 2)
        with torch.no_grad():
            given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            found.append(model(torch.tensor([[5]] * 4), **given, past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() <= TOLERANCE * found[0].abs().max()


def test_a_cache_goes_on_with_the_rows_that_were_passed_on(model: PreTrainedModel) -> None:
    ids, found = torch.tensor([row((1, 20))]), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        first = run(model, cache, input_ids=ids)
        run(model, first.past_key_values, input_ids=torch.cat([first.sequences, ids[:, :3]], 1))
        with torch.no_grad():
            found.append((cache.get_seq_length(), model(ids[:, :1], past_key_values=cache).logits))
    assert found[0][0] == found[1][0]
    assert (found[0][1] - found[1][1]).abs().max() <= TOLERANCE * found[0][1].abs().max()


def test_layers_that_are_trimmed_by_hand_are_the_rows(model: PreTrainedModel) -> None:
    ids, found = torch.tensor([row((1, 17))]), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        with torch.no_grad():
            model(ids[:, :16], past_key_values=cache)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :10], layer.values[:, :, :10]
            assert cache.get_seq_length() == 10
            found.append(model(ids[:, 16:], past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() <= TOLERANCE * found[0].abs().max()


def test_a_copy_of_edited_rows_is_not_kept(model: PreTrainedModel) -> None:
    cache, ids = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 24))])
    with torch.no_grad():
        model(ids[:, :16], past_key_values=cache, logits_to_keep=1)
    cache.layers[0].keys.zero_()
    copied = copy.deepcopy(cache)
    del cache
    copied.reset()
    assert_same(run(model, input_ids=ids), run(model, copied, input_ids=ids))


def test_positions_that_a_custom_generate_gives_its_steps_are_read(model: PreTrainedModel) -> None:
    def generate(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        rows = given["past_key_values"]
        logits = model(input_ids, past_key_values=rows, logits_to_keep=1).logits
        for number in range(9):
            token = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
            at = torch.tensor([[40 + number]])
            logits = model(input_ids=token, past_key_values=rows, position_ids=at, logits_to_keep=1).logits
        return input_ids

    cache = PagedPrefixCache(model, block_size=4)
    said = model.generate(torch.tensor([row((1, 24))]), custom_generate=generate, past_key_values=cache)
    assert_same(run(model, input_ids=said), run(model, cache, input_ids=said))
