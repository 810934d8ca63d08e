"""The models that bench_generate.py runs on: the demo's, one that is named, or random weights in a known shape."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from hf_paged_cache.cli.demo_model import load_demo_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama-3.1-8B, its rope scaling apart
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16_384,
        "initializer_range": 0.2,  # large enough that other keys and values give other tokens
    },
    # Gemma 3's layers, twelve of them: five with a window, one without, and so on. The vocabulary is small: it is not
    # what is timed.
    "gemma-3": {
        "vocab_size": 1024,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "max_position_embeddings": 131_072,
        "initializer_range": 0.1,
    },
    # gpt-oss's: every other layer has a window, all have attention sinks.
    "gpt-oss": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
        "max_position_embeddings": 131_072,
        "initializer_range": 0.1,
    },
    # Qwen3.5's: three gated delta nets, one layer of attention, and so on.
    "qwen3.5": {
        "vocab_size": 1024,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
        "max_position_embeddings": 131_072,
        "initializer_range": 0.1,
    },
    # LFM2's: two short convolutions, one layer of attention, and so on.
    "lfm2": {
        "vocab_size": 1024,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "layer_types": [*["conv"] * 2, "full_attention"] * 4,
        "max_position_embeddings": 131_072,
        "initializer_range": 0.1,
    },
}
SHAPES |= {  # wider, where forwards take longer and what is done beside them counts less
    "gemma-3-1b": SHAPES["gemma-3"] | {"hidden_size": 1152, "intermediate_size": 6912},  # Gemma 3 1B's widths
    "gpt-oss-wide": SHAPES["gpt-oss"] | {"hidden_size": 1440, "intermediate_size": 1440, "num_attention_heads": 32},
}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "gemma-3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma-3-1b": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM),
    "gpt-oss-wide": (GptOssConfig, GptOssForCausalLM),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM),
}


def default_device() -> torch.device:
    """A CUDA device, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a CUDA device, float32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load(name: str | None, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The demo's model, or a folder or a name on the hub, and its tokenizer."""
    model, tokenizer = load_demo_model(name, dtype=dtype, device=device)
    return model, tokenizer


def random_model(shape: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """Seeded random weights in one of `SHAPES`, made on the device: good for times, not for text; `changes` of its
    settings.
    """
    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, **SHAPES[shape], **changes}
    config_class, model_class = _CLASSES.get(shape, (LlamaConfig, LlamaForCausalLM))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            model = model_class(config_class(**settings)).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    return model


def quick_changes(shape: str) -> dict[str, Any]:
    """Changes of a shape's settings with which it only shows that something runs: narrow, and up to its first layer
    without a window.
    """
    kinds = SHAPES[shape]["layer_types"]
    kinds = kinds[: kinds.index("full_attention") + 1]
    return {"hidden_size": 160, "intermediate_size": 160, "num_hidden_layers": len(kinds), "layer_types": kinds}


def tiny(device: torch.device) -> PreTrainedModel:
    """Two small layers in float32."""
    return random_model("tiny", device, torch.float32)
