"""What a model's code reads of output flags, and what a trial of them sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_paged_cache.model.output_flags import OUTPUT_FLAGS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_paged_cache.model.conditioning import Conditioning

from ..conformance import zoo
from ..reference import Forwards
from ..tiny_models import build
from .test_support import FROM_5_23

NUM_FORWARDS = 2 * (2 + 3 + 3)


def read(model: Any) -> Conditioning:
    conditioning = Conditioning(model)
    conditioning.digest()
    return conditioning


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
def test_a_model_whose_code_reads_no_flag_is_not_tried(name: str) -> None:
    model = build(name)
    with Forwards(model) as shapes:
        assert not any(map(read(model).changes_with, OUTPUT_FLAGS))
    assert shapes == []


@pytest.mark.parametrize(
    ("name", "flag", "changes"),
    [
        ("falcon", "output_attentions", True),
        ("falcon", "output_hidden_states", False),
        ("bloom", "output_attentions", False),
        pytest.param("gemma4_text", "output_hidden_states", False, marks=FROM_5_23),
        ("mixtral", "output_router_logits", False),  # after a cache and with a mask, its loss is an error
        pytest.param("minimax", "output_router_logits", False, marks=FROM_5_23),
        ("mamba2", "output_hidden_states", False),
    ],
)
def test_one_whose_code_reads_a_flag_is_tried_once(name: str, flag: str, changes: bool) -> None:
    model = zoo.build(name)
    conditioning = read(model)
    with Forwards(model) as shapes:
        assert conditioning.changes_with(flag) == changes
        assert 0 < len(shapes) <= NUM_FORWARDS
        shapes.clear()
        assert conditioning.changes_with(flag) == changes
        model.load_state_dict(zoo.build(name, seed=1).state_dict())
        conditioning.digest()
        assert conditioning.changes_with(flag) == changes
    assert shapes == []


def test_it_is_tried_anew_under_other_settings_and_with_other_modules() -> None:
    model = zoo.build("falcon")
    conditioning = read(model)
    assert conditioning.changes_with("output_attentions")
    model.config._attn_implementation = "eager"
    conditioning.digest()
    with Forwards(model) as shapes:
        assert not conditioning.changes_with("output_attentions")
        assert len(shapes) == NUM_FORWARDS
        shapes.clear()
        model.transformer.h[0].mlp.act = torch.nn.Tanh()
        conditioning.digest()
        assert not conditioning.changes_with("output_attentions")
        assert len(shapes) == NUM_FORWARDS


class Steered(LlamaAttention):
    """Other keys and values after it, with a flag that no argument of it is named after."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output * (2 if any(kwargs.get(name) for name in ("output_attentions",)) else 1), weights


class Refusing(LlamaAttention):
    """Fails with a flag."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_attentions"):
            raise NotImplementedError
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [Steered, Refusing])
def test_code_of_one_s_own_is_read_and_what_cannot_be_told_counts_as_a_change(kind: type) -> None:
    model = build("llama")
    model.model.layers[0].self_attn.__class__ = kind
    conditioning = read(model)
    assert [flag for flag in OUTPUT_FLAGS if conditioning.changes_with(flag)] == ["output_attentions"]


def test_an_attention_function_of_one_s_own_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def steered(*args: Any, **kwargs: Any) -> Any:
        output, weights = theirs(*args, **kwargs)
        return output * (2 if kwargs.get("output_hidden_states") else 1), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "steered", steered)
    model = build("llama")
    model.config._attn_implementation = "steered"
    conditioning = read(model)
    assert [flag for flag in OUTPUT_FLAGS if conditioning.changes_with(flag)] == ["output_hidden_states"]


def test_where_frequencies_depend_on_length_nothing_is_tried_and_what_is_read_counts_as_a_change() -> None:
    model = zoo.build("phimoe@longrope")
    conditioning = read(model)
    with Forwards(model) as shapes:
        assert [flag for flag in OUTPUT_FLAGS if conditioning.changes_with(flag)] == ["output_router_logits"]
    assert shapes == []


def test_no_memory_for_the_trial_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("bloom")
    conditioning = read(model)

    def run_out(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(model.transformer.h[0]), "forward", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            conditioning.changes_with("output_attentions")
    assert not conditioning.changes_with("output_attentions")


# A config that asks


def test_a_config_is_asked_with_the_text_config_inside_it() -> None:
    model = zoo.build("gemma3")
    conditioning = Conditioning(model)
    conditioning.digest()
    assert conditioning.outputs == []
    model.config.get_text_config(decoder=True).output_hidden_states = True
    conditioning.digest()
    assert conditioning.outputs == ["output_hidden_states"]


def test_what_a_config_asks_for_is_a_condition_where_code_reads_it_and_an_obstacle_where_it_changes_keys() -> None:
    model = zoo.build("falcon")
    conditioning = read(model)
    before = conditioning.digest()
    assert conditioning.bypass() is None
    model.config._output_attentions = True  # the config itself allows it before sdpa is chosen
    assert conditioning.digest() != before
    assert (
        conditioning.bypass() == "keys and values of this model depend on output_attentions, which its config asks for"
    )
    model.config._output_attentions = False
    assert conditioning.digest() == before
    assert conditioning.bypass() is None
