"""Keys and values with each output flag and without: where they differ, nothing is kept, and nowhere else.

Compared in plain forwards on the cache that transformers makes, for a quarter of the types; the conformance test plays calls with
flags and without on all of them.
"""

from __future__ import annotations

import inspect
import random
import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.model.cache_adapters import cache_argument, present_cache
from hf_paged_cache.model.conditioning import Conditioning
from hf_paged_cache.model.probing import dynamic_cache

from ..internals import depends_on_length
from ..reference import assert_same, batch, is_same, row, run
from . import zoo
from .report import load
from .scenes import OUTPUT_FLAGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 2  # of the quarter that is run; another one with each release
HELD = [name for name, result in load()["types"].items() if result["outcome"] == "identical"]
KNOWN_TO_DIFFER = {(f"falcon{variant}", "output_attentions") for variant in ("", "@alibi", "@new_decoder")}
PROMPT = row((1, 45))
DRAWN = sorted({"falcon", *random.Random(SEED).sample(HELD, len(HELD) // 4)})
WAYS = [*product((0, 1), (False, True))]  # which prompts, and whether the flag is passed


def held_after(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **flags: bool) -> list[torch.Tensor]:
    """What layers hold after one forward: keys, values and states."""
    cache: Any = dynamic_cache(model)
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": True, cache_argument(model): cache, **flags}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**present_cache(model, arguments))
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values", "indexer_keys")]
    for layer in cache.layers:
        held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [tensor for tensor in held if tensor is not None]


def differs_with(model: PreTrainedModel, flag: str) -> bool:
    """Whether anything differs in one row, or in two of which one is padded."""
    ids = torch.randint(1, zoo.vocabulary(model), (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for rows in (slice(0, 1), slice(0, 2)):
        without, with_flag = (held_after(model, ids[rows], mask[rows], **{flag: value}) for value in (False, True))
        for one, other in zip(without, with_flag, strict=True):
            if not torch.allclose(one, other, rtol=0, atol=1e-6 * float(one.abs().max()), equal_nan=True):
                return True
    return False


@pytest.mark.parametrize("name", [name for name in DRAWN if name.partition("@")[0] in zoo.model_types()])
def test_what_is_computed_with_an_output_flag_is_kept_just_where_it_is_the_same(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = zoo.build(name)
        conditioning = Conditioning(model)
        conditioning.digest()
        takes = inspect.signature(model.forward).parameters
        for flag in OUTPUT_FLAGS:
            if flag == "output_router_logits" and flag not in takes:
                continue
            differs, changes = differs_with(model, flag), conditioning.changes_with(flag)
            # where rope depends on length, nothing is tried
            assert differs <= changes <= (differs or depends_on_length(model)), (flag, differs, changes)


@pytest.mark.parametrize(("name", "flag"), sorted(KNOWN_TO_DIFFER))
def test_the_comparison_sees_another_path_through_attention_and_only_with_sdpa(name: str, flag: str) -> None:
    model_class, config = zoo.configuration(name)
    assert differs_with(zoo.instantiate(model_class, config, 0), flag)
    config._attn_implementation = "eager"
    eager = zoo.instantiate(model_class, config, 0)
    conditioning = Conditioning(eager)
    conditioning.digest()
    assert not differs_with(eager, flag)
    assert not conditioning.changes_with(flag)


@pytest.mark.parametrize(("name", "flag"), sorted(KNOWN_TO_DIFFER))
def test_where_a_flag_changes_keys_calls_with_it_and_without_are_right_in_all_orders(name: str, flag: str) -> None:
    model = zoo.build(name)
    prompts = [batch(PROMPT), batch(row((1, 40), (2, 6)), row((1, 24), (3, 9)))]
    references = {(number, asks): run(model, **prompts[number], **{flag: asks}) for number, asks in WAYS}
    assert not is_same(references[0, False], references[0, True])
    for order in product((False, True), repeat=2):
        cache = PagedPrefixCache(PrefixStore(model, block_size=8, num_blocks=256))
        for asks in order:
            for number in (0, 1):
                output = run(model, cache, **prompts[number], **{flag: asks})
                assert_same(references[number, asks], output)
                cache.check()
        reuses = cache.last_call.reused_tokens > 0
        assert reuses == (not order[-1])  # of the calls without, and within one
        if order[-1]:
            assert {said.stopped for said in cache.last_call.rows} == {
                f"keys and values of this model depend on {flag}"
            }
