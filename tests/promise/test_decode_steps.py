"""Through a model: each layer of a forward is written once, by the fast path where it can be; with gradients never."""

from __future__ import annotations

from collections import Counter

import pytest
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..internals import count_writes
from ..reference import batch, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW = 6


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the pool was written."""
    return count_writes(monkeypatch)


def test_the_tensors_of_a_layer_are_contiguous_as_a_dynamic_caches_are() -> None:
    model: PreTrainedModel = tiny("llama")
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(row((1, 30))))
    for layer in cache.layers:
        assert layer.keys.is_contiguous()
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
