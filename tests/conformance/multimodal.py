"""Inputs of 40 text tokens, and with an image or a sound, for some of the image zoo's types and for two that it has
not.

Text ids are below `VOCABULARY`, placeholders are not, so that no text holds one by chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import image_zoo, zoo
from .image_zoo import IMAGE_TOKEN as IMAGE_TOKEN
from .zoo_settings import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMAGE = 32  # pixels of a side
_FRAMES, _MEL_BINS = 64, 8  # of what stands in for an image where a model hears


class _Own(NamedTuple):
    """A class of models that has no `get_image_features`: its configuration's changes, and the placeholders of what
    fills them.
    """

    name: str
    changes: dict[str, Any]
    num_placeholders: int


_OWN = {
    "qwen2_audio": _Own(
        "Qwen2Audio",
        {
            "text_config": {"vocab_size": VOCABULARY + 8},
            "audio_config": {"num_mel_bins": _MEL_BINS, "max_source_positions": _FRAMES // 2},
            "audio_token_index": IMAGE_TOKEN,
        },
        _FRAMES // 4,
    ),
    "mllama": _Own(
        "Mllama",
        {
            "vision_config": {
                "image_size": _IMAGE,
                "patch_size": 8,
                "num_global_layers": 1,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 192,
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            "image_token_index": IMAGE_TOKEN,  # the embedding has 8 rows more than the vocabulary
        },
        1,
    ),
}


def build_image_text(name: str, seed: int = 0) -> PreTrainedModel:
    """A new tiny image-text model, as `zoo.build` makes them; its gates are open, so that images matter.

    Raises:
        KeyError: unknown name.
    """
    if name not in _OWN:
        return image_zoo.build(name, seed)
    import transformers

    own = _OWN[name]
    config = zoo.tiny_configuration(getattr(transformers, f"{own.name}Config"), own.changes)
    model = zoo.instantiate(getattr(transformers, f"{own.name}ForConditionalGeneration"), config, seed)
    for parameter_name, parameter in model.named_parameters():
        if parameter.numel() == 1 and parameter_name.endswith("gate"):
            torch.nn.init.constant_(parameter, 1.0)
    return model


def text_inputs(name: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """What `generate` takes for one row of text: ids, mask, and the token types that this model's processor adds."""
    if name not in _OWN:
        return image_zoo.prompt(image_zoo.tiny(name)[1], [tokens])
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image_inputs(name: str, before: list[int], after: list[int], image_seed: int = 0) -> dict[str, torch.Tensor]:
    """What `generate` takes for one row of text with an image in it, whose pixels depend on `image_seed` alone."""
    if name not in _OWN:
        return image_zoo.prompt(image_zoo.tiny(name)[1], [before, image_seed, after])
    inputs = text_inputs(name, before + [IMAGE_TOKEN] * _OWN[name].num_placeholders + after)
    return inputs | _content(name, inputs["input_ids"].shape[1], len(before), image_seed)


def example_inputs(name: str, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs of 40 text tokens, and of 24 text tokens, an image and 12 more."""
    tokens = torch.randint(1, VOCABULARY, (76,), generator=torch.Generator().manual_seed(seed)).tolist()
    return text_inputs(name, tokens[:40]), image_inputs(name, tokens[40:64], tokens[64:], seed)


def _content(name: str, columns: int, start: int, seed: int) -> dict[str, torch.Tensor]:
    """What fills the placeholders of a row of `columns` tokens, from column `start` on."""
    if name == "qwen2_audio":  # [sounds, bins, frames]
        frames = torch.randn(1, _MEL_BINS, _FRAMES, generator=torch.Generator().manual_seed(seed))
        return {"input_features": frames, "feature_attention_mask": torch.ones(1, _FRAMES, dtype=torch.long)}
    image = torch.randn(1, 3, _IMAGE, _IMAGE, generator=torch.Generator().manual_seed(seed))
    # Tiles: [rows, images, tiles, channels, height, width]; tokens from the image's placeholder on attend to it.
    tiles = torch.cat([image, torch.zeros_like(image)])[None, None]
    attended = torch.zeros(1, columns, 1, 2, dtype=torch.long)
    attended[:, start:, :, 0] = 1
    return {
        "pixel_values": tiles,
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]]),
        "cross_attention_mask": attended,
    }
