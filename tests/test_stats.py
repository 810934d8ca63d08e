"""Numbers that print as a table, and that agree with each other."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from hf_paged_cache.stats import CacheStats, CallStats, RowCount, RowStats, hit_rate

STATS = CacheStats(
    prompt_tokens=12_345,
    computed_tokens=345,
    reused_tokens=12_000,
    hit_rate=12_000 / 12_345,
    recent_hit_rate=0.5,
    num_calls=3,
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
    assert [line.split()[0] for line in lines] == [field.name for field in fields(STATS)]
    assert len({len(line) for line in lines}) == 1
    starts = {line.index(line.split(maxsplit=1)[1].strip()) + len(line.split(maxsplit=1)[1].strip()) for line in lines}
    assert starts == {len(lines[0])}


def test_stats_print_numbers_as_people_write_them() -> None:
    values = dict(line.split(maxsplit=1) for line in str(STATS).splitlines())
    assert values["prompt_tokens"].strip() == "12,345"
    assert values["hit_rate"].strip() == "97.2%"
    assert values["recent_hit_rate"].strip() == "50.0%"
    assert values["kv_bytes"].strip() == "1.5 MiB"
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


def test_the_hit_rate_is_the_share_not_computed_and_zero_of_nothing() -> None:
    assert hit_rate(40, 10) == 0.75
    assert hit_rate(40, 40) == 0.0
    assert hit_rate(40, 0) == 1.0
    assert hit_rate(0, 0) == 0.0


def test_stats_that_were_taken_do_not_change() -> None:
    for thing in (STATS, RowStats(0, 0, 0, 0, "")):
        with pytest.raises(FrozenInstanceError):
            thing.prompt_tokens = 1
