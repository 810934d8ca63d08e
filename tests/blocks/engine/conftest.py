"""Here the fixtures of `tests/blocks` make allocators of engines."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.engine import EngineAllocator


@pytest.fixture
def make_allocator():
    made = []

    def make(num_blocks=17, block_size=2):
        made.append(EngineAllocator(num_blocks, block_size))
        return made[-1]

    yield make
    for allocator in made:
        allocator.check()
