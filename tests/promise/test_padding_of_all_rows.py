"""Padding that all rows share is skipped, so columns are there before any layer has written: no layer may be asked
otherwise.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.model import support

from ..reference import TOLERANCE, assert_same, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = {"one row": [row((1, 70))], "two rows": [row((1, 70)), row((2, 70))]}
PADDED = 9  # columns, in front of the longest row, too


def _settings() -> dict[str, dict[str, Any]]:
    """Layers of two kinds, whichever comes first: masks of the second kind are made before any layer has written."""
    kinds = ["sliding_attention", "full_attention"]
    return {
        "window, then full": {"layer_types": kinds, "num_hidden_layers": 2},
        "full, then window": {"layer_types": kinds[::-1], "num_hidden_layers": 2},
        "windows alone": {"layer_types": kinds[:1] * 2, "num_hidden_layers": 2},
    }


MODELS = pytest.mark.parametrize("kinds", _settings())
ROWS = pytest.mark.parametrize("rows", PROMPTS)


def _nothing(cache: PagedPrefixCache) -> None:
    """The store is new."""


def _reset(cache: PagedPrefixCache) -> None:
    run(cache.store.model, cache, input_ids=torch.tensor([row((3, 30))]))
    cache.reset()
    cache.reset_prefix_cache()


def _prefilled_with_less_than_a_block(cache: PagedPrefixCache) -> None:
    cache.prefill(row((1, 3)))


def _used(cache: PagedPrefixCache) -> None:
    run(cache.store.model, cache, input_ids=torch.tensor([row((3, 30))]))


def _loaded(cache: PagedPrefixCache) -> None:
    """The store is new, and knows most of the first row."""
    teacher = PagedPrefixCache(cache.store.model, block_size=4)
    run(teacher.store.model, teacher, input_ids=torch.tensor([row((1, 60))]), max_new_tokens=1)
    with TemporaryDirectory() as folder:
        teacher.store.save(folder)
        cache.store.load(folder)


STORES = pytest.mark.parametrize("before", [_nothing, _reset, _prefilled_with_less_than_a_block, _used, _loaded])


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = PADDED + max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@STORES
@ROWS
@MODELS
def test_generate_gives_the_same_and_so_does_the_bare_prompt_afterwards(kinds: str, rows: str, before: Any) -> None:
    model = build("gemma3", **_settings()[kinds])
    cache = PagedPrefixCache(model, block_size=4)
    before(cache)
    given = padded(PROMPTS[rows])
    assert_same(run(model, **given), run(model, cache, **given))
    bare = {"input_ids": torch.tensor(PROMPTS[rows])}
    assert_same(run(model, **bare), run(model, cache, **bare))
    assert cache.last_call.reused_tokens > 0


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


@pytest.mark.parametrize("stops", [[79], [PADDED, 79], [PADDED - 2, PADDED + 3, 79], [PADDED + 1, 78, 79]])
@STORES
@MODELS
def test_plain_forwards_give_the_same_in_whatever_chunks(kinds: str, before: Any, stops: Any) -> None:
    model = build("gemma3", **_settings()[kinds])
    cache = PagedPrefixCache(model, block_size=4)
    before(cache)
    cache.reset()
    given = padded(PROMPTS["two rows"])
    wanted = logits_of(model, DynamicCache(config=model.config), stops, given)
    for _ in range(2):  # unknown, and known
        got = logits_of(model, cache, stops, given)
        cache.reset()
        assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


@MODELS
def test_a_chunked_prompt_gives_the_same(kinds: str) -> None:
    model = build("gemma3", **_settings()[kinds])
    given = padded(PROMPTS["two rows"]) | {"prefill_chunk_size": 5}
    assert_same(run(model, **given), run(model, PagedPrefixCache(model, block_size=4), **given))


@MODELS
def test_rows_that_share_a_prefix_computed_ahead_of_them_give_the_same(kinds: str) -> None:
    model = build("gemma3", **_settings()[kinds])
    store = PrefixStore(model, block_size=4)
    given = padded([row((1, 300), (5, 9)), row((1, 300), (6, 12)), row((1, 300), (7, 3))])
    for _ in range(2):  # unknown, and known
        assert_same(run(model, **given), run(model, PagedPrefixCache(store), **given))


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
        run(model, cache, **padded(PROMPTS["one row"]))
        cache.store.save(tmp_path)
        cache = PagedPrefixCache(model, **options)
        cache.store.load(tmp_path)
    for is_known, rows in ((is_loaded, "one row"), (True, "two rows")):
        given = padded(PROMPTS[rows])
        assert_same(run(model, **given), run(model, cache, **given))
        assert bool(cache.last_call.reused_tokens) == is_known
    assert cache.get_seq_length(1) == 0
