"""The models that bench_generate.py runs on: the demo's, one that is named, or one of random weights in a known shape."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

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


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Seeded random weights in one of `SHAPES`, made on the device: good for times, not for text."""
    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, **SHAPES[shape]}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    return model


def tiny(device: torch.device) -> PreTrainedModel:
    """Two small layers in float32."""
    return random_model("tiny", device, torch.float32)
