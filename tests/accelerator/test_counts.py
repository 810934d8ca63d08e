"""How often a call waits for its device, transfers and launches, and how much it holds there, beside `DynamicCache`.

`python -m tests.accelerator` prints the same counts as a table.
"""

from __future__ import annotations

import pytest
import torch

from .counts import COUNTS, Count, Counter

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
