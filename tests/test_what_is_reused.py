"""docs/what_is_reused.md: each row of its table is a call that is made here, and what it quotes is what the call says."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from .tiny_models import build

PAGE = Path(__file__).parents[1] / "docs" / "what_is_reused.md"
if not PAGE.exists():
    pytest.skip("the docs are not beside the tests", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 48
IDS = torch.arange(2, 2 + LENGTH)[None] % 60
MASK = torch.ones_like(IDS)
Call = Callable[[PreTrainedModel, PagedPrefixCache], Any]


def forward(**given: Any) -> Call:
    def call(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
        return model(**{"input_ids": IDS, "past_key_values": cache, "logits_to_keep": 1, **given})

    return call


def generate(**given: Any) -> Call:
    def call(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
        given_ids = {} if "inputs_embeds" in given else {"input_ids": IDS}
        return model.generate(
            **{"attention_mask": MASK, "max_new_tokens": 2, **given_ids, **given, "past_key_values": cache}
        )

    return call


def embeddings(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    return generate(inputs_embeds=model.get_input_embeddings()(IDS))(model, cache)


def with_dropout(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    model.train()
    return generate()(model, cache)


def with_another_weight(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    return generate()(model, cache)


def with_eager_attention(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    return generate(output_attentions=True, return_dict_in_generate=True)(model, cache)


HOLES = MASK.index_fill(1, torch.tensor([7]), 0)
CAUSAL = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e9)
CASES: dict[str, Call] = {
    "token ids, padded on the left or not": generate(input_ids=torch.cat((IDS, IDS[:, :20]), 1), attention_mask=None),
    "embeddings instead of ids": embeddings,
    "a mask with holes or right padding": generate(attention_mask=HOLES),
    "a mask of another form than rows and columns": forward(attention_mask=CAUSAL),
    "positions that do not count up": forward(position_ids=2 * torch.arange(LENGTH)[None]),
    "a tensor that is not read here, such as token types": forward(token_type_ids=torch.zeros_like(IDS)),
    "an active dropout": with_dropout,
    "hidden states": generate(output_hidden_states=True, return_dict_in_generate=True),
    "attentions": with_eager_attention,
    "labels": forward(labels=IDS, logits_to_keep=0),
    "the logits of all tokens, as a plain forward gives them": forward(logits_to_keep=0),
    "a tuple instead of an output object": forward(return_dict=False),
    "other weights, adapters, hooks or another salt": with_another_weight,
}


def table() -> Iterator[tuple[str, str, str]]:
    """The cells of each row."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "a call with":
            what, computed, said = cells
            yield what, computed, said.strip("`")


def test_the_table_and_the_cases_are_the_same() -> None:
    assert [what for what, _, _ in table()] == list(CASES)


@pytest.mark.parametrize(("what", "computed", "said"), list(table()))
def test_a_call_says_what_the_page_quotes(what: str, computed: str, said: str) -> None:
    model = build("llama", attention_dropout=0.1, attn_implementation="eager")
    cache = PagedPrefixCache(model)
    with torch.no_grad():
        generate()(model, cache)
        cache.reset()
        known = cache.stats().num_cached_blocks
        with contextlib.suppress(NotImplementedError):
            CASES[what](model, cache)
        row = cache.last_call.rows[0]
        assert said in row.stopped
        is_whole = computed.startswith("whole")
        assert (row.computed_tokens == row.prompt_tokens) == is_whole
        assert known > 0
        cache.reset()
        assert (cache.stats().num_cached_blocks > known) == ("and kept" in computed or not is_whole)


def test_without_the_cache_it_says_so_and_refuses_what_it_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    model = build("llama")
    cache = PagedPrefixCache(model)
    assert "`use_cache=False` runs without the cache it was given, and warns" in text
    with pytest.warns(UserWarning, match=re.escape("use_cache=False: this call runs without the cache")):
        generate(use_cache=False)(model, cache)
    assert "`cache_implementation=...` together with the cache is refused" in text
    with pytest.raises(ValueError, match="asks transformers for a cache of its own"):
        generate(cache_implementation="static")(model, cache)
    assert cache.stats().num_cached_blocks == 0
