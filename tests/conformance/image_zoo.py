"""A tiny, seeded model of each image-text type that the installed transformers knows, and prompts with images for it.

The list of types is transformers' own. Text decoders are cut down as the zoo's, towers by the names of their sizes;
what that does not find is in `SETTINGS`. How an image is passed follows from what `get_image_features` takes, and how
many placeholders it fills from what that returns: no processor is needed.
"""

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from . import zoo
from .zoo_settings import VOCABULARY

IMAGE_TOKEN = VOCABULARY  # of an image's placeholder; no text token of the prompts is above
_SIDE, _PATCH = 64, 8  # pixels
_GRID = _SIDE // _PATCH
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("image_size", "img_size", "input_size"), _SIDE),
    "patch_size": _PATCH,
    **dict.fromkeys(("embed_dim", "out_hidden_size", "hidden_size", "projection_dim", "mlp_dim", "output_dim"), 64),
    **dict.fromkeys(("depth", "num_layers"), 2),
    "num_heads": 4,
    "window_size": 32,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    **dict.fromkeys(("num_position_embeddings", "position_embedding_size", "num_patches"), _GRID**2),
    **dict.fromkeys(("init_pos_emb_height", "init_pos_emb_width", "pos_emb_height", "pos_emb_width"), _GRID),
}
_SPECIAL_TOKENS = [
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "boi_token_id",
    "eoi_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "image_start_token_id",
    "image_end_token_id",
    "boi_token_index",
    "eoi_token_index",
    "image_patch_id",
]
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
_PINPOINTS = {"image_grid_pinpoints": [[2 * _SIDE, 2 * _SIDE], [_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE]]}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

# type -> changes on top of the sizes
SETTINGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {_GRID**2: 16}},
    "cosmos3_edge": {"text_config": {"rope_parameters": _MROPE}},
    "gemma3": {"mm_tokens_per_image": 16},
    "gemma4": {
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
            "position_embedding_size": _GRID**2,
        }
    },
    **{
        name: {"text_config": {"rope_parameters": _MROPE}}
        for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl")
    },
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
    },
    "glm5_next": {"text_config": {"index_topk": 16}},
    "idefics3": {"scale_factor": 2},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "mllama": {
        "vision_config": {
            "image_size": 32,
            "patch_size": _PATCH,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        }
    },
    "qwen2_audio": {"audio_config": {"num_mel_bins": 8, "max_source_positions": 32}, "audio_token_index": IMAGE_TOKEN},
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen3_5": {"text_config": {"linear_key_head_dim": 64}},  # with small keys, states would be overwritten soon
    "qwen3_5_moe": {"text_config": {"linear_key_head_dim": 64}},
    "shieldgemma2": {"mm_tokens_per_image": 16},
    "smolvlm": {"scale_factor": 2},
    "vipllava": {"vision_feature_layers": [-2, -1]},
}


class Layout(NamedTuple):
    """How images are passed to a type.

    Attributes:
        shapes: of the tensors of one image that are drawn.
        beside: the tensors beside them, for one image.
        joined: the dimension along which those of one row are joined.
        num_tokens: placeholders of an image.
        types: names of token types, 1 for a placeholder.
        start: the token that stands before an image, by which Qwen's types count images before transformers 5.23; None:
        any.
    """

    shapes: dict[str, tuple[int, ...]]
    beside: dict[str, Tensor]
    joined: int
    num_tokens: int
    types: tuple[str, ...]
    start: int | None


# A sound, and an image that a cross attention reads.
_OTHERS = {
    "qwen2_audio": Layout(
        {"input_features": (1, 8, 64)},
        {"feature_attention_mask": torch.ones(1, 64, dtype=torch.int64)},
        joined=0,
        num_tokens=16,
        types=(),
        start=None,
    ),
    "mllama": Layout(
        {"pixel_values": (1, 1, 2, 3, 32, 32)},
        {"aspect_ratio_ids": torch.tensor([[1]]), "aspect_ratio_mask": torch.tensor([[[1, 0]]])},
        joined=0,
        num_tokens=1,
        types=(),
        start=None,
    ),
}


def model_types() -> list[str]:
    """All types of image-text models, sorted."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A new tiny model of a type. Raises whatever the model does where its sizes do not fit."""
    of_sounds = {"qwen2_audio": "Qwen2AudioForConditionalGeneration"}
    class_name: Any = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | of_sounds)[name]
    model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    config_class = model_class.config_class
    changes = _changes(config_class)
    for key, value in SETTINGS.get(name, {}).items():
        nested = isinstance(value, dict) and isinstance(changes.get(key), dict)
        changes[key] = {**changes[key], **value} if nested else value
    model = zoo.instantiate(model_class, zoo.tiny_configuration(config_class, changes), seed)
    if name == "mllama":
        for parameter_name, parameter in model.named_parameters():
            if parameter.numel() == 1 and parameter_name.endswith("gate"):  # is shut at first
                torch.nn.init.constant_(parameter, 1.0)
    return model


def layout_of(model: PreTrainedModel) -> Layout | None:
    """How images are passed, tried on its tower; None of a model without `get_image_features`.

    Raises:
        RuntimeError: none of the layouts that are known runs.
    """
    encoder = getattr(model.base_model, "get_image_features", None)
    if encoder is None:
        return None
    types = tuple(
        name for name in ("token_type_ids", "mm_token_type_ids") if name in inspect.signature(model.forward).parameters
    )
    errors = []
    for shapes, beside, joined in _layouts(list(inspect.signature(encoder).parameters)):
        drawn = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}
        try:
            with torch.no_grad():
                features: Any = encoder(**drawn, **beside, return_dict=True).pooler_output
        except Exception as error:  # noqa: BLE001 (a model may raise anything)
            errors.append(f"{type(error).__name__}: {error}")
            continue
        held = features if isinstance(features, list | tuple) else [features]
        num_tokens = sum(each.numel() // each.shape[-1] for each in held)
        start = getattr(model.config, "vision_start_token_id", None)
        return Layout(shapes, beside, joined, num_tokens, types, start)
    raise RuntimeError(errors[0])


@cache
def tiny(name: str) -> tuple[PreTrainedModel, Layout]:
    """A tiny model with images, and where they are in its prompts."""
    model = build(name)
    layout = _OTHERS.get(name) or layout_of(model)
    assert layout is not None
    return model, layout


def prompt(layout: Layout, *rows: Sequence[list[int] | int]) -> dict[str, Tensor]:
    """What `generate` takes for rows of text and images, padded on the left.

    Args:
        rows: each a sequence of token ids, and of seeds that the pixels of an image are drawn from.
    """
    ids: list[list[int]] = []
    for row in rows:
        ids.append([])
        for part in row:
            if isinstance(part, int) and ids[-1] and layout.start is not None:
                ids[-1][-1] = layout.start
            ids[-1] += part if isinstance(part, list) else [IMAGE_TOKEN] * layout.num_tokens
    columns = max(map(len, ids))
    padded = torch.tensor([[0] * (columns - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in ids])
    given = {"input_ids": padded, "attention_mask": mask}
    for name in layout.types:
        given[name] = (padded == IMAGE_TOKEN).to(torch.int64)
    of_rows = [[_image(layout, part) for part in row if isinstance(part, int)] for row in rows]
    for name in (*layout.shapes, *layout.beside):
        dim = layout.joined if name in layout.shapes or layout.joined > 0 else 0
        joined = [torch.cat([image[name] for image in images], dim) for images in of_rows if images]
        if joined and dim > 0:  # each row has as many, padded with zeros
            most = max(value.shape[1] for value in joined)
            rest = iter(joined)
            joined = [next(rest) if images else torch.zeros_like(joined[0][:, :0]) for images in of_rows]
            padding = [joined[0].new_zeros((1, most - value.shape[1], *value.shape[2:])) for value in joined]
            joined = [torch.cat(pair, 1) for pair in zip(joined, padding, strict=True)]
        if joined:
            given[name] = torch.cat(joined, min(dim, 0))  # patches of all rows may stand side by side
    return given


def example_inputs(name: str, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of 40 text tokens, and of 24 text tokens, an image and 12 more."""
    drawn, layout = tokens(seed, 76), tiny(name)[1]
    return prompt(layout, [drawn[:40]]), prompt(layout, [drawn[40:64], seed, drawn[64:]])


@cache
def tokens(seed: int, count: int) -> list[int]:
    """Text that depends on the seed alone."""
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _image(layout: Layout, seed: int) -> dict[str, Tensor]:
    drawn = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for name, shape in layout.shapes.items()
    }
    return drawn | layout.beside


def _layouts(takes: list[str]) -> Iterator[tuple[dict[str, tuple[int, ...]], dict[str, Tensor], int]]:
    """Shapes of what is drawn, tensors beside it, and how images of a row are joined."""
    area, image = 3 * _PATCH**2, (1, 3, _SIDE, _SIDE)
    pixels = "pixel_values"
    if grid := next((name for name in takes if "grid" in name), None):
        beside = {grid: torch.tensor([[1, _GRID, _GRID]])}
        if "image_merge_sizes" in takes:
            beside["image_merge_sizes"] = torch.tensor([2])
        for shape in ((_GRID**2, area), (_GRID**2, 2 * area), (_GRID**2, 3, _PATCH, _PATCH)):
            yield {pixels: shape}, beside, 0
    elif "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(_GRID), torch.arange(_GRID)).flip(-1)
        yield {pixels: (1, _GRID**2, area)}, {"image_position_ids": places[None]}, 0
    elif "spatial_shapes" in takes:
        beside = {
            "spatial_shapes": torch.tensor([[_GRID, _GRID]]),
            "pixel_attention_mask": torch.ones(1, _GRID**2, dtype=torch.int64),
        }
        yield {pixels: (1, _GRID**2, area)}, beside, 0
    elif "image_sizes" in takes:
        yield {pixels: image}, {"image_sizes": torch.tensor([[_SIDE, _SIDE]])}, 0
        yield {pixels: (1, 5, *image[1:])}, {"image_sizes": torch.tensor([[2 * _SIDE, 2 * _SIDE]])}, 0
    elif "pixel_attention_mask" in takes:
        mask = torch.ones(1, 1, _SIDE, _SIDE, dtype=torch.int64)
        yield {pixels: (1, *image)}, {"pixel_attention_mask": mask}, 1
    elif "target_sizes" in takes:
        yield {pixels: (1, 3, _PATCH, _GRID**2 * _PATCH)}, {"target_sizes": torch.tensor([[_GRID, _GRID]])}, -1
    elif "pixel_mask" in takes:
        yield {pixels: image}, {"pixel_mask": torch.ones(1, _SIDE, _SIDE, dtype=torch.bool)}, 0
    yield {pixels: image}, {}, 0
    yield {pixels: (1, *image)}, {}, 1


def _changes(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """What makes a configuration tiny beside what the zoo cuts: its special tokens, and the sizes of its towers."""
    default, names = config_class(), set(inspect.signature(config_class).parameters)
    changes: dict[str, Any] = {}
    for name in config_class.sub_configs:
        nested = getattr(default, name, None)
        is_text = name.startswith(("text", "llm", "decoder", "language", "thinker_text"))
        if is_text:
            changes[name] = {
                size: VOCABULARY + 16 for size in _VOCABULARIES if size in (*_parameters(nested), "vocab_size")
            }
            if "mrope_section" in (getattr(nested, "rope_parameters", None) or {}):
                changes[name]["rope_parameters"] = {**nested.rope_parameters, "mrope_section": _MROPE["mrope_section"]}
        elif nested is not None and not isinstance(nested, dict):
            held = {size: getattr(nested, size, None) for size in _SIZES if size in _parameters(nested)}
            changes[name] = {
                size: type(value)([_SIZES[size]] * len(value))
                if isinstance(value, list | tuple) and not isinstance(_SIZES[size], list)
                else _SIZES[size]
                for size, value in held.items()
                if value is not None
            }
    others = (token for token in _SPECIAL_TOKENS if token in names and not token.startswith("image_token"))
    changes |= {name: IMAGE_TOKEN + number for number, name in enumerate(others, 1)}
    changes |= {name: IMAGE_TOKEN for name in ("image_token_id", "image_token_index") if name in names}
    return changes | ({"vocab_size": VOCABULARY + 16} if "vocab_size" in names else {})


def _parameters(config: Any) -> set[str]:
    return set() if config is None or isinstance(config, dict) else set(inspect.signature(type(config)).parameters)
