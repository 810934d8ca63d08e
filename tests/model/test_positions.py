"""Which positions a model gives when it is passed none, against what forwards with positions compute."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.model import positions
from hf_paged_cache.model.positions import numbers_columns

from ..conformance import zoo
from ..reference import assert_same, run

NUMBER_COLUMNS = ["llama", "gpt2", "lfm2", "bert@decoder", "mpt"]
DO_NOT = {
    "bamba": "starts at 0 again behind a cache",
    "roberta@decoder": "counts from the id of padding",
    "opt": "follows the mask",
}


@pytest.mark.parametrize("name", [*NUMBER_COLUMNS, *DO_NOT])
def test_models_are_known_by_their_code_or_by_what_they_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name)
    before = model.training
    assert numbers_columns(model) == (name in NUMBER_COLUMNS)
    monkeypatch.setattr(positions, "_says_so", lambda kind: False)  # and by what they do alone
    assert numbers_columns(model) == (name in NUMBER_COLUMNS)
    assert model.training == before


@pytest.mark.parametrize("name", [*NUMBER_COLUMNS[:2], *DO_NOT])
@pytest.mark.parametrize("num_first", [12, 40])
def test_a_prefill_without_positions_changes_no_later_call(name: str, num_first: int) -> None:
    model, generator = zoo.build(name), torch.Generator().manual_seed(5)
    prompt = torch.randint(5, 100, (1, 40), generator=generator)
    other = torch.cat([prompt[:, :34], torch.randint(5, 100, (1, 60), generator=generator)], 1)
    cache = PagedPrefixCache(model, block_size=8, num_blocks=100)
    with torch.no_grad():
        for part in prompt.split(num_first, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    cache.reset()
    assert_same(run(model, input_ids=other), run(model, cache, input_ids=other))
    (row,) = cache.last_call.rows
    assert row.matched_tokens == (32 if name in NUMBER_COLUMNS else 0)
    cache.check()
