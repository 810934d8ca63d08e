"""Tiny models with seeded weights, one for each kind of model that the fuzzer plays.

Weights have a standard deviation of 0.2, so that tokens depend on keys and values.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
PAD, BEGIN, END = 0, 1, 2
WINDOW = 12
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "tie_word_embeddings": False,
    "use_cache": True,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

# Options beside COMMON; "kind@variant" is the model type `kind` with other options.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama@one_kv_head": {"num_key_value_heads": 1, "head_dim": 24, "rope_theta": 100.0},
    "mistral": {"sliding_window": WINDOW, "num_hidden_layers": 3},
    "mistral@full": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mixtral@window": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 3, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": MIXED},
    "gemma3n_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {},
    "qwen2@window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": MIXED},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "num_hidden_layers": 4,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
    },
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": MIXED},
    "exaone4": {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": MIXED},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    "ministral": {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": MIXED, "head_dim": 16},
    "modernbert-decoder": {
        "num_hidden_layers": 3,
        "local_attention": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "falcon": {"alibi": False, "multi_query": True, "parallel_attn": True},
    "falcon@alibi": {"alibi": True, "multi_query": False},
    "falcon@new": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "expansion_ratio": 2},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_inner": 96},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 8},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "xglm": {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 8, "n_ctx": 512},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "granite": {},
    "glm4": {"head_dim": 16},
    "phi": {},
    "phi3": {"sliding_window": None},
    "phi3@window": {"sliding_window": WINDOW},
    "phi3@longrope": {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 24,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 24,
        },
    },
    "deepseek_v2": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen3_next": {**DELTA, "head_dim": 16, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**DELTA, "head_dim": 16},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96},
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "mamba": {"state_size": 8},
}


def build(kind: str, seed: int = 0, attention: str = "sdpa") -> PreTrainedModel:
    """A model of `kind` whose weights follow from `seed`."""
    model_type, _, _ = kind.partition("@")
    config = AutoConfig.for_model(model_type, **{**COMMON, **KINDS[kind]})
    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
                elif parameter.numel() > 1 and bool((parameter == parameter[0]).all()):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    finally:
        torch.set_rng_state(state)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = END
    return model
