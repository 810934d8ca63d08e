"""A process in which every `generate` has a cache, in this process for the time of a test."""

import pytest
from transformers import GenerationMixin

from hf_paged_cache import cache_every_generate
from hf_paged_cache import every_generate as module
from hf_paged_cache.every_generate import EveryGenerate


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> EveryGenerate:
    monkeypatch.setattr(module, "_every", None)
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)  # put back after the test
    return cache_every_generate()
