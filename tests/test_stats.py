"""Numbers that print as a table, and each of them against what is counted some other way."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged_cache import CacheStats, CallStats, PagedPrefixCache, PrefixStore, RowStats

from .internals import split_everywhere
from .reference import assert_same, batch, row, run
from .tiny_models import tiny

BLOCK_SIZE = 16
NUM_NEW = 3

STATS = CacheStats(
    prompt_tokens=12_345,
    computed_tokens=345,
    reused_tokens=11_000,
    shared_tokens=1_000,
    hit_rate=12_000 / 12_345,
    num_calls=3,
    num_bypassed_calls=1,
    num_blocks=100,
    num_free_blocks=50,
    num_cached_blocks=40,
    num_blocks_in_use=9,
    num_pinned_blocks=2,
    num_evictions=0,
    kv_bytes=3 * 2**19,
    peak_kv_bytes=2**31,
    pool_bytes=0,
)


def test_stats_print_a_line_for_every_number_in_two_aligned_columns() -> None:
    lines = str(STATS).splitlines()
    assert [line.split()[0] for line in lines] == [
        field.name for field in fields(STATS) if field.name not in ("tiers", "computed_because")
    ]
    width = len(lines[0])
    assert all(len(line) == width and line[width - 1].strip() for line in lines)


def test_a_size_that_is_not_known_is_said_so() -> None:
    early = str(replace(STATS, num_blocks=None, num_free_blocks=None))
    assert [line.split(maxsplit=1) for line in early.splitlines() if "known" in line] == [
        ["num_blocks", "not known"],
        ["num_free_blocks", "not known"],
    ]


def test_stats_print_numbers_as_people_write_them() -> None:
    values = dict(line.split(maxsplit=1) for line in str(STATS).splitlines())
    assert values["prompt_tokens"].strip() == "12,345"
    assert values["hit_rate"].strip() == "97.2%"
    assert values["kv_bytes"].strip() == "1.5 MiB"
    assert values["peak_kv_bytes"].strip() == "2,048.0 MiB"
    assert values["pool_bytes"].strip() == "0.0 MiB"


def test_a_call_prints_a_line_for_each_row_and_then_its_table() -> None:
    rows = (RowStats(40, 8, 32, 32, "no cached block resumes"), RowStats(10, 6, 0, 0, "nothing known"))
    text = str(CallStats("generate", 50, 14, 32, 4, 0.64, 2**20, rows))
    head, tail = text.splitlines()[:2], text.splitlines()[2:]
    assert tail[0].split() == ["kind", "generate"]
    assert [line.split()[0] for line in tail[1:]] == [
        "prompt_tokens",
        "computed_tokens",
        "reused_tokens",
        "shared_tokens",
        "hit_rate",
        "peak_kv_bytes",
        "read_once_tokens",
    ]
    assert head == [
        "row 0: 32 of 40 prompt tokens reused; no cached block resumes",
        "row 1: 0 of 10 prompt tokens reused; 4 were computed for another row; nothing known",
    ]


def test_a_call_says_what_was_dense_and_why() -> None:
    call = CallStats("generate", 0, 0, 0, 0, 0.0, 0, (), 512, "gradients were on")
    assert str(call).splitlines()[0] == "each row was read by itself: gradients were on"


def test_a_call_says_how_many_tokens_were_read_once_and_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_everywhere(monkeypatch)
    model, prompt = tiny("llama"), torch.tensor([row((1, 120))])
    several = torch.cat([torch.cat((prompt, torch.tensor([[new, 7]])), 1) for new in (3, 4, 5)])
    cache = PagedPrefixCache(model)
    for _ in range(2):
        run(model, cache, input_ids=prompt)
        assert read_once_of(cache) == (0, "")
        run(model, cache, input_ids=several)
        assert read_once_of(cache) == (112, "")
        with torch.no_grad():
            model(several, past_key_values=PagedPrefixCache(cache.store))
    cache.reset()
    model(several, past_key_values=cache)
    assert read_once_of(cache) == (0, "")
    assert all("gradients are on" in of_row.stopped for of_row in cache.last_call.rows)
    cache.prefill(several[:1, 60:100])
    assert read_once_of(cache) == (0, "")


def read_once_of(cache: PagedPrefixCache) -> tuple[int, str]:
    call = cache.last_call
    return call.read_once_tokens, call.dense


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
    assert after.num_cached_blocks == 2
    assert after.num_free_blocks + after.num_cached_blocks == after.num_blocks - 1 > 199
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
    assert stats.hit_rate == 78 / 160
    assert stats.num_calls == 2
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks - 1
    assert stats.num_blocks_in_use == stats.num_evictions == stats.num_pinned_blocks == 0


SHARED = row((1, 160))
BATCHES: dict[str, dict[str, Any]] = {
    "equal rows": batch(*[row((1, 150))] * 4),
    "beams": {**batch(row((1, 150))), "num_beams": 4},
    "a prefix that rows share": batch(*[SHARED + row((2 + number, 9)) for number in range(4)]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", kind) for kind in BATCHES), ("gemma3", "beams"), ("lfm2", "a prefix that rows share")],
)
def test_what_rows_of_one_call_share_is_no_reuse_of_earlier_calls(name: str, kind: str) -> None:
    model, given = tiny(name), BATCHES[kind]
    cache = PagedPrefixCache(model, block_size=8)
    calls = []
    for reset in (cache.reset, cache.reset, cache.reset_prefix_cache):
        assert_same(run(model, **given), run(model, cache, **given))
        call = cache.last_call
        for each in (*call.rows, call):
            assert each.computed_tokens + each.reused_tokens + each.shared_tokens == each.prompt_tokens
            assert min(each.computed_tokens, each.reused_tokens, each.shared_tokens) >= 0
        assert call.hit_rate == call.reused_tokens / call.prompt_tokens
        assert all(each.reused_tokens <= each.matched_tokens for each in call.rows)
        calls.append(call)
        cache.reset()
        reset()
    empty, used, _ = calls
    assert (empty.kind, empty.reused_tokens, empty.hit_rate) == ("generate", 0, 0.0)
    assert empty.shared_tokens > 0
    assert used.reused_tokens > 0
    run(model, cache, **given)  # emptied
    assert (cache.last_call.reused_tokens, cache.last_call.shared_tokens) == (0, empty.shared_tokens)
    stats, every = cache.stats(), [*calls, cache.last_call]
    assert stats.shared_tokens == sum(call.shared_tokens for call in every)
    assert stats.reused_tokens == sum(call.reused_tokens for call in every)
    assert stats.computed_tokens + stats.reused_tokens + stats.shared_tokens == stats.prompt_tokens
    assert cache.store.stats().shared_tokens == stats.shared_tokens


def test_a_row_says_why_no_more_was_reused_and_what_another_row_has_computed(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE)
    run(tiny_llama, cache, **batch(row((1, 128))), max_new_tokens=1)
    cache.reset()
    run(tiny_llama, cache, **batch(*[row((1, 140))] * 2), max_new_tokens=1)
    first, second = str(cache.last_call).splitlines()[:2]
    why = "from token 128 on there is no full block: 12 of 16 tokens"
    assert first == f"row 0: 128 of 140 prompt tokens reused; {why}"
    assert second == f"row 1: 128 of 140 prompt tokens reused; 12 were computed for another row; {why}"


def test_the_last_call_says_what_it_was(tiny_llama: LlamaForCausalLM) -> None:
    cache, ids = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE), torch.tensor([row((1, 40))])
    assert (cache.last_call.kind, cache.last_call.rows) == ("none", ())
    with torch.no_grad():
        tiny_llama(ids, past_key_values=cache)
    assert cache.last_call.kind == "forward"
    run(tiny_llama, cache, input_ids=ids, max_new_tokens=1)
    assert cache.last_call.kind == "generate"


def test_of_prefilled_prompts_the_prefix_that_they_share_is_no_reuse(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE)
    cache.prefill(row((1, 16)))
    assert cache.prefill([row((1, 48)), row((1, 32), (2, 16)), row((1, 48))]).num_known == 16 + 32 + 48
    call = cache.last_call
    assert (call.kind, [each.reused_tokens for each in call.rows]) == ("prefill", [16, 16, 16])
    assert [each.shared_tokens for each in call.rows] == [0, 16, 32]
    assert [each.computed_tokens for each in call.rows] == [32, 16, 0]
    known = cache.stats()
    assert cache.prefill(row((1, 48))).num_computed == 0
    assert (cache.stats(), cache.last_call) == (known, call)  # nothing was computed


def test_bytes_are_those_of_the_blocks_in_use_and_of_the_rows(tiny_llama: LlamaForCausalLM) -> None:
    cache = PagedPrefixCache(tiny_llama, block_size=BLOCK_SIZE)
    run(tiny_llama, cache, **batch(row((1, 40))), max_new_tokens=NUM_NEW)
    stats = cache.stats()
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert 2 * held >= stats.kv_bytes >= held > stats.num_blocks_in_use == 0
    assert stats.peak_kv_bytes >= stats.kv_bytes
    cache.reset()
    emptied = cache.stats()
    assert emptied.kv_bytes == emptied.num_blocks_in_use == 0
    assert emptied.peak_kv_bytes == stats.peak_kv_bytes
    of_blocks = 2 * bytes_per_block(tiny_llama)
    assert emptied.pool_bytes == stats.pool_bytes >= of_blocks
    assert cache.pin(row((1, 40))) == 2 * BLOCK_SIZE
    assert cache.stats().kv_bytes == of_blocks
    run(tiny_llama, cache, **batch(row((1, 40))), max_new_tokens=NUM_NEW)
    assert cache.stats().kv_bytes >= of_blocks + held


def test_rows_count_while_they_run(tiny_llama: LlamaForCausalLM) -> None:
    store = PrefixStore(tiny_llama, block_size=BLOCK_SIZE)
    cache, other = PagedPrefixCache(store), PagedPrefixCache(store)
    seen = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.append([each.stats().kv_bytes for each in (cache, other, store)])

        def end(self) -> None: ...

    run(tiny_llama, cache, **batch(row((1, 40))), max_new_tokens=NUM_NEW, streamer=Streamer())
    assert seen[0] == [0, 0, 0]  # the prompt, before any forward
    of_cache, of_other, of_store = seen[1]
    assert of_cache == of_store > of_other == 0
    assert cache.stats().kv_bytes >= of_cache


def test_reasons_follow_from_what_was_computed() -> None:
    model = tiny("llama")
    cache = PagedPrefixCache(model)
    for seed in (1, 2, 1):
        run(model, cache, input_ids=torch.tensor([row((seed, 150))]))
    stats = cache.stats()
    assert stats.reused_tokens == 144
    reasons = dict(stats.computed_because)
    assert sum(reasons.values()) == stats.computed_tokens
    assert reasons["no cached block has these first N tokens under the same conditions"] == 150
    for num_shared in (130, 16):
        cache.reset()
        run(model, cache, input_ids=torch.tensor([row((1, num_shared), (3, 20))]))
    reasons = dict(cache.stats().computed_because)
    assert reasons["no cached block continues with tokens N to N"] == 22 + 20
