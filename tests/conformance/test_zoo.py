"""The zoo is fit to be a reference: all types have a configuration with all their kinds of layers, a seeded few are run.

`python -m tests.conformance.zoo --check` runs all of them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from . import multimodal, zoo, zoo_settings
from .zoo_check import check, distance, forward

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "block_types")
SAMPLE = random.Random(0).sample([*zoo.model_types(), *zoo.VARIANTS], 16)


def kinds_of_layers(config: PreTrainedConfig) -> set[tuple[str, str]]:
    return {(name, kind) for name in KINDS for kind in getattr(config, name, None) or ()}


def test_all_types_have_a_tiny_configuration_with_every_kind_of_layer_of_the_default() -> None:
    for name in [*zoo.model_types(), *zoo.VARIANTS]:
        if name in zoo_settings.CANNOT_BUILD:
            continue
        _, config = zoo.configuration(name)
        tiny, default = config.get_text_config(decoder=True), type(config)().get_text_config(decoder=True)
        assert kinds_of_layers(default) <= kinds_of_layers(tiny), name
        assert tiny.vocab_size <= 260, name
        assert getattr(tiny, "hidden_size", 64) <= 64, name


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_the_sample_gives_finite_logits_that_depend_on_early_tokens(name: str) -> None:
    report = check(name)
    assert not report.failed, report


def test_a_model_is_the_same_for_the_same_seed_and_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, again, other = (zoo.build("mixtral", seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_model_generates_as_many_tokens_as_it_is_asked_for() -> None:
    model = zoo.build("qwen4_exp_text@per_layer_embedding")  # its configuration must have the id of an end
    assert model.generation_config.eos_token_id is None
    assert model.generation_config.pad_token_id == 0
    ids = torch.randint(1, zoo.vocabulary(model), (2, 5))
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7).shape == (2, 12)


def test_variants_are_of_known_types_and_differ_from_them() -> None:
    assert {name.split("@")[0] for name in zoo.VARIANTS} <= set(zoo.model_types())
    _, plain = zoo.configuration("mixtral")
    _, sliding = zoo.configuration("mixtral@sliding")
    assert plain.sliding_window is None
    assert sliding.sliding_window == zoo_settings.WINDOW
    assert zoo.build("mistral@eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["bert@token_types", "hrm_text@token_types"])
def test_token_types_change_what_a_model_says(name: str) -> None:
    model, ids = zoo.build(name), torch.randint(1, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    assert zoo.extra_inputs("llama", ids) == {}
    with torch.no_grad():
        assert distance(forward(model, ids, **zoo.extra_inputs(name, ids)), forward(model, ids)) > 0.01


def test_what_has_no_tiny_model_says_why_and_an_unknown_name_is_an_error() -> None:
    assert len(zoo_settings.CANNOT_BUILD) <= 4
    for name in zoo_settings.CANNOT_BUILD:
        with pytest.raises(zoo.CannotBuildError, match=name):
            zoo.build(name)
    for name in ("no_such_type", "llama@no_such_variant"):
        with pytest.raises(KeyError):
            zoo.build(name)


def test_the_check_finds_a_model_that_forgets_its_early_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo_settings.SETTINGS, "mistral", {"sliding_window": 4})
    report = check("mistral")
    assert report.failed
    assert "hardly depend" in report.text


def test_the_check_finds_a_model_whose_attention_looks_ahead() -> None:
    assert check("bert").distance > 0.01
    assert check("bert@decoder").distance < 1e-5


@pytest.mark.parametrize("name", multimodal.IMAGE_TEXT)
def test_an_image_text_model_depends_on_its_image_and_takes_text_alone(name: str) -> None:
    model = multimodal.build_image_text(name)
    text, image = multimodal.example_inputs(name)
    other = multimodal.example_inputs(name, 1)[1]
    content = next(key for key in ("pixel_values", "input_features") if key in image)
    with torch.no_grad():
        alone, seen, unlike = (model(**inputs).logits for inputs in (text, image, image | {content: other[content]}))
    assert torch.isfinite(alone).all()
    assert torch.isfinite(seen).all()
    assert distance(unlike[:, -1], seen[:, -1]) > 1e-2
