"""What a layer shows of its keys and values after decode steps lies in memory as that of a `DynamicCache`."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import batch, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_tensors_of_a_layer_are_contiguous_as_a_dynamic_caches_are() -> None:
    model: PreTrainedModel = tiny("llama")
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(row((1, 30))))
    for layer in cache.layers:
        assert layer.keys.is_contiguous()
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
