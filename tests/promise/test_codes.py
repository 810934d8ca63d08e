"""A model that continues with codes in place of token ids, as models of speech do: as `DynamicCache`, without reuse."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged_cache import CacheArgumentError, PagedPrefixCache

from ..internals import zero_blocks
from ..reference import assert_same, batch, is_same, row, run
from ..tiny_models import build

ROWS = batch(row((1, 40)), row((1, 24), (2, 7)))


class WithCodes(LlamaForCausalLM):
    """Takes two codes a column, [R, T, 2], and passes itself such for each token that it has chosen."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        codes: Any = None,
        logits_to_keep: Any = 0,
        **given: Any,
    ) -> Any:
        embeds = None if codes is None else self.get_input_embeddings()(codes).sum(dim=2)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=embeds,
            logits_to_keep=logits_to_keep,
            **given,
        )

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if input_ids.shape[1] > ROWS["input_ids"].shape[1]:
            ids = inputs.pop("input_ids")
            inputs["codes"] = torch.stack((ids, (ids + 1) % 64), dim=2)
        return inputs


@pytest.fixture
def model() -> WithCodes:
    llama = build("llama")
    model = WithCodes(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    model.generation_config = llama.generation_config
    return model


@pytest.mark.parametrize("num_beams", [1, 3])
def test_codes_are_computed_as_with_a_dynamic_cache_and_prompts_are_reused(num_beams: int, model: WithCodes) -> None:
    given: dict[str, Any] = {**ROWS, "num_beams": num_beams}
    reference = run(model, **given)
    cache = PagedPrefixCache(model, block_size=4)
    for is_known in (False, True):
        assert_same(reference, run(model, cache, **given))
        assert (cache.last_call.rows[0].reused_tokens > 0) == is_known
        cache.check()
    cache.reset()
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, **given))


def test_what_was_generated_from_codes_is_not_found(model: WithCodes) -> None:
    cache = PagedPrefixCache(model, block_size=4)
    output = run(model, cache, **ROWS, max_new_tokens=12)
    for tokens in output.sequences:
        assert cache.lookup(tokens[tokens != 0]).num_tokens <= 40
    assert cache.stats().num_cached_blocks <= 40 // 4 + 31 // 4


def test_a_forward_that_does_not_tell_its_columns_is_refused_and_the_rows_stay(model: WithCodes) -> None:
    cache = PagedPrefixCache(model, block_size=4)
    with torch.no_grad():
        model(ROWS["input_ids"][:1], past_key_values=cache)
        with pytest.raises(CacheArgumentError, match="that would tell how many columns it has"):
            model(codes=torch.ones(1, 1, 2, dtype=torch.int64), past_key_values=cache)
    assert cache.get_seq_length() == ROWS["input_ids"].shape[1]
