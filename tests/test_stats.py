"""Numbers that print as a table, and each of them against what is counted some other way."""

from __future__ import annotations

import gc
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged_cache import CacheStats, CallStats, PagedPrefixCache, PrefixStore, RowStats
from hf_paged_cache.call.counters import PromptCounters
from hf_paged_cache.stats import RowCount

from .reference import batch, row, run

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
NUM_NEW = 3

STATS = CacheStats(
    prompt_tokens=12_345,
    computed_tokens=345,
    reused_tokens=12_000,
    hit_rate=12_000 / 12_345,
    recent_hit_rate=0.5,
    num_calls=3,
    num_bypassed_calls=1,
    num_blocks=100,
    num_free_blocks=50,
    num_cached_blocks=40,
    num_blocks_in_use=9,
    num_pinned_blocks=2,
    num_evictions=0,
    num_copies_on_write=1,
    kv_bytes=3 * 2**19,
    peak_kv_bytes=2**31,
    pool_bytes=0,
)


def test_stats_print_a_line_for_every_number_in_two_aligned_columns() -> None:
    lines = str(STATS).splitlines()
    assert [line.split()[0] for line in lines] == [field.name for field in fields(STATS) if field.name != "tiers"]
    width = len(lines[0])
    assert all(line[width - 1].strip() for line in lines)
    assert {line[:width].split()[0]: line[width:].strip() for line in lines if len(line) > width} == {
        "kv_bytes": "of blocks in use, and of the copy that attention reads, which is not in the pool"
    }


def test_a_size_that_is_not_known_yet_is_said_so() -> None:
    early = str(replace(STATS, num_blocks=None, num_free_blocks=None))
    assert [line.split(maxsplit=1) for line in early.splitlines() if "known" in line] == [
        ["num_blocks", "not known yet"],
        ["num_free_blocks", "not known yet"],
    ]


def test_stats_print_numbers_as_people_write_them() -> None:
    values = dict(line.split(maxsplit=1) for line in str(STATS).splitlines())
    assert values["prompt_tokens"].strip() == "12,345"
    assert values["hit_rate"].strip() == "97.2%"
    assert values["recent_hit_rate"].strip() == "50.0%"
    assert values["kv_bytes"].startswith("1.5 MiB  of blocks in use")
    assert values["peak_kv_bytes"].strip() == "2,048.0 MiB"
    assert values["pool_bytes"].strip() == "0.0 MiB"


def test_a_call_prints_its_table_and_then_a_line_for_each_row() -> None:
    rows = (RowStats(40, 8, 32, 32, "no cached block goes on"), RowStats(10, 10, 0, 0, "nothing known"))
    text = str(CallStats(50, 18, 32, 0.64, 2**20, rows))
    head, tail = text.splitlines()[:-2], text.splitlines()[-2:]
    assert [line.split()[0] for line in head] == [
        "prompt_tokens",
        "computed_tokens",
        "reused_tokens",
        "hit_rate",
        "peak_kv_bytes",
    ]
    assert tail == [
        "row 0: 32 of 40 prompt tokens reused; no cached block goes on",
        "row 1: 0 of 10 prompt tokens reused; nothing known",
    ]


def test_reused_tokens_of_a_row_are_those_of_the_prompt_that_were_not_computed() -> None:
    assert RowCount(prompt_tokens=40, computed_tokens=8, matched_tokens=32, stopped="why").frozen() == RowStats(
        prompt_tokens=40, computed_tokens=8, reused_tokens=32, matched_tokens=32, stopped="why"
    )
    assert RowCount().frozen() == RowStats(0, 0, 0, 0, "nothing was computed")


@pytest.mark.parametrize(("prompt", "computed", "rate"), [(40, 10, 0.75), (40, 40, 0.0), (40, 0, 1.0), (0, 0, 0.0)])
def test_the_hit_rate_is_the_share_not_computed_and_zero_of_nothing(prompt: int, computed: int, rate: float) -> None:
    counters = PromptCounters()
    counters.rows = [RowCount(prompt, computed)]
    assert counters.of_call(peak_kv_bytes=0).hit_rate == rate


def test_stats_that_were_taken_do_not_change() -> None:
    for thing in (STATS, RowStats(0, 0, 0, 0, "")):
        with pytest.raises(FrozenInstanceError):
            thing.prompt_tokens = 1


def test_the_most_blocks_are_known_once_they_follow_from_a_number_or_from_a_forward(
    tiny_llama: LlamaForCausalLM,
) -> None:
    given = PagedPrefixCache(tiny_llama, num_blocks=200).stats()
    assert (given.num_blocks, given.num_free_blocks) == (200, 199)
    in_bytes = PagedPrefixCache(tiny_llama, max_bytes=2**20).stats()
    assert in_bytes.num_blocks == in_bytes.num_free_blocks + 1 == 2**20 // bytes_per_block(tiny_llama)
    cache = PagedPrefixCache(tiny_llama)
    before = cache.stats()
    assert before.num_blocks is before.num_free_blocks is None
    assert before.num_blocks_in_use == before.num_cached_blocks == 0
    with torch.no_grad():
        tiny_llama(torch.tensor([row((1, 40))]), past_key_values=cache)
    after = cache.stats()
    assert after.num_free_blocks + after.num_blocks_in_use == after.num_blocks - 1 > 199
    cache.reset()
    cache.reset_prefix_cache()
    assert cache.stats().num_blocks == after.num_blocks


def bytes_per_block(model: LlamaForCausalLM) -> int:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * 4 * BLOCK_SIZE * head_dim * config.num_key_value_heads * config.num_hidden_layers


def test_tokens_are_counted_over_all_calls_and_blocks_as_they_are_now(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE)
    for _ in range(2):
        run(tiny_llama, cache, **batch(row((1, 40)), row((2, 40))), max_new_tokens=NUM_NEW)
    stats = cache.stats()
    assert isinstance(cache.last_call, CallStats)
    assert [type(each) for each in cache.last_call.rows] == [RowStats, RowStats]
    counted = (stats.prompt_tokens, stats.computed_tokens, stats.reused_tokens)
    assert counted == (160, 82, 78)  # the last token of each row again
    assert stats.hit_rate == stats.recent_hit_rate == 78 / 160
    assert stats.num_calls == 2
    num_blocks_of_a_row = -(-(40 + NUM_NEW - 1) // BLOCK_SIZE)
    assert stats.num_blocks_in_use == 2 * num_blocks_of_a_row
    assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_blocks_in_use == stats.num_blocks - 1
    assert stats.num_evictions == stats.num_pinned_blocks == 0


def test_bytes_are_those_of_the_blocks_in_use_and_of_what_attention_reads(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE)
    run(tiny_llama, cache, **batch(row((1, 40))), max_new_tokens=NUM_NEW)
    stats = cache.stats()
    of_blocks = stats.num_blocks_in_use * bytes_per_block(tiny_llama)
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
