"""Each number that `stats` gives, against what is counted some other way; blocks that collected caches left count as free."""

from __future__ import annotations

import gc

import pytest
from transformers import LlamaForCausalLM

from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..reference import batch, row, run

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
NUM_NEW = 3


def test_tokens_are_counted_over_all_calls_and_blocks_as_they_are_now(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE, num_blocks=50)
    for _ in range(2):
        run(tiny_llama, cache, **batch(row((1, 40)), row((2, 40))), max_new_tokens=NUM_NEW)
    stats = cache.stats()
    assert stats == cache.stats()  # to ask changes nothing
    assert (stats.prompt_tokens, stats.computed_tokens, stats.reused_tokens) == (
        160,
        82,
        78,
    )  # the last one of each again
    assert stats.hit_rate == stats.recent_hit_rate == 78 / 160
    assert stats.num_calls == 2
    num_blocks_of_a_row = -(-(40 + NUM_NEW - 1) // BLOCK_SIZE)
    assert stats.num_blocks_in_use == 2 * num_blocks_of_a_row
    assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_blocks_in_use == stats.num_blocks - 1 == 49
    assert stats.num_evictions == stats.num_pinned_blocks == 0


def test_bytes_are_those_of_the_blocks_in_use_and_of_what_attention_reads(tiny_llama: LlamaForCausalLM) -> None:
    config = tiny_llama.config
    bytes_per_block = 2 * 4 * BLOCK_SIZE * config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    bytes_per_block *= config.num_hidden_layers
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE)
    run(tiny_llama, cache, **batch(row((1, 40))), max_new_tokens=NUM_NEW)
    stats = cache.stats()
    of_blocks = stats.num_blocks_in_use * bytes_per_block
    assert stats.kv_bytes == of_blocks + cache.call.reader.num_bytes > of_blocks
    assert stats.peak_kv_bytes >= stats.kv_bytes
    cache.reset()
    emptied = cache.stats()
    assert emptied.kv_bytes == emptied.num_blocks_in_use == 0
    assert emptied.peak_kv_bytes == stats.peak_kv_bytes
    assert emptied.pool_bytes == stats.pool_bytes >= of_blocks


def test_pins_copies_and_evictions_are_those_of_the_store(tiny_llama: LlamaForCausalLM) -> None:
    store = PrefixStore(tiny_llama, block_size=BLOCK_SIZE, num_blocks=12)
    cache = PagedPrefixCache(store)
    run(tiny_llama, cache, **batch(row((1, 40))), max_new_tokens=NUM_NEW, num_beams=2)
    parted = cache.stats()
    assert parted.num_copies_on_write > 0
    assert parted.num_evictions == 0
    assert cache.pin(row((1, 40))) == 32
    assert cache.stats().num_pinned_blocks == 2
    for number in range(2, 6):
        run(tiny_llama, cache, **batch(row((number, 90))), max_new_tokens=NUM_NEW)
    assert cache.stats().num_evictions > 0
    assert cache.stats().num_pinned_blocks == 2
    other = PagedPrefixCache(store).stats()
    assert other.num_evictions == cache.stats().num_evictions
    assert (other.num_calls, other.prompt_tokens, other.peak_kv_bytes) == (0, 0, 0)


def test_what_a_collected_cache_held_is_not_in_use(tiny_llama: LlamaForCausalLM) -> None:
    store = PrefixStore(tiny_llama, block_size=BLOCK_SIZE)
    kept, dropped = PagedPrefixCache(store), PagedPrefixCache(store)
    run(tiny_llama, dropped, **batch(row((1, 40))), max_new_tokens=NUM_NEW)
    assert kept.stats().num_blocks_in_use == 3
    del dropped
    gc.collect()
    stats = kept.stats()
    assert stats.num_blocks_in_use == 0
    assert stats.num_cached_blocks == 2
