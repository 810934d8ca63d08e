"""A device whose memory ends before the pool does: cached blocks are evicted, and every call gives what it gives with `DynamicCache`."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from tests.reference import assert_same, batch, row, run

from .counts import model_on, split_model
from .memory import NUM_DEVICES, limited, memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES: dict[str, Callable[[], PreTrainedModel]] = {
    "bf16 on the second device": lambda: model_on("sim:1", torch.bfloat16, NUM_LAYERS),
    "fp32 on two devices": lambda: split_model(num_layers=NUM_LAYERS),
}
NUM_LAYERS = 6  # so that keys and values are much of what a call holds
NUM_PROMPTS = 3
LEAST_BYTES = 600 << 10  # what a prompt that fills the pool takes, too
NUM_TOLD = 200  # tokens of each prompt that fills the pool before them
CALLS: dict[str, dict[str, Any]] = {
    "1 row": {},
    "2 padded rows": {},
    "3 beams": {"num_beams": 3},
    "3 samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 16},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


def prompts(how: str) -> list[dict[str, torch.Tensor]]:
    """Prompts of about 100 tokens that share their first 20."""
    rows = [[row((1, 20), (seed, 80)), row((1, 20), (seed + 50, 70))] for seed in range(2, 2 + NUM_PROMPTS)]
    return [batch(*pair[: 2 if how == "2 padded rows" else 1]) for pair in rows]


def allocated() -> list[int]:
    gc.collect()
    return [memory(device).allocated for device in range(NUM_DEVICES)]


@pytest.mark.parametrize("attention", ["contiguous", "gather"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", CALLS)
def test_where_memory_ends_blocks_are_evicted_and_calls_go_on(how: str, place: str, attention: Any) -> None:
    """What is free when the cache is made is twice what one call on a `DynamicCache` takes; what it is told, is more."""
    model, given = PLACES[place](), prompts(how)
    before = allocated()
    for device in range(NUM_DEVICES):
        memory(device).reset_peak()
    run(model, **given[0], **CALLS[how])
    peaks = [memory(device).peak - before[device] for device in range(NUM_DEVICES)]
    taken = [max(peak, LEAST_BYTES) if peak else 0 for peak in peaks]
    references = [run(model, **inputs, **CALLS[how]) for inputs in given]
    num_bytes = (
        NUM_LAYERS * 2 * 2 * 16 * model.dtype.itemsize * NUM_TOLD // sum(map(bool, taken))
    )  # of a device, each time
    before = allocated()
    with ExitStack() as limits:
        for device in range(NUM_DEVICES):
            limits.enter_context(limited(before[device] + 2 * taken[device], device))
        cache = PagedPrefixCache(model, block_size=4, attention=attention)
        for seed in range(3 * max(taken) // (2 * num_bytes)):
            run(model, cache, **batch(row((100 + seed, NUM_TOLD))), max_new_tokens=1, prefill_chunk_size=16)
        for inputs, reference in zip(given, references, strict=True):
            assert_same(reference, run(model, cache, **inputs, **CALLS[how]))
            cache.check()
        assert_same(references[-1], run(model, cache, **given[-1], **CALLS[how]))
    assert cache.last_call.reused_tokens > 50
    assert cache.stats().num_evictions > 0


@pytest.mark.parametrize("num_stores", [1, 2])
def test_the_default_budget_is_of_what_the_device_has(num_stores: int) -> None:
    """And of what other stores leave of it."""
    model = model_on()
    (before, _), num_tokens = allocated(), 40
    free = 1 << 22
    with limited(before + free, "sim"):
        caches = [PagedPrefixCache(model) for _ in range(num_stores)]
        for cache in caches:
            run(model, cache, **batch(row((1, num_tokens))))
        budgets = [cache.stats().num_blocks * cache.store.blocks.pool.bytes_per_block for cache in caches]
    assert all(budget > 0 for budget in budgets)
    assert sum(budgets) <= 0.8 * free
