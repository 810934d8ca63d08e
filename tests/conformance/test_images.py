"""Image-text models: text hits through what their processors pass; images are reused by content, or not at all."""

import warnings
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache, UnsupportedModelError

from ..reference import BEFORE_5_23, FROM_5_23, assert_near, assert_same, is_same, run, zero_blocks
from .image_zoo import example_inputs, prompt, tiny
from .images import SCENES, examine

PREFIX_LM = "paligemma"  # a prompt's tokens attend to each other in both directions
WITH_STATE = "qwen3_5"  # resumes at multiples of 64 tokens alone
WHOLE = ("qwen2_audio", "mllama")  # sounds, and an image that a cross attention reads


def num_cached_blocks(held: PagedPrefixCache) -> int:
    """Blocks that could be found, once no row holds any."""
    held.reset()
    return held.stats().num_cached_blocks


def test_a_model_whose_prompts_attend_in_both_directions_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="depend on more than the tokens before them"):
        PagedPrefixCache(tiny(PREFIX_LM)[0])


@pytest.mark.parametrize("name", [*WHOLE, WITH_STATE, "gemma4", "smolvlm"])
def test_text_alone_gives_what_it_gives_with_dynamic_cache(name: str) -> None:
    model, (text, _) = tiny(name)[0], example_inputs(name)
    reference, held = run(model, **text), PagedPrefixCache(model, block_size=8)
    assert_same(reference, run(model, held, **text))
    assert_same(reference, run(model, held, **text))
    if name != WITH_STATE:
        assert held.last_call.reused_tokens == 39
        zero_blocks(held)
        assert not is_same(reference, run(model, held, **text))


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        *((name, 8) for name in ("llava", "qwen2_vl", "qwen3_vl", "gemma3", "idefics3", "llava_next", "lfm2_vl")),
        ("llava", 4),
        ("gemma3", 16),
    ],
)
def test_images_are_reused_in_every_scene(name: str, block_size: int) -> None:
    """The other types: `python -m tests.conformance.images`."""
    seen = examine(name, block_size)
    if BEFORE_5_23:  # which takes features of no image in place of the image
        assert seen.outcome == "computed whole", seen.why
        return
    assert seen.outcome == "identical", seen.why
    if name != "lfm2_vl":  # carries a state, which is kept at the ends of blocks alone
        assert seen.scenes == SCENES[1:]


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_understood_leaves_nothing_to_be_found(name: str) -> None:
    model, layout = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    text, image = example_inputs(name)
    before, after = image["input_ids"][0, :24].tolist(), image["input_ids"][0, -12:].tolist()
    run(model, held, **{key: value[:, :24] for key, value in text.items()} | {"input_ids": image["input_ids"][:, :24]})
    known = num_cached_blocks(held)
    outputs: list[Any] = []
    for seed in (0, 1, 0):
        inputs = prompt(layout, [before, seed, after])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where cross attention is given the image, the call runs without the cache
            outputs.append(run(model, held, **inputs))
        assert_same(run(model, **inputs), outputs[-1])
        assert held.last_call.reused_tokens == 0
        assert num_cached_blocks(held) == known
    assert not is_same(outputs[0], outputs[1]), "the model does not look at the image"


@FROM_5_23
def test_a_model_that_weighs_index_keys_by_all_positions_runs_images_whole() -> None:
    model, (_, image) = tiny("qwen4_exp")[0], example_inputs("qwen4_exp")
    held = PagedPrefixCache(model, block_size=8)
    for _ in range(2):
        assert_same(run(model, **image), run(model, held, **image))
    assert held.last_call.reused_tokens == 0
    assert "by the positions of all columns" in held.last_call.rows[0].stopped


def test_positions_that_a_model_remembers_from_an_image_are_not_used_for_the_next_prompt() -> None:
    """Without `position_ids`, its plain forward counts on from the last call's image once the cache has columns."""
    model, (text, image) = tiny("qwen2_vl")[0], example_inputs("qwen2_vl")
    ids = text["input_ids"]
    with torch.no_grad():
        reference = model(input_ids=ids).logits[:, -1:]
        held = PagedPrefixCache(model, block_size=8)
        model(input_ids=ids, past_key_values=held, logits_to_keep=1)
        held.reset()
        model(**image)
        logits = model(input_ids=ids, past_key_values=held, logits_to_keep=1).logits
    assert_near(logits, reference)
    assert held.last_call.rows[0].stopped.startswith("without position_ids it is not known")
