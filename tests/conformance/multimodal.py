"""Tiny image-text models whose text decoder is one of the zoo's, and inputs for them with and without an image.

Inputs hold what the model's processor would give. Text ids are below `VOCABULARY`, image placeholders are not, so
that no text holds one by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import zoo
from .zoo_settings import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE_TOKEN = VOCABULARY  # the id of an image's placeholder
_IMAGE, _PATCH = 32, 8  # pixels of an image's and of a patch's side: 16 patches
_FRAMES, _MEL_BINS = 64, 8  # of what stands in for an image where a model hears
_TEXT = {"vocab_size": VOCABULARY + 8}
_TOWER = {"image_size": _IMAGE, "patch_size": _PATCH}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class _Kind:
    """A class of models: its configuration's changes, the placeholders of an image, and the ids beside the tokens."""

    config_class: str
    model_class: str
    changes: dict[str, Any]
    num_placeholders: int
    token_types: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> type of text, of an image
    layout: str = "plain"  # of pixel_values


def _kinds() -> dict[str, _Kind]:
    towers = {"text_config": _TEXT, "vision_config": _TOWER}
    qwen_text = {**_TEXT, "rope_parameters": _MROPE}
    patches = {"patch_size": _PATCH}
    idefics = {**towers, "image_token_id": IMAGE_TOKEN, "scale_factor": 2}
    return {
        "llava": _Kind(
            "LlavaConfig",
            "LlavaForConditionalGeneration",
            {**towers, "image_token_index": IMAGE_TOKEN, "image_seq_length": 16},
            16,
        ),
        "qwen2_vl": _Kind(
            "Qwen2VLConfig",
            "Qwen2VLForConditionalGeneration",
            {
                "text_config": qwen_text,
                "vision_config": {**patches, "embed_dim": 64},
                "image_token_id": IMAGE_TOKEN,
                "video_token_id": IMAGE_TOKEN + 1,
            },
            4,
            {"mm_token_type_ids": (0, 1)},
            "patches",
        ),
        "qwen2_5_vl": _Kind(
            "Qwen2_5_VLConfig",
            "Qwen2_5_VLForConditionalGeneration",
            {
                "text_config": qwen_text,
                "vision_config": {**patches, "out_hidden_size": 64, "window_size": 32, "fullatt_block_indexes": [1]},
                "image_token_id": IMAGE_TOKEN,
                "video_token_id": IMAGE_TOKEN + 1,
            },
            4,
            {"mm_token_type_ids": (0, 1)},
            "patches",
        ),
        "qwen3_vl": _Kind(  # its tower also adds to the decoder's first layers
            "Qwen3VLConfig",
            "Qwen3VLForConditionalGeneration",
            {
                "text_config": qwen_text,
                "vision_config": {
                    **patches,
                    "out_hidden_size": 64,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0, 1],
                },
                "image_token_id": IMAGE_TOKEN,
                "video_token_id": IMAGE_TOKEN + 1,
                "vision_start_token_id": IMAGE_TOKEN + 2,
                "vision_end_token_id": IMAGE_TOKEN + 3,
            },
            4,
            {"mm_token_type_ids": (0, 1)},
            "patches",
        ),
        "qwen3_5": _Kind(  # some layers carry a state
            "Qwen3_5Config",
            "Qwen3_5ForConditionalGeneration",
            {
                "text_config": {**qwen_text, "linear_key_head_dim": 64},
                "vision_config": {**patches, "out_hidden_size": 64, "num_position_embeddings": 16},
                "image_token_id": IMAGE_TOKEN,
                "video_token_id": IMAGE_TOKEN + 1,
                "vision_start_token_id": IMAGE_TOKEN + 2,
                "vision_end_token_id": IMAGE_TOKEN + 3,
            },
            4,
            {"mm_token_type_ids": (0, 1)},
            "patches",
        ),
        "cohere_compass": _Kind(
            "CohereCompassConfig",
            "CohereCompassForConditionalGeneration",
            {
                "text_config": _TEXT,
                "vision_config": {
                    **patches,
                    "out_hidden_size": 64,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0, 1],
                },
                "image_token_id": IMAGE_TOKEN,
                "video_token_id": IMAGE_TOKEN + 1,
                "vision_start_token_id": IMAGE_TOKEN + 2,
                "vision_end_token_id": IMAGE_TOKEN + 3,
            },
            4,
            {"mm_token_type_ids": (0, 1)},
            "patches",
        ),
        "internvl": _Kind(
            "InternVLConfig",
            "InternVLForConditionalGeneration",
            {
                "text_config": _TEXT,
                "vision_config": {"image_size": [_IMAGE, _IMAGE], "patch_size": [_PATCH, _PATCH]},
                "image_token_id": IMAGE_TOKEN,
                "image_seq_length": 4,
            },
            4,
        ),
        "gemma3": _Kind(
            "Gemma3Config",
            "Gemma3ForConditionalGeneration",
            {**towers, "image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4},
            4,
            {"token_type_ids": (0, 1)},
        ),
        "gemma4": _Kind(
            "Gemma4Config",
            "Gemma4ForConditionalGeneration",
            {
                "text_config": _TEXT,
                "vision_config": {  # the default has no tower
                    "model_type": "gemma4_vision",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "head_dim": 16,
                    "patch_size": _PATCH,
                    "pooling_kernel_size": 2,
                    "position_embedding_size": 16,
                },
                "image_token_id": IMAGE_TOKEN,
                "video_token_id": IMAGE_TOKEN + 1,
                "audio_token_id": IMAGE_TOKEN + 2,
                "boi_token_id": IMAGE_TOKEN + 3,
                "eoi_token_id": IMAGE_TOKEN + 4,
                "boa_token_id": IMAGE_TOKEN + 5,
                "eoa_token_index": IMAGE_TOKEN + 6,
            },
            4,
            {"mm_token_type_ids": (0, 1)},
            "placed patches",
        ),
        "paligemma": _Kind(
            "PaliGemmaConfig",
            "PaliGemmaForConditionalGeneration",
            {**towers, **_TEXT, "image_token_index": IMAGE_TOKEN},
            16,
            {"token_type_ids": (0, 0)},
        ),
        "qwen2_audio": _Kind(
            "Qwen2AudioConfig",
            "Qwen2AudioForConditionalGeneration",
            {
                "text_config": _TEXT,
                "audio_config": {"num_mel_bins": _MEL_BINS, "max_source_positions": _FRAMES // 2},
                "audio_token_index": IMAGE_TOKEN,
            },
            _FRAMES // 4,
            layout="mel",
        ),
        "idefics3": _Kind("Idefics3Config", "Idefics3ForConditionalGeneration", idefics, 4, layout="images"),
        "smolvlm": _Kind("SmolVLMConfig", "SmolVLMForConditionalGeneration", idefics, 4, layout="images"),
        "mllama": _Kind(
            "MllamaConfig",
            "MllamaForConditionalGeneration",
            {
                "vision_config": {
                    **_TOWER,
                    "num_global_layers": 1,
                    "intermediate_layers_indices": [0, 1],
                    "vision_output_dim": 192,
                    "max_num_tiles": 2,
                    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
                },
                "image_token_index": IMAGE_TOKEN,  # the embedding has 8 rows more than the vocabulary
            },
            1,
            layout="tiles",
        ),
    }


_KINDS = _kinds()
IMAGE_TEXT: tuple[str, ...] = tuple(_KINDS)


def build_image_text(name: str, seed: int = 0) -> PreTrainedModel:
    """A new tiny image-text model, as `zoo.build` makes them; its gates are open, so that images matter.

    Raises:
        KeyError: unknown name.
    """
    import transformers

    kind = _KINDS[name]
    config = zoo.tiny_configuration(getattr(transformers, kind.config_class), kind.changes)
    model = zoo.instantiate(getattr(transformers, kind.model_class), config, seed)
    for parameter_name, parameter in model.named_parameters():
        if parameter.numel() == 1 and parameter_name.endswith("gate"):
            torch.nn.init.constant_(parameter, 1.0)
    return model


def text_inputs(name: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """What `generate` takes for one row of text: ids, mask, and the token types that this model's processor adds."""
    ids = torch.tensor([tokens])
    types = {key: torch.full_like(ids, text) for key, (text, _) in _KINDS[name].token_types.items()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


def image_inputs(name: str, before: list[int], after: list[int], image_seed: int = 0) -> dict[str, torch.Tensor]:
    """What `generate` takes for one row of text with an image in it, whose pixels depend on `image_seed` alone."""
    kind = _KINDS[name]
    inputs = text_inputs(name, before + [IMAGE_TOKEN] * kind.num_placeholders + after)
    placeholders = slice(len(before), len(before) + kind.num_placeholders)
    for key, (_, image) in kind.token_types.items():
        inputs[key][:, placeholders] = image
    return inputs | _pixels(kind.layout, inputs["input_ids"].shape[1], len(before), image_seed)


def example_inputs(name: str, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs of 40 text tokens, and of 24 text tokens, an image and 12 more."""
    tokens = torch.randint(1, VOCABULARY, (76,), generator=torch.Generator().manual_seed(seed)).tolist()
    return text_inputs(name, tokens[:40]), image_inputs(name, tokens[40:64], tokens[64:], seed)


def _pixels(layout: str, columns: int, image_column: int, seed: int) -> dict[str, torch.Tensor]:
    """The image itself, and what says how it is laid out, for a row of `columns` tokens."""
    if layout == "mel":  # [sounds, bins, frames]
        frames = torch.randn(1, _MEL_BINS, _FRAMES, generator=torch.Generator().manual_seed(seed))
        return {"input_features": frames, "feature_attention_mask": torch.ones(1, _FRAMES, dtype=torch.long)}
    image = torch.randn(1, 3, _IMAGE, _IMAGE, generator=torch.Generator().manual_seed(seed))
    if layout == "plain":
        return {"pixel_values": image}
    if layout == "images":  # [rows, images, channels, height, width]
        return {"pixel_values": image[None], "pixel_attention_mask": torch.ones(1, 1, _IMAGE, _IMAGE, dtype=torch.long)}
    if layout == "placed patches":  # [images, patches, channels * patch area], and where each stands
        side = _IMAGE // _PATCH
        pixels = image.reshape(3, side, _PATCH, side, _PATCH).permute(1, 3, 0, 2, 4).reshape(1, side * side, -1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
        return {"pixel_values": pixels, "image_position_ids": places[None]}
    if layout == "patches":  # [patches, channels * 2 frames * patch area], and how many along time, height, width
        side = _IMAGE // _PATCH
        patches = image.reshape(3, side, _PATCH, side, _PATCH).permute(1, 3, 0, 2, 4).reshape(side * side, 3, 1, -1)
        pixels = patches.expand(-1, -1, 2, -1).reshape(side * side, -1)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    # Tiles: [rows, images, tiles, channels, height, width]; tokens from the image's placeholder on attend to it.
    tiles = torch.cat([image, torch.zeros_like(image)])[None, None]
    attended = torch.zeros(1, columns, 1, 2, dtype=torch.long)
    attended[:, image_column:, :, 0] = 1
    return {
        "pixel_values": tiles,
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]]),
        "cross_attention_mask": attended,
    }
