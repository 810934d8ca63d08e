"""Rows of a call, as a cache of transformers: what they answer is what a `DynamicCache` answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache
from hf_paged_cache.rows.memory import runs
from hf_paged_cache.rows.rows import Rows

from ..internals import failing_forward, split_everywhere
from ..reference import TOLERANCE, batch, row, run

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.way("rows")]

PROMPTS = batch(row((1, 40), (2, 9)), row((1, 40), (3, 9)))
MOVES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-5),
    "crop of nothing": lambda cache: cache.crop(0),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "the same row twice": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "multiply": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by a mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
}


@pytest.fixture(params=[False, True], ids=["each row by itself", "held once"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what the rows have in common is held once, whatever that costs."""
    if request.param:
        split_everywhere(monkeypatch)
    return bool(request.param)


def filled(model: PreTrainedModel, cache: Any) -> Any:
    """A cache that has run the prompts, one of ours twice, so that it has reused."""
    with torch.no_grad():
        for _ in range(2 if isinstance(cache, PagedPrefixCache) else 1):
            cache.reset()
            model(**PROMPTS, past_key_values=cache, logits_to_keep=1)
    return cache


def next_logits(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    num_rows = cache.layers[0].keys.shape[0]
    with torch.no_grad():
        return model(torch.full((num_rows, 1), 7), past_key_values=cache).logits


@pytest.mark.parametrize("name", [*MOVES])
def test_rows_that_were_moved_go_on_as_those_of_a_dynamic_cache(
    name: str, model: PreTrainedModel, splits: bool
) -> None:
    ours, theirs = filled(model, PagedPrefixCache(model)), filled(model, DynamicCache(config=model.config))
    assert ours.last_call.reused_tokens >= 90
    for cache in (ours, theirs):
        MOVES[name](cache)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, their in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, their.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(mine.values, their.values, rtol=0, atol=1e-4)
    wanted, found = next_logits(model, theirs), next_logits(model, ours)
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("name", [*MOVES])
def test_a_deep_copy_goes_on_by_itself(name: str, model: PreTrainedModel, splits: bool) -> None:
    cache = filled(model, PagedPrefixCache(model))
    copied = copy.deepcopy(cache)
    before = [layer.keys.clone() for layer in cache.layers]
    MOVES[name](copied)
    next_logits(model, copied)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    wanted, found = next_logits(model, filled(model, DynamicCache(config=model.config))), next_logits(model, cache)
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("number", [1, -50, -1000])
def test_more_than_there_is_is_not_taken_back(number: int, model: PreTrainedModel) -> None:
    cache = filled(model, PagedPrefixCache(model))
    with pytest.raises(CacheArgumentError):
        cache.crop(number)
    assert cache.get_seq_length() == 49


@pytest.mark.parametrize("index", [[2, 0], [-1, 0], []])
def test_rows_that_are_not_there_are_refused(index: list[int], model: PreTrainedModel) -> None:
    cache = filled(model, PagedPrefixCache(model))
    with pytest.raises(CacheArgumentError, match="there are 2 rows"):
        cache.reorder_cache(torch.tensor(index, dtype=torch.int64))


def test_what_a_call_returns_are_its_rows(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model)
    output = run(model, cache, **PROMPTS)
    assert type(output.past_key_values) is Rows
    assert output.past_key_values.get_seq_length() == cache.get_seq_length() == 49 + 5


def test_memory_of_the_call_before_is_taken_over_where_its_rows_go_on(model: PreTrainedModel) -> None:
    cache, prompt = PagedPrefixCache(model), {"input_ids": torch.tensor([row((1, 50))])}
    for _ in range(2):  # the second one knows how keys and values look
        run(model, cache, **prompt).past_key_values.reset()
        cache.reset()
    model.generate(**prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    before = cache.layers[0].keys.untyped_storage().data_ptr()
    model.generate(**prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.layers[0].keys.untyped_storage().data_ptr() == before
    assert cache.last_call.reused_tokens == 49


@pytest.mark.parametrize(
    ("block_ids", "wanted"), [([], []), ([3], [(3, 1)]), ([4, 5, 6, 2, 9, 10], [(4, 3), (2, 1), (9, 2)])]
)
def test_ids_that_follow_one_another_are_runs(block_ids: list[int], wanted: list[tuple[int, int]]) -> None:
    assert [*runs(block_ids)] == wanted


def test_rows_whose_first_forward_died_begin_again(model: PreTrainedModel) -> None:
    """Equal rows, of which one was to run for both."""
    cache, prompts = PagedPrefixCache(model), batch(row((1, 20)), row((1, 20)))
    with torch.no_grad():
        wanted = model(**prompts, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
        for number in (1, 2):
            with pytest.raises(ZeroDivisionError), failing_forward(model, number, ZeroDivisionError()):
                for _ in range(number):
                    cache.reset()
                    model(**prompts, past_key_values=cache, logits_to_keep=1)
            found = model(**prompts, past_key_values=cache, logits_to_keep=1).logits
            assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
            cache.reset()
