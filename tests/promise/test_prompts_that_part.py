"""A prompt that parts from the last call's row inside a block: what either wrote there is found as what it is."""

from __future__ import annotations

import pytest

from hf_paged_cache import PagedPrefixCache

from ..reference import assert_right, batch, row
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND, THIRD = row((1, 50)), row((1, 31), (2, 20)), row((1, 31), (2, 5), (3, 14))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_each_of_them_is_found_to_its_last_full_block_and_gives_the_same(name: str) -> None:
    """Blocks have 16 tokens: the second block of each is its own from token 31 on, or from token 36 on."""
    model = tiny(name)
    cache = PagedPrefixCache(model)
    for prompt, reused in ((FIRST, 0), (SECOND, 31), (THIRD, 36), (THIRD, 49)):
        assert_right(model, cache, reused=reused, **batch(prompt))
    for _ in range(2):
        for prompt in (SECOND, FIRST, THIRD):
            cache.reset()
            assert_right(model, cache, reused=48, **batch(prompt))
    cache.check()
