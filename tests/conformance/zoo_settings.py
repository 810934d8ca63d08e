"""What a tiny model of each type is made of: sizes that hold for all, and settings of the types that need more.

Owns data only. `zoo.py` says how they are used. A type without an entry in `SETTINGS` needs nothing but `SIZES`.
"""

from typing import Any

VOCABULARY = 128
WINDOW = 24  # of sliding and chunked layers: two such layers see 46 columns back
POSITIONS = 512

_WIDTHS = {
    64: "hidden_size embedding_size input_embedding_size output_embedding_size word_embed_proj_dim lru_width"
    " attention_hidden_size embedding_dim moe_intermediate_size shared_expert_intermediate_size"
    " shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size"
    " prefix_dense_intermediate_size expert_ffn_hidden_size d_model n_embd projection_dim",
    128: "intermediate_size ffn_dim dim_ff dff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim d_inner d_ff"
    " feed_forward_size dense_intermediate_size intermediate_size_mlp mamba_d_ssm",
    4: "num_attention_heads num_heads encoder_attention_heads decoder_attention_heads swa_num_attention_heads"
    " num_encoder_attention_heads num_decoder_attention_heads mamba_n_heads mamba_num_heads linear_num_heads"
    " linear_num_value_heads mamba_dt_rank time_step_rank",
    2: "num_key_value_heads swa_num_key_value_heads num_kv_heads linear_num_key_heads",
    16: "head_dim dim_head d_head d_kv attention_head_size swa_head_dim attention_head_dim mamba_d_state state_size"
    " ssm_state_size linear_head_dim linear_key_head_dim linear_value_head_dim mamba_chunk_size chunk_size"
    " hidden_size_per_layer_input laurel_rank gated_norm_rank router_hidden_size",
    32: "mamba_d_head mamba_head_dim",
    1: "n_groups mamba_n_groups mamba_ngroups n_group topk_group num_expert_group",
}
_COUNTS = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size",
    WINDOW: "sliding_window attention_chunk_size local_attention_window_len window_size",
    POSITIONS: "max_position_embeddings n_ctx max_target_positions max_seq_len",
    4: "num_experts num_local_experts moe_num_experts n_routed_experts",
    2: "num_experts_per_tok moe_topk top_k_experts encoder_layers decoder_layers num_encoder_layers"
    " num_decoder_layers num_blocks",
}
# Generic name -> size. A configuration that calls it otherwise says so in its attribute_map.
SIZES: dict[str, int] = {
    name: size for table in (_WIDTHS, _COUNTS) for size, names in table.items() for name in names.split()
}
# Set even where the default is None, which then stands for "none of these" and not for "computed from the others".
LATENT_ATTENTION: dict[str, int] = {  # sizes of layers that cache one low-rank head (`kv_lora_rank`)
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "index_n_heads": 16,  # with fewer, some index scores are exactly 0 and ties decide
    "index_head_dim": 16,
    "index_topk": 8,
}
# Per-layer lists: the default's layers are thinned out to the first of each kind.
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "indexer_types",
    "no_rope_layers",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "intermediate_size",
    "activation_sparsity_pattern",
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_DENSE_AND_SPARSE = ["dense", "sparse"]

# type -> changes of its configuration. Nested configurations are cut down and changed under their own types.
SETTINGS: dict[str, dict[str, Any]] = {
    # Latent or indexed attention
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 4,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dots3_note_text": {  # its sliding layers have sizes of their own
        "head_dim": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 8,
    },
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2, "qk_head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": _DENSE_AND_SPARSE,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "rotary_dim": 8,
    },
    "qwen4_exp_text": {
        "linear_key_head_dim": 64,  # see below
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "num_key_value_heads": 1,
        "hc_lowrank": 4,
    },
    # States; with small keys, or a gate that closes, they would be overwritten soon
    "bailing_hybrid": {"head_dim": 64, "kda_lower_bound": -0.05},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"time_step_min": 1e-6},  # a step of one token knows no such limit
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {"time_step_min": 1e-6},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": WINDOW},
    # Kinds of layers that the default has none of, or counts them otherwise
    "cohere2_moe": {"mlp_layer_types": _DENSE_AND_SPARSE, "num_shared_experts": 1},
    "cohere_compass_text": {
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {kind: {**_ROPE, "mrope_section": [3, 3, 2]} for kind in _SLIDING_AND_FULL},
    },
    "dots1": {
        "layer_types": _SLIDING_AND_FULL,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "exaone_moe": {"first_k_dense_replace": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING_AND_FULL * 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING_AND_FULL * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    "gemma4_unified_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING_AND_FULL * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    "glm4_moe": {"first_k_dense_replace": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 8]},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": _DENSE_AND_SPARSE},
    "mimo_v2_flash": {"v_head_dim": 12},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "ministral": {"layer_types": _SLIDING_AND_FULL},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0], "linear_key_head_dim": 64},
    # Sizes under names of their own, and sizes that depend on others
    "blt": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 512},
    "blt_local_encoder": {"vocab_size": 260, "hidden_size_global": 64},
    "blt_local_decoder": {"vocab_size": 260, "hidden_size_global": 64},
    "blt_patcher": {"vocab_size": 260},
    "codegen": {"rotary_dim": 8},
    "cpmant": {"prompt_length": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gptj": {"rotary_dim": 8},
    "inkling_text": {"rel_extent": 64, "mlp_layer_types": _DENSE_AND_SPARSE},
    "inkling2_text": {"rel_extent": 64},
    "moshi": {"sliding_window": POSITIONS, "num_codebooks": 2},  # its mask knows no window
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "num_buckets": 4,
        "hash_seed": 0,
        "is_decoder": True,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 64,
        "pronunciation_embed_dim": 32,
        "shape_vocab_size": 64,
        "shape_embed_dim": 32,
    },
    "whisper": {"begin_suppress_tokens": None},
    "xmod": {"default_language": "en_XX"},
    # Towers of models that are built whole
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 64},
    "gemma3n_audio": {"conf_num_hidden_layers": 1, "conf_num_attention_heads": 4, "sscp_conv_channel_size": [8, 4]},
    "git_vision_model": {"image_size": 32, "patch_size": 8},
    "got_ocr2_vision": {"image_size": 64, "patch_size": 16, "mlp_dim": 64, "output_channels": 16, "window_size": 2},
    "phi4_multimodal_vision": {"image_size": 56, "patch_size": 14, "crop_size": 56},
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 16,
        "bias_max_distance": 32,
        "chunk_size": -1,
    },
    "siglip_vision_model": {"image_size": 32, "patch_size": 8},
}

_BERT_KIND = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta"
    " roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)
# What a length is scaled against lies within a test's lengths.
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 48,
}
_PHI_LONGROPE = {"original_max_position_embeddings": 48, "max_position_embeddings": 192, "rope_parameters": _LONGROPE}

# "type@variant" -> changes on top of the type's.
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{name}@decoder": {"is_decoder": True} for name in _BERT_KIND.split()},
    "bart@fewer_encoder_layers": {"encoder_layers": 1, "decoder_layers": 3},
    "bart@more_encoder_layers": {"encoder_layers": 3, "decoder_layers": 2},
    "bert@token_types": {"is_decoder": True},
    "deepseek_v3@no_q_lora": {"q_lora_rank": None},
    "doge@moe": {"is_moe": True, "num_experts": 16},
    "falcon@alibi": {"alibi": True},
    "falcon@new_decoder": {"new_decoder_architecture": True, "multi_query": False},
    "gemma2@eager": {"attn_implementation": "eager"},
    "gemma3_text@bidirectional": {"use_bidirectional_attention": True},
    "gemma4_text@moe": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "gpt_bigcode@multi_head": {"multi_query": False},
    "hrm_text@token_types": {},  # one block of them attends to itself in both directions
    "hrm_text@no_prefix": {"prefix_lm": False},
    "llama@dynamic_rope": {"max_position_embeddings": 48, "rope_parameters": _DYNAMIC},
    "llama@eager": {"attn_implementation": "eager"},
    "llama@llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama@longrope": {"max_position_embeddings": 192, "rope_parameters": _LONGROPE},
    "llama@one_kv_head": {"num_key_value_heads": 1},
    "llama@yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral@eager": {"attn_implementation": "eager"},
    "mixtral@sliding": {"sliding_window": WINDOW},
    "moshi@window": {"sliding_window": WINDOW},
    "phi3@longrope": _PHI_LONGROPE,
    "phi3@sliding": {"sliding_window": WINDOW},
    "phi4_multimodal@longrope": _PHI_LONGROPE,
    "phimoe@longrope": {**_PHI_LONGROPE, "rope_parameters": {**_LONGROPE, "short_mscale": 1.0, "long_mscale": 1.2}},
    "qwen2@sliding": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING_AND_FULL},
    "qwen4_exp_text@per_layer_embedding": {
        "eos_token_id": 1,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "starcoder2@sliding": {"sliding_window": WINDOW},
}

CANNOT_BUILD: dict[str, str] = {
    "gemma4_assistant": "a draft head: takes another model's hidden states and K/V, and no tokens",
    "gemma4_unified_assistant": "a draft head: takes another model's hidden states and K/V, and no tokens",
}
