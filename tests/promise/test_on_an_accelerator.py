"""On an accelerator of this machine every scene gives what `DynamicCache` gives there: `pytest -m accelerator`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..scenes import play
from ..tiny_models import build
from . import test_generate_equivalence, test_ways_to_generate

SCENES = (*test_generate_equivalence.SCENES, *test_ways_to_generate.SCENES)


@pytest.mark.accelerator
@pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="this machine has no accelerator; see tests/accelerator"
)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_is_the_same_on_an_accelerator(scene: Any) -> None:
    play(scene, build("llama").to(torch.accelerator.current_accelerator()))
