"""What a tiny model of each type is made of: sizes that hold for all, and settings of the types that need more.

Owns data only. `zoo.py` says how they are used. A type without an entry in `SETTINGS` needs nothing but `SIZES`.
"""

from __future__ import annotations

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
    "index_n_heads": 8,  # with fewer, many index scores are exactly 0 and ties decide
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

# type -> changes of its configuration; those of nested configurations under their own names.
SETTINGS: dict[str, dict[str, Any]] = {}

# "type@variant" -> changes on top of the type's.
VARIANTS: dict[str, dict[str, Any]] = {}

CANNOT_BUILD: dict[str, str] = {}
