"""Through a model: each layer of a forward is written once, by the fast path where it can be; with gradients never."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..internals import count_writes
from ..reference import assert_same, batch, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW = 6


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the pool was written."""
    return count_writes(monkeypatch)


@pytest.mark.way("pool")
@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize(
    ("before", "num_rows", "options"),
    [
        (0, 1, {}),
        (4, 1, {}),
        (0, 3, {}),
        (0, 1, {"num_beams": 3}),
        (0, 1, {"num_return_sequences": 3, "do_sample": True}),
    ],
    ids=["1 row", "1 row after 4", "3 rows", "beams", "samples"],
)
def test_a_layer_is_written_once_in_a_step(
    attention: str, before: int, num_rows: int, options: dict[str, Any], writes: Counter[str]
) -> None:
    model = tiny("llama")
    cache, num_layers = PagedPrefixCache(model, attention=attention), model.config.num_hidden_layers
    if before:
        run(model, cache, **batch(*[row((number, 20)) for number in range(before)]))
    writes.clear()
    given = batch(*[row((10 + number, 20)) for number in range(num_rows)])
    run(model, cache, **given, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, **options)
    num_apart = "num_return_sequences" in options  # samples part in their first step, which is no step yet
    if attention == "paged":  # the pool gets all steps at the end of the call
        assert writes == {"write": (1 + num_apart) * num_layers, "write_blocks": 1}
    else:
        assert writes == {"write": NUM_NEW * num_layers}


@pytest.mark.way("pool")
@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_follows_a_known_prefix_is_written_once(attention: str, kind: str, writes: Counter[str]) -> None:
    model = tiny(kind)
    cache, num_layers = PagedPrefixCache(model, attention=attention), model.config.num_hidden_layers
    run(model, cache, **batch(row((1, 48))), max_new_tokens=1)
    for question in (2, 3):  # the view grows for the first one
        writes.clear()
        given = batch(row((1, 48), (question, 5)))
        assert_same(run(model, **given, max_new_tokens=1), run(model, cache, **given, max_new_tokens=1))
        assert cache.last_call.rows[0].matched_tokens > 0
    assert writes == {"write": num_layers}


def test_the_tensors_of_a_layer_are_contiguous_as_a_dynamic_caches_are() -> None:
    model: PreTrainedModel = tiny("llama")
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(row((1, 30))))
    for layer in cache.layers:
        assert layer.keys.is_contiguous()
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
