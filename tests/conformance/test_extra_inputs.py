"""Inputs of a token's length besides ids: they shape keys and values, so nothing is reused and nothing committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hf_paged_cache import PagedPrefixCache

from ..reference import TOLERANCE, row, run
from .zoo import build

if TYPE_CHECKING:
    pass

IDS = torch.tensor([row((1, 40))])


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("bert@decoder", "token_type_ids"),
        ("hrm_text", "token_type_ids"),
        ("roc_bert@decoder", "input_shape_ids"),
        ("roc_bert@decoder", "input_pronunciation_ids"),
    ],
)
def test_what_an_input_besides_ids_conditions_is_right_and_never_reused(name: str, argument: str) -> None:
    model = build(name)
    extra = {argument: torch.ones_like(IDS)}
    cache = PagedPrefixCache(model, block_size=8)
    run(model, cache, input_ids=IDS)
    cache.reset()
    known = cache.stats().num_cached_blocks
    with torch.no_grad():
        plain, reference = model(IDS).logits, model(IDS, **extra).logits
        scale = float(reference.abs().max())
        assert float((plain - reference).abs().max()) > 1e-2 * scale, "the input changes nothing"
        for _ in range(2):
            logits = model(IDS, **extra, past_key_values=cache).logits
            assert float((logits - reference).abs().max()) <= TOLERANCE * scale
            (counts,) = cache.last_call.rows
            assert (counts.matched_tokens, counts.reused_tokens) == (0, 0)
            assert counts.stopped == f"the argument {argument} may condition keys and values"
            cache.reset()
            assert cache.stats().num_cached_blocks == known
