"""What the modules of models with states say about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_paged_cache.model.state_traits import EVERY_PAD, StateTraits, read_state_traits

from ..conformance import zoo
from .test_support import FROM_5_23

pytestmark = FROM_5_23


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("qwen3_next", 64), ("qwen3_5_text", 64), ("kimi_linear", 64), ("olmo_hybrid", 64), ("bamba", 1), ("lfm2", 1)],
)
def test_chunks_are_those_of_kernels_that_solve_for_a_whole_one(name: str, chunk: int) -> None:
    assert traits(zoo.build(name)).chunk == chunk


def test_a_limit_of_time_steps_is_seen_where_there_is_one() -> None:
    assert traits(zoo.build("nemotron_h")).clamps_one_token
    assert traits(zoo.build("zamba2")).clamps_one_token
    assert not traits(zoo.build("bamba")).clamps_one_token


def traits(model: nn.Module) -> StateTraits:
    return read_state_traits(model.modules())


def built(name: str, **settings: Any) -> nn.Module:
    model_class, config = zoo.configuration(name)
    for setting, value in settings.items():
        setattr(config, setting, value)
    return zoo.instantiate(model_class, config, 0)


@pytest.mark.parametrize(
    ("name", "setting", "shown"),
    [
        ("lfm2", "conv_bias", 2),
        ("bamba", "mamba_proj_bias", 3),
        ("nemotron_h", "use_bias", 3),
        ("mamba2", "use_bias", 3),
        ("zaya", "attention_bias", 2),
    ],
)
def test_padding_shows_as_far_as_a_convolution_looks_back_behind_a_bias(name: str, setting: str, shown: int) -> None:
    assert traits(built(name, **{setting: False})).num_pads_that_show == 0
    assert traits(built(name, **{setting: True})).num_pads_that_show == shown


def test_a_bias_of_the_convolution_alone_shows_no_padding() -> None:
    assert traits(built("bamba", mamba_conv_bias=True)).num_pads_that_show == 0


def test_a_model_without_states_has_no_traits(tiny_llama: Any) -> None:
    assert traits(tiny_llama) == StateTraits()


def test_the_padding_of_a_root_ends_where_it_no_longer_shows() -> None:
    assert [StateTraits(num_pads_that_show=3).root_padding(pad) for pad in (0, 1, 3, 11)] == [0, 1, 3, 3]
    assert StateTraits(num_pads_that_show=EVERY_PAD).root_padding(1000) == 1000
    assert StateTraits().root_padding(5) == 0


def test_reading_runs_nothing() -> None:
    model = zoo.build("qwen3_next")
    with torch.device("meta"):
        assert traits(model.to("meta")).chunk == 64
