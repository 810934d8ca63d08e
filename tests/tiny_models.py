"""Tiny models built from their configurations, seeded, with weights large enough that keys and values matter.

Matrices are drawn with a standard deviation of 0.2: with much less, tokens hardly depend on keys and values and no
check of them would see anything. Windows are shorter than the tests' prompts.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

VOCABULARY = 128
WINDOW = 24  # of sliding layers
CHARACTERS = ("\n", *map(chr, range(32, 127)))

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_GPT_LIKE = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_BERT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}

# name -> configuration class, model class, settings
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA_LIKE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _LLAMA_LIKE),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT_LIKE),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_LLAMA_LIKE, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_LLAMA_LIKE,
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    # Not held, or not always: see test_bad_input.py.
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "bert": ("BertConfig", "BertLMHeadModel", {**_BERT_LIKE, "is_decoder": False}),
    "bert_decoder": ("BertConfig", "BertLMHeadModel", {**_BERT_LIKE, "is_decoder": True}),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_LLAMA_LIKE,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {**_LLAMA_LIKE, "layer_types": ["conv", "full_attention"]}),
}


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A new tiny model; `changes` go into its configuration."""
    config_class, model_class, settings = SETTINGS[name]
    settings = {**settings, **changes, "initializer_range": 0.2}
    if name != "t5":
        settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0} | settings
    config = getattr(transformers, config_class)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config).to(torch.float32).eval()
        for parameter in model.parameters():  # not every model heeds initializer_range
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.pad_token_id = 0
    return model


@cache
def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """The same model for all tests of a run, which must leave it as it was."""
    return build(name, seed)


def without_logits_to_keep(model: PreTrainedModel) -> PreTrainedModel:
    """The same Llama, changed to one that cannot leave out logits, as many of the hub's."""

    class AllLogits(LlamaForCausalLM):
        def forward(  # type: ignore[override]
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            use_cache: bool | None = None,
            return_dict: bool | None = None,
        ) -> Any:
            return super().forward(
                input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache, return_dict=return_dict
            )

    model.__class__ = AllLogits
    return model


def character_tokenizer(characters: Sequence[str]) -> PreTrainedTokenizerBase:
    """A character a token, with ids from 3 on in the order given.

    A longer text among them has an id, and never comes up.
    """
    ids = {text: number for number, text in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
