"""The zoo is fit to be a reference: all types have a tiny configuration with all their kinds of layers.

That early tokens matter to what a model says, each type shows in the scenes: zeros in place of what it reuses must be
seen.
"""

import pytest
import torch
from transformers import PreTrainedConfig

from . import zoo, zoo_settings

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "block_types")


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


def test_a_model_is_the_same_for_the_same_seed_and_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, again, other = (zoo.build("mixtral", seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_what_has_no_tiny_model_says_why_and_an_unknown_name_is_an_error() -> None:
    assert len(zoo_settings.CANNOT_BUILD) <= 4
    for name in zoo_settings.CANNOT_BUILD:
        with pytest.raises(zoo.CannotBuildError, match=name):
            zoo.build(name)
    for name in ("no_such_type", "llama@no_such_variant"):
        with pytest.raises(KeyError):
            zoo.build(name)
