"""A pool that holds little keeps what it has room for: calls are right whatever that is."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.store import memory_budget

from ..reference import Forwards, assert_same, batch, row, run
from ..tiny_models import build

NUM_NEW = 20
CALLS = {
    "1 row": {},
    "4 beams": {"num_beams": 4},
    "3 samples": {"do_sample": True, "num_return_sequences": 3},
    "3 rows": {},
}


def prompts(name: str, number: int) -> dict[str, torch.Tensor]:
    """Prompts of one length, which share their first 50 tokens, no whole number of blocks."""
    num_rows = 3 if name == "3 rows" else 1
    return batch(*[row((1, 50), (100 * number + i, 10)) for i in range(num_rows)])


@pytest.mark.parametrize("num_blocks", [2, 4, 12])
@pytest.mark.parametrize("name", CALLS)
def test_a_pool_of_any_size_serves_a_call_and_others_like_it(
    name: str, num_blocks: int, tiny_llama: LlamaForCausalLM
) -> None:
    cache = PagedPrefixCache(tiny_llama, num_blocks=num_blocks)
    for number in (0, 0, 1, 2, 1):
        given: dict[str, Any] = {**prompts(name, number), "max_new_tokens": NUM_NEW, **CALLS[name]}
        output = run(tiny_llama, cache, **given)
        assert_same(run(tiny_llama, **given), output)
    assert cache.last_call.reused_tokens >= 48  # the full blocks of what all prompts share, or the last call's rows
    cache.check()
    cache.reset()
    run(tiny_llama, cache, **given)
    num_kept = 16 * min(num_blocks - 1, 3)  # and no rows
    assert cache.last_call.rows[0].matched_tokens >= num_kept
    cache.check()


def test_a_first_call_of_a_few_tokens_measures_nothing() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    with Forwards(model) as forwards:
        run(model, cache, input_ids=torch.tensor([row((1, 20))]), max_new_tokens=3)
    assert forwards == [(1, 20), (1, 1), (1, 1)]


@pytest.mark.parametrize("how", ["max_bytes", "what is free"])
def test_a_budget_in_bytes_is_kept_when_the_model_takes_a_wider_dtype(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda _: 2 * 400_000)
    model = build("llama").bfloat16()
    cache = PagedPrefixCache(model, **({"max_bytes": 400_000} if how == "max_bytes" else {}))
    other = PagedPrefixCache(cache.store)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        model.to(dtype)
        for number in range(12):
            given = {"input_ids": torch.tensor([row((number, 60))]), "max_new_tokens": 2}
            output = run(model, (cache, other)[number % 2], **given)
            stats = cache.store.stats()
            assert stats.pool_bytes is not None
            assert stats.pool_bytes <= 400_000
            if dtype == torch.float32:
                assert_same(run(model, **given), output)
        cache.check()
        cache.reset()
        run(model, cache, **given)
        assert cache.last_call.reused_tokens == 48
        other.reset()
