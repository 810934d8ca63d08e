"""What is kept has the keys and values of a plain forward: after every kind of call `cache.verify()` computes all
blocks again.

Results can be right although a wrong key or value lies in a block, for whoever reads it next.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..conformance import zoo
from ..reference import batch, row, run, zero_blocks

pytestmark = pytest.mark.usefixtures("one_thread")

# all columns; windows; keys and values of other sizes; layers that read those of others; one head for all
NAMES = ("llama", "gemma3_text", "deepseek_v3", "gemma3n_text", "gpt_bigcode")
CALLS: list[dict[str, Any]] = [
    batch(row((1, 50))),
    batch(row((1, 40), (2, 20))),
    batch(row((1, 40), (2, 10)), row((4, 36), (5, 4))),
    {**batch(row((1, 40), (6, 14)), row((4, 36), (7, 8))), "num_beams": 3},
    {**batch(row((1, 50))), "do_sample": True, "num_return_sequences": 3},
    {**batch(row((1, 20), (1, 20), (1, 9))), "prompt_lookup_num_tokens": 3, "max_new_tokens": 12},
    {**batch(row((1, 50), (2, 13))), "prefill_chunk_size": 16},
]


@cache
def model_of(name: str) -> PreTrainedModel:
    return zoo.build(name)


@pytest.mark.parametrize(("name", "block_size"), [*((name, 16) for name in NAMES), ("llama", 1)])
def test_no_block_differs_from_what_is_computed_anew(name: str, block_size: int) -> None:
    held = PagedPrefixCache(model_of(name), block_size=block_size)
    for is_reset in (False, True):
        for given in CALLS:
            run(held.store.model, held, **given)
            if is_reset:
                held.reset()
    found = held.verify()
    assert found.num_blocks > 150 // block_size
    assert found.differing == ()
    held.check()
    zero_blocks(held)
    assert len(held.verify().differing) == found.num_blocks
