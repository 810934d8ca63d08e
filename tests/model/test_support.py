"""Which models are held, and what is said of the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers
from packaging import version
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_paged_cache import PrefixStore, UnsupportedModelError
from hf_paged_cache.model.support import (
    cache_layers,
    has_keys,
    has_state,
    leaves_doubt,
    require_supported,
    takes,
)

from ..conformance import image_zoo
from ..conformance.zoo import build as build_type

BEFORE_5_23 = version.parse(transformers.__version__) < version.parse("5.23")
FROM_5_23 = pytest.mark.skipif(BEFORE_5_23, reason="earlier versions compute it otherwise")
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def refused(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        require_supported(model)
    return str(caught.value)


def test_an_encoder_decoder_is_refused() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    message = "T5ForConditionalGeneration is an encoder-decoder model; only decoders that generate alone are supported"
    assert refused(model) == message


def test_a_model_without_a_head_is_refused(tiny_llama: Any) -> None:
    assert "LlamaModel cannot generate; pass the model with a language-modeling head" in refused(
        LlamaModel(tiny_llama.config)
    )


@FROM_5_23
@pytest.mark.parametrize("name", ["lfm2", "bamba", "falcon_h1", "qwen3_next", "mamba2", "minimax"])
def test_layers_that_carry_states_are_held_and_tried(name: str) -> None:
    model = build_type(name)
    require_supported(model)
    assert leaves_doubt(model)


@FROM_5_23
@pytest.mark.parametrize("name", ["jamba", "zamba", "mamba", "falcon_mamba"])
def test_a_state_that_several_tokens_do_not_continue_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="its scan of several tokens starts without the state before them"):
        PrefixStore(build_type(name))


@FROM_5_23
def test_kinds_of_layers_are_told_apart_by_what_they_carry() -> None:
    kinds = {}
    for name in ("falcon_h1", "qwen3_next", "zaya"):
        for layer in cache_layers(build_type(name)):
            kinds[type(layer).__name__] = has_keys(layer), has_state(layer)
    assert kinds == {
        "DynamicLayer": (True, False),
        "LinearAttentionLayer": (False, True),
        "LinearAttentionAndFullAttentionLayer": (True, True),
        "LinearAttentionAndSlidingWindowAttentionLayer": (True, True),
    }


@FROM_5_23
def test_a_layer_that_carries_more_than_keys_values_and_states_is_refused_by_number_and_type() -> None:
    message = refused(build_type("deepseek_v4"))
    assert (
        "DeepseekV4ForCausalLM: layer 0 is a DeepseekV4HCACache, which carries more than keys, values and states"
        in message
    )


@FROM_5_23
def test_an_index_that_takes_its_sizes_from_the_cache_in_the_middle_of_a_forward_is_refused_by_name() -> None:
    message = refused(image_zoo.build("glm5_next"))
    assert "Glm5NextTextIndexer looks at what its layer of the cache holds in the middle of a forward" in message


def test_a_window_in_the_cache_that_the_mask_does_not_know_is_refused() -> None:
    assert "has layers with a sliding window in its cache, but a mask that knows none" in refused(
        build_type("moshi@window")
    )


@pytest.mark.parametrize(
    "name", ["llama", "gemma4_text", "mistral", "llama4_text", "gpt_oss", "ministral", "phi3@sliding", "moshi"]
)
def test_decoders_are_held_whose_mask_knows_their_windows_or_whose_layers_read_those_of_another(name: str) -> None:
    require_supported(build_type(name))


def test_a_config_that_transformers_makes_no_cache_of_is_refused() -> None:
    assert "transformers cannot make a DynamicCache of its config (AttributeError: " in refused(build_type("blt"))


@pytest.mark.parametrize(
    ("name", "doubt"),
    [("llama", False), ("gemma3n_text", False), ("bloom", True), ("bart", True), ("git", True), ("mixtral", True)],
)
def test_doubt_is_left_where_positions_or_images_are_not_arguments_of_their_own(name: str, doubt: bool) -> None:
    assert leaves_doubt(build_type(name)) is doubt


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("git", "differ in a row with padding by", marks=FROM_5_23),
        pytest.param("doge@moe", "depend on more than the tokens before them", marks=FROM_5_23),
        ("gemma3_text@bidirectional", "depend on more than the tokens before them"),
        ("rembert", "(config.is_decoder is False; load it with is_decoder=True if it is to generate)"),
        ("cpmant", "after 16 tokens its cache holds 24"),
        ("prophetnet", "it cannot be continued after a cache (AssertionError: "),
    ],
)
def test_what_the_structure_does_not_show_is_refused_after_a_trial(name: str, reason: str) -> None:
    model = build_type(name)
    require_supported(model)
    with pytest.raises(UnsupportedModelError) as caught:
        PrefixStore(model)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(type(model).__name__)


@pytest.mark.parametrize("is_decoder", [True, False])
def test_a_model_of_berts_kind_is_supported_exactly_as_a_decoder(is_decoder: bool) -> None:
    model = BertLMHeadModel(BertConfig(**SMALL, is_decoder=is_decoder))
    if is_decoder:
        require_supported(model)
    else:
        assert "BertLMHeadModel attends in both directions (config.is_decoder is False)" in refused(model)


def test_doubt_is_left_where_two_layers_have_one_number(tiny_llama: Any) -> None:
    assert not leaves_doubt(tiny_llama)
    tiny_llama.second_stack = copy.deepcopy(tiny_llama.model.layers[:1])
    assert leaves_doubt(tiny_llama)


def test_the_layers_are_those_of_a_dynamic_cache(tiny_llama: Any) -> None:
    expected = DynamicCache(config=tiny_llama.config).layers
    assert [type(layer) for layer in cache_layers(tiny_llama)] == [type(layer) for layer in expected]


def test_an_argument_is_taken_if_the_forward_names_it(tiny_llama: Any) -> None:
    assert takes(tiny_llama, "position_ids")
    assert takes(tiny_llama, "logits_to_keep")
    assert not takes(tiny_llama, "token_type_ids")
