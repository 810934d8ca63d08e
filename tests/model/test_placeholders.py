"""Which ids of a model stand for something else than text: found in its config and the arguments of its forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.model.placeholders import Placeholders

from ..conformance.multimodal import IMAGE_TOKEN, build_image_text
from ..tiny_models import build

IMAGE, VIDEO, AUDIO = 90, 91, 92


def model_of(*arguments: str, nested: bool = False, **tokens: int | None) -> Any:
    """What is read of a model: its config, and the names of its forward's arguments."""
    config = PreTrainedConfig()
    part = PreTrainedConfig() if nested else config
    for name, token in tokens.items():
        setattr(part, name, token)
    if nested:
        config.vision_config = part
    names: dict[str, Any] = {}
    exec(f"def forward(self, input_ids, {', '.join(arguments)}): ...", names)
    return SimpleNamespace(config=config, forward=names["forward"].__get__(config))


SEES_AND_HEARS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "input_features", "input_features_mask")
ALL = model_of(*SEES_AND_HEARS, image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO)


def ids(*rows: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor(rows)}


def test_a_model_of_text_has_none_whatever_its_config_names() -> None:
    assert not Placeholders(build("llama"))
    model = model_of("attention_mask", image_token_id=IMAGE)
    assert not Placeholders(model)
    assert Placeholders(model).unfilled(ids([1, IMAGE])) is None


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["image_token_id", "image_token_index"])
def test_they_are_found_under_either_name_and_in_configs_inside(name: str, nested: bool) -> None:
    found = Placeholders(model_of("pixel_values", nested=nested, **{name: IMAGE}))
    assert found.kinds == {IMAGE: {"image"}}


@pytest.mark.parametrize("token", [None, -1])
def test_a_placeholder_that_is_not_set_is_none(token: int | None) -> None:
    assert not Placeholders(model_of("pixel_values", image_token_id=token))


def test_the_tokens_round_an_image_are_text() -> None:
    names = {"boi_token_id": 3, "vision_start_token_id": 4, "num_image_tokens": 5, "image_token_id": IMAGE}
    assert Placeholders(model_of("pixel_values", **names)).kinds.keys() == {IMAGE}


@pytest.mark.parametrize("name", ["llava", "gemma3", "gemma4", "qwen2_vl", "qwen3_5", "cohere_compass", "qwen2_audio"])
def test_models_of_transformers_name_theirs(name: str) -> None:
    assert IMAGE_TOKEN in Placeholders(build_image_text(name)).kinds


def test_one_id_may_stand_for_two_things() -> None:
    class Config(PreTrainedConfig):
        attribute_map: ClassVar = {"image_token_id": "image_patch_id", "video_token_id": "image_patch_id"}

    model = model_of("pixel_values", "pixel_values_videos")
    model.config = Config(image_patch_id=IMAGE)
    found = Placeholders(model)
    assert found.kinds == {IMAGE: {"image", "video"}}
    for name in ("pixel_values", "pixel_values_videos"):
        assert found.unfilled({**ids([IMAGE]), name: torch.ones(1)}) is None
    assert "an image or a video" in found.unfilled(ids([IMAGE])).what  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rows", "passed", "is_filled"),
    [
        ([[1, 2]], (), True),
        ([[1, IMAGE]], (), False),
        ([[1, IMAGE]], ("pixel_values",), True),
        ([[1, IMAGE]], ("image_grid_thw", "input_features_mask"), False),  # these say how it lies
        ([[1, IMAGE]], ("mm_encoder_outputs",), True),
        ([[1, IMAGE]], ("inputs_embeds",), True),
        ([[1, IMAGE, AUDIO]], ("pixel_values",), False),
        ([[1, IMAGE, AUDIO]], ("pixel_values", "input_features"), True),
        ([[1, IMAGE, VIDEO]], ("pixel_values_videos",), False),
        ([[1, IMAGE]], ("pixel_values_videos",), True),  # frames that stand at an image's placeholders
    ],
)
def test_content_fills_its_own_placeholders_or_others_where_there_are_none(
    rows: list[list[int]], passed: tuple[str, ...], is_filled: bool
) -> None:
    arguments = ids(*rows) | dict.fromkeys(passed, torch.ones(1)) | {"pixel_mask": None, "use_cache": True}
    assert (Placeholders(ALL).unfilled(arguments) is None) == is_filled


def test_what_is_not_filled_is_told_with_its_row_and_position() -> None:
    found = Placeholders(ALL).unfilled(ids([1, 2, 3, 4], [5, AUDIO, AUDIO, 6]), before=10)
    assert found is not None
    assert found.what == (
        "token 92 at position 11 of row 1 is the placeholder of a sound, and nothing was passed that fills it"
    )
    assert found.fillers == "input_features"
    assert (found.ends, [*map(list, found.tokens)]) == ([0, 3], [[1, 2, 3, 4], [5, AUDIO, AUDIO, 6]])


def test_where_all_can_be_filled_ids_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("a wait for the device"))
    content = dict.fromkeys(("pixel_values", "pixel_values_videos", "input_features"), torch.ones(1))
    assert Placeholders(ALL).unfilled(ids([IMAGE]) | content) is None
    assert Placeholders(build("llama")).unfilled(ids([IMAGE])) is None


def test_text_with_a_placeholder_is_refused_where_nothing_can_be_passed() -> None:
    found = Placeholders(ALL)
    found.require_text("the prefix", [1, 2, 3])
    with pytest.raises(CacheArgumentError, match="the prefix has token 91 at position 1, the placeholder of a video"):
        found.require_text("the prefix", [1, VIDEO])


def test_a_decoder_whose_composite_config_names_images_takes_none() -> None:
    config = transformers.LlavaConfig()
    model = model_of("attention_mask")
    model.config = config
    assert not Placeholders(model)
