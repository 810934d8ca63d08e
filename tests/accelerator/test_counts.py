"""How often a call waits for its device, transfers and launches, and how much it holds there, beside `DynamicCache`.

`python -m tests.accelerator` prints the same counts as a table.
"""

from __future__ import annotations

import pytest
import torch

from .counts import COUNTS, Count, Counter, limit_of
from .log import Log

pytestmark = pytest.mark.usefixtures("one_thread")

OF_DYNAMIC_CACHE = {
    "waits, decode step, 1 row": 1,
    "waits, decode step, 4 padded rows": 2,
    "waits, decode step, 4 beams": 1,
    "waits, decode step, deferred stop check": 0,
    "KiB held by 1 row of 4,000 tokens": 4000 * 0.5,  # 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes
}


@pytest.mark.parametrize("count", [count for count in COUNTS if count.what in OF_DYNAMIC_CACHE], ids=str)
def test_what_is_compared_with_counts_as_ever(count: Count) -> None:
    assert count.plain is not None
    assert count.plain(Counter(None)) == OF_DYNAMIC_CACHE[count.what]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [count for count in COUNTS if count.what.startswith("transfers")], ids=str)
def test_dynamic_cache_transfers_nothing_in_a_decode_step(count: Count, dtype: torch.dtype) -> None:
    assert count.plain is not None
    assert count.plain(Counter(None, dtype)) == 0


BOUNDED = [  # a gather copies each layer's keys and values, so it launches more
    (count, attention)
    for count in COUNTS
    for attention in ("paged", "gather")
    if not (count.what.startswith("launches") and attention == "gather")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "attention"), BOUNDED, ids=str)
def test_a_paged_cache_counts_at_most(count: Count, attention: str, dtype: torch.dtype) -> None:
    counter = Counter(attention, dtype)
    limit = limit_of(count, attention, dtype)
    number = count.paged(counter)
    assert number <= limit, f"{number}, at most {limit}:\n" + "\n".join(counter.shown)


@pytest.mark.parametrize("kind", ["wait", "transfer"])
@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize("how", ["1 row", "4 padded rows", "4 beams"])
def test_a_step_that_completes_a_block_costs_one_more(how: str, attention: str, kind: str) -> None:
    count = next(count for count in COUNTS if count.what == f"{kind}s, decode step, {how}")
    counter = Counter(attention)
    count.paged(counter)
    worst = max(counter.steps, key=lambda log: len(log.of(kind)))
    assert len(worst.of(kind)) <= limit_of(count, attention, torch.float32) + 1, worst.lines(kind)


@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize("how", [{"num_rows": 1}, {"num_rows": 4}, {"num_beams": 4}], ids=str)
def test_no_transfer_of_a_step_blocks(how: dict[str, int], attention: str) -> None:
    counter = Counter(attention)
    counter.step("transfer", **how)
    blocking = Log([entry for log in counter.steps for entry in log.transfers if entry.is_blocking])
    assert not blocking.entries, blocking.lines("transfer")
