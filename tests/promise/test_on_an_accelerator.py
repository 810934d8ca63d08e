"""On an accelerator of this machine every scene gives what `DynamicCache` gives there: `pytest -m accelerator`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache.attention import backends

from ..scenes import play
from ..tiny_models import build
from . import test_generate_equivalence, test_ways_to_generate

SCENES = (*test_generate_equivalence.SCENES, *test_ways_to_generate.SCENES)

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="this machine has no accelerator"),
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_is_the_same_on_an_accelerator(scene: Any) -> None:
    play(scene, build("llama").to(torch.accelerator.current_accelerator()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 128, 288])
def test_a_part_is_attended_to_as_by_operators_in_fp32(head_dim: int, dtype: torch.dtype) -> None:
    """What the device computes parts with, for one token and several, with and without a mask, at any number of columns."""
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for rows, heads, groups, length, columns in (
        (1, 2, 1, 24, 33),
        (8, 2, 3, 1, 17),
        (3, 1, 4, 5, 160),
        (2, 2, 2, 1, 1),
    ):
        query = torch.randn(rows, heads * groups, length, head_dim, device=device)
        key, value = torch.randn(2, rows, heads, 2 * columns, head_dim, device=device)[:, :, :, :columns]
        hidden = torch.rand(rows, 1, length, columns, device=device) < 0.3
        hidden[..., 0] = False
        for mask in (None, torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)):
            part = backends.Part(key.to(dtype), value.to(dtype), None if mask is None else mask.to(dtype))
            for scale in (None, 0.3):
                out, lse = backends.attend(query.to(dtype), part, scale)
                scores = query.to(dtype).float().unflatten(1, (heads, groups)) @ part.key.float()[:, :, None].mT
                scores = scores * (head_dim**-0.5 if scale is None else scale)
                scores = scores if mask is None else scores + mask[:, :, None]
                wanted = (scores.softmax(-1) @ part.value.float()[:, :, None]).flatten(1, 2)
                wanted_lse = scores.logsumexp(-1).flatten(1, 2)
                assert (out.dtype, lse.dtype) == (dtype, torch.float32)
                torch.testing.assert_close(out.float(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
                torch.testing.assert_close(lse, wanted_lse, rtol=tolerance, atol=tolerance)
