"""What rows of several prompts hold once: the result is `DynamicCache`'s whatever a further launch costs."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.attention import backends

from ..internals import make_forwards_cheap, score_contexts, split_everywhere
from ..reference import assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import tiny
from .test_scoring import log_probs

SHARED = row((1, 64))
PROMPTS: dict[str, dict[str, Any]] = {
    "beams": {**batch(row((1, 64), (2, 6)), row((1, 64), (3, 6))), "num_beams": 3, "max_new_tokens": 20},
    "beams behind padding": {
        **batch(row((1, 64), (2, 6)), row((1, 64), (3, 11))),
        "num_beams": 3,
        "max_new_tokens": 20,
    },
    "samples": {
        **batch(row((1, 64), (2, 6)), row((1, 64), (3, 6)), row((8, 70))),
        "do_sample": True,
        "num_return_sequences": 4,
    },
    "equal rows beside others": batch(*[row((1, 64), (2, 6))] * 3, row((1, 64), (3, 6)), row((8, 70))),
    # of which each gets a segment of its own, where tails of all would else begin further left
    "equal rows beside many longer ones": batch(
        *[row((1, 64), (9, 17))] * 3, *(row((1, 64), (2, 48), (seed, 3)) for seed in range(3, 15))
    ),
}


def launch_costs(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, num_tokens: int) -> None:
    """Let one more launch cost as much as to read so many tokens of a row."""
    config: Any = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    monkeypatch.setattr(backends, "LAUNCH_BYTES", MappingProxyType({"cpu": num_tokens * token}))


@pytest.mark.parametrize("num_tokens", [0, 40, 1000])
@pytest.mark.parametrize("what", [*PROMPTS])
def test_prompts_that_begin_alike_give_the_same_logits_whatever_a_launch_costs(
    what: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, call = tiny("llama"), PROMPTS[what]
    launch_costs(monkeypatch, model, num_tokens)
    reference, cache = run(model, **call), PagedPrefixCache(model)
    run(model, cache, **batch(SHARED), max_new_tokens=1)
    cache.reset()
    for _ in range(2):
        assert_same(reference, run(model, cache, **call))
    cache.check()
    cache.reset()
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, **call))


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_rows_that_ran_ahead_and_share_a_prefix_themselves_are_read_from_where_their_own_columns_begin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding puts the same tokens of two rows into other columns, on either side of where the rows' memory begins."""
    make_forwards_cheap(monkeypatch)
    split_everywhere(monkeypatch)
    model = tiny(name)
    call = batch(row((1, 19), (2, 29)), row((1, 19), (3, 4)), row((1, 10), (4, 3)))
    reference, cache = run(model, **call), PagedPrefixCache(model, block_size=8)
    run(model, cache, **batch(row((5, 9))), max_new_tokens=1)  # now the layers' shapes are known
    cache.reset()
    assert_same(reference, run(model, cache, **call))


@pytest.mark.parametrize("num_tokens", [0, 10, 20, 1000])
def test_scores_of_some_contexts_of_a_batch_are_right_whatever_a_launch_costs(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two contexts share more than the third, whose continuation needs no forward."""
    model, cache = tiny("llama"), PagedPrefixCache(tiny("llama"))
    launch_costs(monkeypatch, model, num_tokens)
    few_shots = row((1, 192))
    contexts = [few_shots + row((2, 40)), *(few_shots + row((3, 32), (seed, 8)) for seed in (4, 5))]
    continuations = [row((9, 1)), row((10, 2)), row((12, 2))]
    for context in contexts:
        cache.prefill(context[:224])
    wanted = [(context, [some]) for context, some in zip(contexts, continuations, strict=True)]
    found = score_contexts(cache, wanted, batch_size=None)
    for context, some, score in zip(contexts, continuations, found, strict=True):
        torch.testing.assert_close(torch.tensor(score.log_probs), log_probs(model, context, some), rtol=0, atol=1e-4)
