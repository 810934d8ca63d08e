"""Questions about an image of 1,024 tokens, in SmolVLM's shape with random weights: from an empty cache, and an image
that nobody knows.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Timing
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, OURS, Line
from .registry import Lines, Repeat, scene
from .ways import (
    Measured,
    Way,
    from_scratch,
    measure_rounds,
    on_ours,
    run_round,
    share_not_computed,
    timed_call,
    turned,
)
from .workbench import NEW_TOKENS, QUESTION_TOKENS, Bench

_VOCABULARY = 4096  # and the placeholder after it
_TEXT_TOKENS = 8  # before the image
_NUM_QUESTIONS = 20
_PICTURE, _SMALL_PICTURE = 512, 64  # pixels of a crop's side, which is 64 tokens and 16


@scene("Images", minutes=3.5)
def images(bench: Bench, repeat: Repeat) -> Lines:
    """20 questions about one image of 1,024 tokens, whose tower runs once; and a new image each time: 8 new tokens, and
    bytes.
    """
    is_quick = not bench.warmups
    model = _model(bench.model.device, bench.model.dtype, is_quick=is_quick)
    asking = Bench(model, bench.sizes, has_bars=bench.has_bars, is_quick=is_quick)
    num_crops = 2 if is_quick else bench.sizes.shared // 64
    cache = PagedPrefixCache(model)
    seeds = iter(range(1000))

    def unknown() -> dict[str, Way]:
        ids, given = _prompt(asking, num_crops, next(seeds)), {"new_tokens": NEW_TOKENS}
        ids["input_ids"][:, :_TEXT_TOKENS] = asking.tokens(1, _TEXT_TOKENS).clamp(max=_VOCABULARY - 1)
        return {
            BASELINE: from_scratch(asking, ids["input_ids"], **given, pixel_values=ids["pixel_values"]),
            OURS: on_ours(asking, cache, ids["input_ids"], **given, pixel_values=ids["pixel_values"]),
        }

    measured = measure_rounds(asking, unknown, rounds=repeat(9), warmups=min(1, asking.warmups), baseline_warms_up=True)
    yield "images / nohit", measured.line("an image that nobody knows, 8 new tokens", at_least=bench.bar(0.98))

    cache, measured = PagedPrefixCache(model), Measured()
    image = _prompt(asking, num_crops, next(seeds))["pixel_values"]
    for number in range(_NUM_QUESTIONS if not is_quick else 3):
        ids = _prompt(asking, num_crops, None)["input_ids"]
        ways = {
            BASELINE: from_scratch(asking, ids, pixel_values=image),
            OURS: on_ours(asking, cache, ids, pixel_values=image),
        }
        order = turned(list(ways), number)
        measured.rounds.append(run_round(asking, ways, order, measured, lambda way: timed_call(asking, way))[0])
    totals = {name: sum(measured.seconds(name)) for name in (BASELINE, OURS)}
    ratio = totals[BASELINE] / totals[OURS]
    yield (
        "images",
        Line(
            what=f"{len(measured.rounds)} questions about one image",
            value=ratio,
            kind="ratio",
            spread=Timing.of([ratio]),
            ways={name: Timing.of([seconds]) for name, seconds in totals.items()},
            hit_rate=share_not_computed(cache.stats()),
            kv_bytes=measured.kv_bytes,
            at_least=bench.bar(8.0),
            details={"a_question": measured.timings()},
        ),
    )


def _model(device: torch.device, dtype: torch.dtype, *, is_quick: bool) -> Any:
    text = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 9}
    vision = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}
    picture, patch = _PICTURE, 16
    if is_quick:
        text = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        vision = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3}
        picture, patch = _SMALL_PICTURE, 4
    config = SmolVLMConfig(
        vision_config={**vision, "image_size": picture, "patch_size": patch},
        text_config={
            **{"model_type": "llama", **text, "num_key_value_heads": 3, "initializer_range": 0.1},
            **{"vocab_size": _VOCABULARY + 1, "bos_token_id": None, "eos_token_id": None},
        },
        image_token_id=_VOCABULARY,
        scale_factor=4,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmolVLMForConditionalGeneration(config).eval().to(device, dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _prompt(bench: Bench, num_crops: int, seed: int | None) -> dict[str, torch.Tensor]:
    """Some tokens of text, an image in so many crops, and a new question; its pixels where a seed is given."""
    config = bench.model.config
    side = config.vision_config.image_size
    num_tokens = num_crops * (side // config.vision_config.patch_size // config.scale_factor) ** 2
    placeholders = torch.full((1, num_tokens), _VOCABULARY, device=bench.model.device)
    text, question = bench.text(_TEXT_TOKENS), bench.tokens(1, QUESTION_TOKENS)
    given = {"input_ids": torch.cat((text, placeholders, question.clamp(max=_VOCABULARY - 1)), dim=1)}
    if seed is not None:
        drawn = torch.randn(1, num_crops, 3, side, side, generator=torch.Generator().manual_seed(seed))
        given["pixel_values"] = drawn.to(bench.model.device, bench.model.dtype)
    return given
