"""Padding that all rows share is skipped: columns are there before any layer has written, and no layer is misled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.model import support

from ..conformance.scenes import behind_padding
from ..reference import assert_near, assert_right, assert_same, row, run
from ..tiny_models import build

PROMPTS = {"one row": [row((1, 70))], "two rows": [row((1, 70)), row((2, 70))]}
PADDED = 9  # columns, in front of the longest row, too
# Layers of two kinds, whichever comes first: masks of the second kind are made before any layer has written.
MODELS = pytest.mark.parametrize(
    "kinds", [("sliding", "full"), ("full", "sliding"), ("sliding", "sliding")], ids=" then ".join
)
STORES = pytest.mark.parametrize("is_loaded", [False, True], ids=["a new store", "one that was loaded"])


def build_of(kinds: tuple[str, ...]) -> PreTrainedModel:
    return build("gemma3", layer_types=[f"{kind}_attention" for kind in kinds], num_hidden_layers=2)


def new_cache(model: PreTrainedModel, is_loaded: bool, folder: Path) -> PagedPrefixCache:
    """On a new store; or it knows most of the first row, which another one has computed."""
    cache = PagedPrefixCache(model, block_size=4)
    if is_loaded:
        teacher = PagedPrefixCache(model, block_size=4)
        run(model, teacher, input_ids=torch.tensor([row((1, 60))]), max_new_tokens=1)
        teacher.store.save(folder)
        cache.store.load(folder)
    return cache


@STORES
@MODELS
def test_generate_gives_the_same_and_so_does_the_bare_prompt_afterwards(
    kinds: tuple[str, ...], is_loaded: bool, tmp_path: Path
) -> None:
    model = build_of(kinds)
    of_a_prefix = [row((1, 300), (5, 9)), row((1, 300), (6, 12)), row((1, 300), (7, 3))]  # which is computed ahead
    for rows in (*PROMPTS.values(), of_a_prefix):
        cache, given = new_cache(model, is_loaded, tmp_path), behind_padding(PADDED, *rows)
        for _ in range(2):  # unknown, and known
            assert_right(model, cache, **given)
            cache.reset()
        if rows is not of_a_prefix:
            assert_right(model, cache, input_ids=torch.tensor(rows))
            assert cache.last_call.reused_tokens > 0
            assert_right(model, new_cache(model, is_loaded, tmp_path), **given, prefill_chunk_size=5)


def logits_of(model: PreTrainedModel, cache: Any, stops: list[int], given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last logits of plain forwards that end at these columns."""
    mask, start = given["attention_mask"], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for stop in stops:
        with torch.no_grad():
            logits = model(
                given["input_ids"][:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                logits_to_keep=1,
            ).logits
        start = stop
    return logits


@pytest.mark.parametrize("stops", [[79], [PADDED, 79], [PADDED - 2, PADDED + 3, 79], [PADDED + 1, 78, 79]], ids=str)
@STORES
@MODELS
def test_plain_forwards_give_the_same_in_whatever_chunks(
    kinds: tuple[str, ...], is_loaded: bool, stops: list[int], tmp_path: Path
) -> None:
    model = build_of(kinds)
    cache, given = new_cache(model, is_loaded, tmp_path), behind_padding(PADDED, *PROMPTS["two rows"])
    wanted = logits_of(model, DynamicCache(config=model.config), stops, given)
    for _ in range(2):  # unknown, and known
        got = logits_of(model, cache, stops, given)
        cache.reset()
        assert_near(got, wanted)


class _SkippedWhileEmpty(LlamaDecoderLayer):
    """As a cross attention of transformers 5.17 without an image."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        cache = kwargs["past_key_values"]
        is_empty = cache is None or cache.get_seq_length(1) == 0
        return hidden_states if is_empty else super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_layer_that_a_model_skips_while_the_cache_has_none_of_it_stays_skipped(
    is_loaded: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "TESTED_VERSION", "5.0.0")  # so the model is tried, and what writes is seen
    model = build("llama")
    model.model.layers[1].__class__ = _SkippedWhileEmpty
    options: dict[str, Any] = {"block_size": 4, "trust_hooks": True}
    cache = PagedPrefixCache(model, **options)
    if is_loaded:
        run(model, cache, **behind_padding(PADDED, *PROMPTS["one row"]))
        cache.store.save(tmp_path)
        cache = PagedPrefixCache(model, **options)
        cache.store.load(tmp_path)
    for is_known, rows in ((is_loaded, "one row"), (True, "two rows")):
        given = behind_padding(PADDED, *PROMPTS[rows])
        assert_same(run(model, **given), run(model, cache, **given))
        assert bool(cache.last_call.reused_tokens) == is_known
    assert cache.get_seq_length(1) == 0
