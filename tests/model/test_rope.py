"""What is read of rotary frequencies that depend on length, and that the model keeps its own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hf_paged_cache.model.rope import RopeRegime

from ..promise.test_conditions_of_reuse import ROPES
from ..tiny_models import build


def rotary(kind: str) -> Any:
    """longrope's update writes into its buffer, dynamic's puts another one in its place."""
    longest = 64 if kind == "dynamic" else 256
    return build("llama", rope_parameters=ROPES[kind], max_position_embeddings=longest).model.rotary_emb


def state(module: nn.Module) -> tuple[dict[str, Any], dict[str, list[float]]]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    return plain, {name: buffer.tolist() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_look_ahead_leaves_the_model_as_it_was_and_says_what_it_will_use(kind: str) -> None:
    module = rotary(kind)
    regime = RopeRegime([module])
    assert regime.depends_on_length
    short = regime.at(10)
    before = state(module)
    long = regime.peek(150)
    assert state(module) == before
    assert long != short
    assert regime.at(150) == long
    assert state(module) != before


def test_their_scale_is_read_with_them() -> None:
    module = rotary("longrope")
    regime = RopeRegime([module])
    before = regime.at(10)
    module.attention_scaling *= 1.5
    assert regime.at(10) != before


def test_frequencies_that_do_not_depend_on_length_are_static() -> None:
    regime = RopeRegime([build("llama").model.rotary_emb])
    assert not regime.depends_on_length
    assert regime.at(10) == b""
    used, original = regime.static()
    assert used.dim() == 1
    assert len(used) >= 4
    assert used.equal(original)
    assert regime.scales() == b"[1.0, None]"
