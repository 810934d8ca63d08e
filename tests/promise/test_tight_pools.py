"""What a pool has room for once, it has room for again: rows of the last call that are kept for the next one yield to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged_cache import OutOfBlocksError, PagedPrefixCache
from hf_paged_cache.store import memory_budget

from ..internals import runs_on_rows
from ..reference import AtStep, Forwards, assert_same, batch, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

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


def serves(model: LlamaForCausalLM, name: str, num_blocks: int) -> bool:
    try:
        run(
            model,
            PagedPrefixCache(model, num_blocks=num_blocks),
            **prompts(name, 0),
            max_new_tokens=NUM_NEW,
            **CALLS[name],
        )
    except OutOfBlocksError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
def test_the_smallest_pool_that_serves_a_call_serves_others_like_it(name: str, tiny_llama: LlamaForCausalLM) -> None:
    num_blocks = next(number for number in range(2, 40) if serves(tiny_llama, name, number))
    cache = PagedPrefixCache(tiny_llama, num_blocks=num_blocks)
    for number in (0, 0, 1, 2, 1):
        given: dict[str, Any] = {**prompts(name, number), "max_new_tokens": NUM_NEW, **CALLS[name]}
        output = run(tiny_llama, cache, **given)
        assert_same(run(tiny_llama, **given), output)
    assert cache.last_call.reused_tokens >= 48  # the full blocks of what all prompts share
    cache.check()


def test_a_growing_chat_is_served_to_the_last_block(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, num_blocks=6)  # of 16 tokens, one of them reserved
    ids = torch.tensor([row((1, 20))])
    for _ in range(3):
        given = {"input_ids": ids, "max_new_tokens": NUM_NEW}
        output = run(tiny_llama, cache, **given)
        assert_same(run(tiny_llama, **given), output)
        ids = output.sequences
    assert ids.shape[1] == 5 * 16
    ids = torch.cat((torch.tensor([row((1, 55))]), torch.tensor([row((2, 6))])), dim=1)
    for seed in range(3):  # each parts from the one before within a block
        given = {"input_ids": torch.cat((ids, torch.tensor([row((seed, 4))])), dim=1), "max_new_tokens": 16}
        assert_same(run(tiny_llama, **given), run(tiny_llama, cache, **given))


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
        for number in range(30):
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


def test_a_wider_dtype_waits_for_calls_that_hold_blocks_of_before() -> None:
    model = build("llama").bfloat16()
    cache = PagedPrefixCache(model, max_bytes=400_000)
    ids = torch.tensor([row((1, 60))])

    def widen() -> None:
        model.float()
        guest = PagedPrefixCache(cache.store)
        assert_same(run(model, input_ids=ids), run(model, guest, input_ids=ids))
        assert runs_on_rows(guest) or "wider dtype" in str(guest.last_call)
        model.bfloat16()

    run(model, cache, input_ids=ids, logits_processor=[AtStep(2, widen)])
    model.float()
    assert_same(run(model, input_ids=ids), run(model, cache, input_ids=ids))
    cache.check()
