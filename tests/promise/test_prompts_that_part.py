"""A prompt that parts from the last call's row inside a block: what either wrote there is found as what it is."""

from __future__ import annotations

import pytest

from hf_paged_cache import PagedPrefixCache

from ..reference import assert_same, batch, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND, THIRD = row((1, 50)), row((1, 31), (2, 20)), row((1, 31), (2, 5), (3, 14))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_each_of_them_is_found_to_its_last_full_block_and_gives_the_same(name: str) -> None:
    """Blocks have 16 tokens: the second block of each is its own from token 31 on, or from token 36 on."""
    model = tiny(name)
    cache = PagedPrefixCache(model)
    for prompt, reused in ((FIRST, 0), (SECOND, 31), (THIRD, 36), (THIRD, 49)):
        assert_same(run(model, **batch(prompt)), run(model, cache, **batch(prompt)))
        assert cache.last_call.reused_tokens == reused
    for _ in range(2):
        for prompt in (SECOND, FIRST, THIRD):
            cache.reset()
            assert_same(run(model, **batch(prompt)), run(model, cache, **batch(prompt)))
            assert cache.last_call.reused_tokens == 48
    cache.check()
