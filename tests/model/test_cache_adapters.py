"""How forwards want their cache, and what those get that insist on a class of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from hf_paged_cache.model.cache_adapters import cache_argument, own_cache_class, present_cache, shown, take_back_cache

from ..conformance import zoo
from ..reference import row
from .test_support import FROM_5_23

pytestmark = FROM_5_23
IDS = torch.tensor([row((1, 12)), row((2, 12))])


@pytest.fixture(scope="module")
def minimax() -> Any:
    return zoo.build("minimax")


def test_the_name_of_the_cache_is_the_forwards(tiny_llama: Any) -> None:
    assert cache_argument(tiny_llama) == "past_key_values"
    assert cache_argument(zoo.build("mamba2")) == "cache_params"


def test_only_a_class_for_states_in_the_models_own_file_is_one_it_insists_on(tiny_llama: Any, minimax: Any) -> None:
    assert own_cache_class(tiny_llama) is None
    assert own_cache_class(minimax) is MiniMaxCache


def test_other_models_get_the_cache_itself(tiny_llama: Any) -> None:
    arguments = {"past_key_values": DynamicCache(), "use_cache": True}
    assert present_cache(tiny_llama, arguments) is arguments
    assert take_back_cache(arguments) is arguments


def test_a_cache_of_the_models_own_class_is_left_as_it_is(minimax: Any) -> None:
    arguments = {"past_key_values": MiniMaxCache()}
    assert present_cache(minimax, arguments) is arguments
    assert present_cache(minimax, {"past_key_values": None})["past_key_values"] is None


def test_a_view_keeps_states_and_keys_in_the_cache_behind_it(minimax: Any) -> None:
    cache = DynamicCache(config=minimax.config)
    with torch.no_grad():
        for start, stop in ((0, 8), (8, 12)):
            mask = torch.ones_like(IDS[:, :stop])
            given = present_cache(minimax, {"past_key_values": cache, "use_cache": True})
            output = minimax(IDS[:, start:stop], attention_mask=mask, **given)
        whole = minimax(IDS, use_cache=False)
    torch.testing.assert_close(output.logits, whole.logits[:, 8:], atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 12
    assert len(given["past_key_values"]) == len(cache)
    assert take_back_cache(output).past_key_values is cache
    assert take_back_cache((1, given["past_key_values"]))[1] is cache
    assert shown(given["past_key_values"]) is shown(cache) is cache


def test_rows_behind_a_view_are_reordered_with_their_states_as_transformers_own_class_forgets_to(minimax: Any) -> None:
    """So its own beams resume from other rows' states."""
    order = torch.tensor([1, 0])
    with torch.no_grad():
        whole = minimax(IDS, use_cache=False).logits[:, -1:]
        after = {}
        for name, cache in (("ours", DynamicCache(config=minimax.config)), ("own", MiniMaxCache())):
            given = present_cache(minimax, {"past_key_values": cache, "use_cache": True})
            minimax(IDS[:, :11], **given)
            cache.reorder_cache(order)
            after[name] = minimax(IDS[order, 11:], **given).logits
    torch.testing.assert_close(after["ours"], whole[order], atol=1e-4, rtol=0)
    assert (after["own"] - whole[order]).abs().max() > 0.01 * whole.abs().max()
