"""Here the fixtures of `tests/blocks` make allocators of engines."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.for_engines import EngineAllocator


@pytest.fixture
def kind_of_allocator():
    return EngineAllocator
