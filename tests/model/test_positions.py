"""Which positions a model gives when it is passed none, against what forwards with positions compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad as pad_with_zeros

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.model import trial
from hf_paged_cache.model.trial import default_numbering

from ..conformance import zoo
from ..reference import assert_same, run

NUMBERINGS = {
    **dict.fromkeys(("llama", "gpt2", "lfm2", "bert@decoder"), "columns"),
    **dict.fromkeys(("opt",), "tokens"),
    "bamba": None,  # starts at 0 again behind a cache
    "roberta@decoder": None,  # counts from the id of padding
}


@pytest.mark.parametrize("name", NUMBERINGS)
def test_models_are_known_by_their_code_or_by_what_they_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name)
    before = model.training
    assert default_numbering(model) == NUMBERINGS[name]
    monkeypatch.setattr(trial, "_says_so", lambda kind: False)  # and by what they do alone
    assert default_numbering(model) == NUMBERINGS[name]
    assert model.training == before


@pytest.mark.parametrize("name", NUMBERINGS)
@pytest.mark.parametrize("num_first", [12, 40])
@pytest.mark.parametrize("pad", [0, 3])
def test_a_prefill_without_positions_changes_no_later_call(name: str, num_first: int, pad: int) -> None:
    model, generator = zoo.build(name), torch.Generator().manual_seed(5)
    prompt = torch.randint(5, 100, (1, 40), generator=generator)
    other = torch.cat([prompt[:, :34], torch.randint(5, 100, (1, 60), generator=generator)], 1)
    cache = PagedPrefixCache(model, block_size=8, num_blocks=100)
    padded, mask = pad_with_zeros(prompt, (pad, 0)), pad_with_zeros(torch.ones_like(prompt), (pad, 0))
    with torch.no_grad():
        for start in range(0, 40 + pad, num_first):
            stop = min(start + num_first, 40 + pad)
            arguments = {"attention_mask": mask[:, :stop]} if pad else {}
            model(padded[:, start:stop], past_key_values=cache, use_cache=True, **arguments)
    cache.reset()
    assert_same(run(model, input_ids=other), run(model, cache, input_ids=other))
    (row,) = cache.last_call.rows
    if name != "lfm2" or num_first == 12:  # where a forward has ended, a state is known
        is_shared = NUMBERINGS[name] == "tokens" or (NUMBERINGS[name] and not pad)
        assert row.matched_tokens >= 8 if is_shared else row.matched_tokens == 0
    cache.check()
