"""Each row of the table in docs/what_is_reused.md is a call that is made here, and says what the page quotes."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged_cache import CacheArgumentError, PagedPrefixCache

from ..reference import assert_near
from ..tiny_models import build

PAGE = Path(__file__).parents[2] / "docs" / "what_is_reused.md"
REASONS = PAGE.with_name("troubleshooting.md")  # its table has each way in which a match ends
if not PAGE.exists():
    pytest.skip("the docs are not beside the tests", allow_module_level=True)
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


def with_another_attention(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    AttentionInterface.register("mine", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("mine")
    return generate()(model, cache)


def with_another_weight(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    return generate()(model, cache)


def with_gradients(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    with torch.enable_grad():
        return forward()(model, cache)


def with_attentions(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    return generate(output_attentions=True, return_dict_in_generate=True)(model, cache)


def with_a_hook(model: PreTrainedModel, cache: PagedPrefixCache) -> Any:
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    return generate()(model, cache)


HOLES = MASK.index_fill(1, torch.tensor([7]), 0)
CAUSAL = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e9)
CASES: dict[str, Call] = {
    "token ids, padded on the left or not": generate(input_ids=torch.cat((IDS, IDS[:, :20]), 1), attention_mask=None),
    "embeddings instead of ids": embeddings,
    "a mask with holes or right padding": generate(attention_mask=HOLES),
    "a mask of another form than rows and columns": forward(attention_mask=CAUSAL),
    "positions that do not count up": forward(position_ids=2 * torch.arange(LENGTH)[None]),
    "a tensor that is not read here": forward(token_type_ids=torch.ones_like(IDS)),
    "a flag, number or word that is not read here": generate(is_causal=False),
    "a `cache_position` that does not number the new columns": forward(cache_position=torch.arange(5, 5 + LENGTH)),
    "an attention of your own, chosen after the cache was built": with_another_attention,
    "an active dropout, jitter of a router, or NEFTune": with_dropout,
    "hidden states": generate(output_hidden_states=True, return_dict_in_generate=True),
    "attentions": with_attentions,
    "a hook or a replaced forward of others (below)": with_a_hook,
    "labels": forward(labels=IDS, logits_to_keep=0),
    "the logits of all tokens, as a plain forward gives them": forward(logits_to_keep=0),
    "gradients, as without `torch.no_grad()`": with_gradients,
    "a tuple instead of an output object": forward(return_dict=False),
    "other weights, adapters, settings, hooks or another salt": with_another_weight,
}


def new_model() -> PreTrainedModel:
    return build("llama", attention_dropout=0.1, attn_implementation="eager")


def table() -> Iterator[tuple[str, str, str]]:
    """The cells of each row of the table of calls."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "a call with":
            what, computed, said = cells
            yield what, computed, said.strip("`")


def test_the_table_and_the_cases_are_the_same() -> None:
    assert [what for what, _, _ in table()] == list(CASES)


@pytest.mark.parametrize(("what", "computed", "said"), list(table()))
def test_a_call_says_what_the_page_quotes(what: str, computed: str, said: str) -> None:
    model = new_model()
    cache = PagedPrefixCache(model, num_blocks=9)
    with torch.no_grad():
        generate()(model, cache)
        cache.reset()
        assert cache.stats().num_cached_blocks == LENGTH // 16
        CASES[what](model, cache)
    row = cache.last_call.rows[0]
    assert said in row.stopped
    assert (row.computed_tokens == row.prompt_tokens) == computed.startswith("whole")
    cold, plain = new_model(), new_model()
    cache, outputs = PagedPrefixCache(cold, num_blocks=9), list[torch.Tensor]()
    for model, past in ((cold, cache), (plain, DynamicCache(config=plain.config))):
        torch.manual_seed(0)
        with torch.no_grad():
            output = CASES[what](model, past)
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])
    assert_near(*outputs)
    cache.reset()
    assert (cache.stats().num_cached_blocks == 0) == ("not kept" in computed)


def test_without_the_cache_it_says_so_and_refuses_what_it_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    model = build("llama")
    cache = PagedPrefixCache(model)
    assert "`use_cache=False`: the call runs without the cache it was given, and warns" in text
    with pytest.warns(UserWarning, match=re.escape("use_cache=False: this call runs without the cache")):
        generate(use_cache=False)(model, cache)
    assert "`cache_implementation=...` together with the cache (`CacheArgumentError`)" in text
    with pytest.raises(CacheArgumentError, match="asks transformers for a cache of its own"):
        generate(cache_implementation="static")(model, cache)
    assert cache.stats().num_cached_blocks == 0


def test_a_match_ends_in_the_words_of_the_page() -> None:
    text = REASONS.read_text(encoding="utf-8")
    said = re.findall(r"^\| `([^`]+)` \| [^|]+ \|$", text, flags=re.MULTILINE)
    model = build("llama")
    cache = PagedPrefixCache(model)
    other = (IDS + 7) % 60
    pair = torch.cat((IDS, other))
    endings = []

    def end(ids: torch.Tensor, *, reset: bool = False) -> None:
        if reset:
            cache.reset()
        generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)(model, cache)
        endings.append(cache.last_call.rows[0].stopped)

    end(IDS)  # no cached block has these first
    end(IDS)  # the whole prompt was known
    end(IDS[:, :40])
    end(torch.cat((IDS[:, :40], other[:, :20]), dim=1))  # the last call's row ends at token
    end(torch.cat((IDS[:, :20], other[:, :20]), dim=1))  # the prompt differs from the last call's tokens at token
    end(torch.cat((IDS[:, :16], other[:, :30]), dim=1), reset=True)  # no cached block continues with tokens
    end(IDS[:, :40], reset=True)  # there is no full block
    end(pair, reset=True)  # another row's hit is shorter
    mask = torch.ones(2, cache.get_seq_length() + 2, dtype=torch.long)
    generate(input_ids=pair[:, :2], attention_mask=mask, max_new_tokens=1)(model, cache)  # the last call's rows resumed
    endings.append(cache.last_call.rows[0].stopped)
    windowed = PagedPrefixCache(build("mistral"))
    for question in (other, other.flip(1)):  # a window no longer shows what is before token
        ids = torch.cat((IDS, IDS + 1, IDS + 2, question, question, question), dim=1)
        generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)(windowed.store.model, windowed)
    endings.append(windowed.last_call.rows[0].stopped)
    hybrid = PagedPrefixCache(build("qwen3_next"))
    for question in (other, other.flip(1)):  # but no state after token
        ids = torch.cat((IDS, IDS + 1, question), dim=1)
        generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)(hybrid.store.model, hybrid)
        hybrid.reset()
    endings.append(hybrid.last_call.rows[0].stopped)
    assert [[phrase for phrase in said if phrase in ending] != [] for ending in endings] == [True] * len(endings)
    assert {phrase for phrase in said for ending in endings if phrase in ending} == set(said)
