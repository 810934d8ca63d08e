"""Rows may become longer than the memory that was made for them: on an accelerator that is made for a part of the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.integration import opening

from ..reference import IDS, assert_same, is_same, row, run, zero_blocks
from ..tiny_models import build


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_a_call_that_outgrows_its_memory_is_right_and_kept(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = opening.fill

    def fill_little(
        store: Any, rows: Any, inputs: Any, known: Any, start: int, wanted: int, *more: Any, **options: Any
    ) -> None:
        fill(store, rows, inputs, known, start, min(wanted, 52), *more, **options)

    monkeypatch.setattr(opening, "fill", fill_little)
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=40, **way), PagedPrefixCache(model)
    run(model, cache, input_ids=torch.tensor([row((9, 50))]), max_new_tokens=2)  # shows what the layers keep
    output = run(model, cache, input_ids=IDS, max_new_tokens=40, **way)
    assert_same(reference, output)
    cache.reset()
    ids = torch.cat([output.sequences[:1], IDS[:, :5]], dim=1)
    again = run(model, input_ids=ids)
    assert_same(again, run(model, cache, input_ids=ids))
    assert cache.last_call.reused_tokens >= 80
    zero_blocks(cache)
    assert not is_same(again, run(model, cache, input_ids=ids))
