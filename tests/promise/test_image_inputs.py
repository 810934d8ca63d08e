"""Prompts with images: named by what is passed, run once, and right in every way of calling."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, UnsupportedModelError

from ..conformance.image_zoo import prompt, tiny, tokens
from ..conformance.images import Towers
from ..reference import BEFORE_5_23, FROM_5_23, Forced, assert_near, assert_same, is_same, run, zero_blocks

TEXT, FIRST, SECOND, THIRD = (tokens(seed, 27) for seed in (1, 2, 3, 4))
START = len(TEXT)  # of the image in most prompts
KINDS = ("qwen2_vl", "idefics3")  # a grid and positions of three numbers; images nested in rows


def ask(name: str, *rows: Any) -> dict[str, Tensor]:
    return prompt(tiny(name)[1], *rows)


def begin(name: str, *rows: Any) -> tuple[Any, PagedPrefixCache, dict[str, Tensor]]:
    """A model, an empty cache, and a prompt."""
    model, _ = tiny(name)
    return model, PagedPrefixCache(model, block_size=8), ask(name, *rows)


def reused(held: PagedPrefixCache) -> int:
    return held.last_call.reused_tokens


def assert_reused(held: PagedPrefixCache, more_than: int) -> None:
    """Transformers 5.17 takes features of no image in place of the image, so a prompt with one is computed whole."""
    assert reused(held) == 0 if BEFORE_5_23 else reused(held) > more_than


@pytest.mark.parametrize("name", KINDS)
def test_images_that_differ_in_one_value_of_one_pixel_share_nothing(name: str) -> None:
    model, held, given = begin(name, [TEXT, 1, FIRST])
    run(model, held, **given)
    other = {**given, "pixel_values": given["pixel_values"].clone()}
    other["pixel_values"].view(-1)[-1] += 1e-3
    assert_same(run(model, **other), run(model, held, **other))
    assert reused(held) <= START


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 4, 16]])}),
        ("video_llama_3", {"image_grid_thw": torch.tensor([[1, 4, 16]])}),  # its positions say nothing of the grid
    ],
)
def test_the_same_pixels_under_another_grid_are_another_image(name: str, other: dict[str, Tensor]) -> None:
    model, held, given = begin(name, [TEXT, 1, FIRST])
    changed = {**given, **other}
    outputs = [run(model, held, **each) for each in (given, changed)]
    assert not is_same(*outputs), "the grid does not matter"
    assert_same(run(model, **changed), outputs[1])
    assert reused(held) <= START


def test_the_same_image_at_other_positions_is_another_one() -> None:
    model, held, given = begin("qwen2_vl", [TEXT, 1, FIRST])
    positions, _ = model.model.get_rope_index(
        given["input_ids"], mm_token_type_ids=given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
    )
    moved = positions.clone()
    moved[2, :, START : START + 16] += 9
    found = []
    for each in (positions, moved):
        with torch.no_grad():
            wanted = model(**given, position_ids=each, use_cache=False).logits[:, -1:]
            held.reset()
            logits = model(**given, position_ids=each, past_key_values=held, logits_to_keep=1).logits
        assert_near(logits, wanted)
        found.append(wanted)
    assert not torch.allclose(*found, rtol=0, atol=1e-3 * float(found[0].abs().max())), "positions do not matter"
    assert reused(held) <= START


def test_types_beside_an_image_are_said_and_nothing_is_reused() -> None:
    model, held, given = begin("gemma3", [TEXT, 1, FIRST])
    types = given["token_type_ids"].clone()
    types[0, 3:9] = 1  # these see each other, too
    for each in (given, {**given, "token_type_ids": types}):
        assert_same(run(model, **each), run(model, held, **each))
        held.reset()
    assert not reused(held)
    assert held.last_call.rows[0].stopped == "the argument token_type_ids may condition keys and values"


def test_what_the_model_remembers_of_positions_is_as_after_a_whole_prompt() -> None:
    model, _ = tiny("qwen2_vl")
    held = PagedPrefixCache(model, block_size=8)
    given, text = ask("qwen2_vl", [TEXT, 1, FIRST]), ask("qwen2_vl", [TEXT])
    run(model, **given)
    wanted = model.model.rope_deltas.clone()
    run(model, held, **given)
    run(model, held, **given)
    assert_reused(held, START)
    assert model.model.rope_deltas.equal(wanted)
    with torch.no_grad():  # the call after that, without the cache
        logits = model(**text, use_cache=False).logits
        held.reset()
        torch.testing.assert_close(model(**text, use_cache=False).logits, logits)


@FROM_5_23
@pytest.mark.parametrize("name", KINDS)
def test_rows_about_one_image_run_it_once(name: str) -> None:
    model, _ = tiny(name)
    num_pixels = []
    encode = model.model.get_image_features

    @functools.wraps(encode)
    def noting(*args: Any, **kwargs: Any) -> Any:
        num_pixels.append((kwargs.get("pixel_values") if not args else args[0]).numel())
        return encode(*args, **kwargs)

    one = ask(name, [TEXT, 1, FIRST])["pixel_values"].numel()
    given = ask(name, [TEXT, 1, FIRST], [TEXT, 1, SECOND])
    two = ask(name, [TEXT, 1, FIRST], [TEXT, 2, SECOND])
    references = [run(model, **given, num_beams=2), run(model, **two)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "get_image_features", noting)
        assert_same(references[0], run(model, PagedPrefixCache(model, block_size=8), **given, num_beams=2))
        assert_same(references[1], run(model, PagedPrefixCache(model, block_size=8), **two))
    assert num_pixels == [one, 2 * one]


@pytest.mark.parametrize("name", KINDS)
def test_an_encoder_that_somebody_has_replaced_is_the_one_that_runs_and_nothing_of_before_is_found(name: str) -> None:
    model, held, given = begin(name, [TEXT, 1, FIRST])
    before, encode = run(model, held, **given), model.model.get_image_features

    @functools.wraps(encode)
    def changed(*args: Any, **kwargs: Any) -> Any:
        output = encode(*args, **kwargs)
        features = output.pooler_output
        output.pooler_output = features * 2 if isinstance(features, Tensor) else [each * 2 for each in features]
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "get_image_features", changed)
        held.reset()
        output = run(model, held, **given)
        assert not reused(held)
        assert_same(run(model, **given), output)
    assert not is_same(before, output), "the change does not matter"


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("llava_onevision", marks=FROM_5_23)])
def test_videos_are_named_as_images_are(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    outputs = []
    for seed, seconds, after in ((1, 1.0, FIRST), (1, 1.0, SECOND), (2, 1.0, SECOND), (1, 3.0, SECOND)):
        given = video(name, seed, seconds, after)
        outputs.append(run(model, held, **given))
        assert_same(run(model, **given), outputs[-1])
        if (seed, seconds, after) == (1, 1.0, SECOND):
            assert_reused(held, START)
        elif outputs[1:] and (seed, name) != (1, "llava_onevision"):
            assert reused(held) <= START
        held.reset()
    assert not is_same(outputs[1], outputs[2])


def video(name: str, seed: int, seconds: float, after: list[int]) -> dict[str, Tensor]:
    """A prompt with a video of four frames; Qwen's are told how many seconds a pair of them takes."""
    model, layout = tiny(name)
    drawn = torch.Generator().manual_seed(seed)
    if name == "qwen2_5_vl":
        shape = layout.shapes["pixel_values"]
        pixels = torch.randn(2 * shape[0], *shape[1:], generator=drawn)
        beside = {
            "video_grid_thw": layout.beside["image_grid_thw"] * torch.tensor([2, 1, 1]),
            "second_per_grid_ts": torch.tensor([seconds]),
        }
        token, num_tokens = model.config.video_token_id, 2 * layout.num_tokens
    else:
        pixels, beside = torch.randn(1, 4, 3, 64, 64, generator=drawn), {}
        (features,) = model.model.get_video_features(pixels, return_dict=True).pooler_output
        token, num_tokens = model.config.video_token_index, len(features)
    ids = torch.tensor([[*TEXT, *[token] * num_tokens, *after]])
    types = dict.fromkeys(layout.types, 2 * (ids == token))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values_videos": pixels, **beside, **types}


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_forward_hits_an_image(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    positions = {}
    for after in (FIRST, SECOND):
        given = ask(name, [TEXT, 1, after])
        if name == "qwen2_vl":  # without positions it is not known which ones the model gives its tokens
            found, _ = model.model.get_rope_index(
                given["input_ids"], mm_token_type_ids=given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
            )
            positions = {"position_ids": found}
        with torch.no_grad():
            wanted = model(**given, **positions, use_cache=False).logits[:, -1:]
            held.reset()
            logits = model(**given, **positions, past_key_values=held, logits_to_keep=1).logits
        assert_near(logits, wanted)
    assert_reused(held, START)


@FROM_5_23
def test_an_image_has_a_name_that_another_process_has_for_it(tmp_path: Path) -> None:
    model, _ = tiny("idefics3")
    first, second = PagedPrefixCache(model, block_size=8), PagedPrefixCache(model, block_size=8)
    run(model, first, **ask("idefics3", [TEXT, 1, FIRST]))
    first.reset()
    saved = first.store.save(tmp_path)
    assert saved.num_blocks
    assert not saved.not_saved
    second.store.load(tmp_path)
    given = ask("idefics3", [TEXT, 1, SECOND])
    with Towers(model) as towers:
        output = run(model, second, **given)
        assert not towers.num_runs
    assert_same(run(model, **given), output)
    assert reused(second) > START
    zero_blocks(second)
    second.reset()
    assert not is_same(run(model, **given), run(model, second, **given))


def test_a_new_image_after_rows_that_resume_is_computed_and_not_kept() -> None:
    model, _ = tiny("idefics3")
    first, second = ask("idefics3", [TEXT, 1, FIRST]), ask("idefics3", [SECOND, 2, THIRD])
    outputs: list[Any] = []
    for held in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=8)):
        output = run(model, held, **first)
        mask = torch.ones((1, output.sequences.shape[1] - 1 + second["input_ids"].shape[1]), dtype=torch.int64)
        outputs.append(run(model, held, **{**second, "attention_mask": mask}))
    assert_same(*outputs)
    held.reset()
    given = ask("idefics3", [TEXT, 1, FIRST])
    assert_same(run(model, **given), run(model, held, **given))


def test_what_follows_an_image_after_a_crop_has_the_name_of_what_ran() -> None:
    model, held, given = begin("idefics3", [TEXT, 1, FIRST])
    other, ids = torch.tensor([SECOND]), given["input_ids"]
    with torch.no_grad():
        model(**given, past_key_values=held, logits_to_keep=1)
        held.crop(-5)
        mask = torch.ones((1, ids.shape[1] - 5 + other.shape[1]), dtype=torch.int64)
        model(input_ids=other, attention_mask=mask, past_key_values=held, logits_to_keep=1)
    never_ran = torch.cat([ids, other[:, 5:]], dim=1)  # the tokens that were taken back, and behind them the later ones
    given = {**given, "input_ids": never_ran, "attention_mask": torch.ones_like(never_ran)}
    for cache in (PagedPrefixCache(held.store), held):
        assert_same(run(model, **given), run(model, cache, **given))


@pytest.mark.parametrize("name", KINDS)
def test_rows_whose_images_have_no_name_are_not_taken_for_equal(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=3)
    given = ask(name, [TEXT, 1, FIRST], [TEXT, 2, FIRST])
    assert_same(run(model, **given), run(model, held, **given))
    assert BEFORE_5_23 or held.last_call.rows[0].stopped.startswith(
        "an image at the beginning of a block has too few tokens"
    )
    given = ask(name, [TEXT, 1, FIRST])
    assert_same(run(model, **given, num_beams=2), run(model, held, **given, num_beams=2))


def state_of(model: Any) -> list[Tensor | None]:
    return [module.rope_deltas for module in model.modules() if hasattr(module, "rope_deltas")]


@pytest.mark.parametrize("name", KINDS)
def test_an_image_is_prefilled_and_a_look_says_what_a_call_finds(name: str) -> None:
    model, _ = tiny(name)
    with Towers(model) as towers:
        held = PagedPrefixCache(model, block_size=8)
        given, other = ask(name, [TEXT, 1, FIRST]), ask(name, [TEXT, 1, SECOND])
        run(model, **ask(name, [THIRD, 2, THIRD]))
        before, towers.num_runs = state_of(model), 0
        assert held.lookup(given).num_tokens == 0
        assert not towers.num_runs, "a look runs nothing"
        done = held.prefill([given])
        assert (done.num_tokens, done.num_known, towers.num_runs) == (done.num_computed // 8 * 8, 0, 1)
        assert held.prefill(given).num_computed == 0
        assert all(a is b for a, b in zip(before, state_of(model), strict=True))
        for each in (given, other):
            found = held.lookup(each).num_tokens
            assert found >= BEHIND
            output = run(model, held, **each)
            assert held.last_call.rows[0].matched_tokens == found
            held.reset()
        assert towers.num_runs == 1
    assert_same(run(model, **other), output)
    zero_blocks(held)
    assert not is_same(run(model, **other), run(model, held, **other))


BEHIND = len(TEXT) + 16  # after the image


@pytest.mark.parametrize("name", KINDS)
def test_explain_names_the_image_in_which_prompts_part(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    held.prefill(ask(name, [TEXT, 1, FIRST, 2, SECOND, 3, THIRD]))
    said = held.explain(ask(name, [TEXT, 1, FIRST, 3, SECOND, 3, THIRD]))
    assert said.parts_at == len(TEXT) + 16 + len(FIRST)
    assert "no cached block has image 2 of 3, at token 70, after these tokens" in str(said)
    assert "image 2 of 3, at token 70, is another one" in said.advice
    run(model, held, **ask(name, [TEXT, 1, FIRST, 3, SECOND]))
    assert held.last_call.rows[0].stopped == "no cached block has image 2 of 2, at token 70, after these tokens"


@pytest.mark.parametrize("name", KINDS)
def test_a_pinned_image_stays_for_other_questions(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8, num_blocks=24)
    given = ask(name, [TEXT, 1, FIRST])
    held.prefill(given)
    assert held.pin(given) == given["input_ids"].shape[1] // 8 * 8
    for seed in (2, 3, 2):
        run(model, held, **ask(name, [SECOND, seed, THIRD]))
        held.reset()
    other = ask(name, [TEXT, 1, THIRD])
    assert held.lookup(other).num_tokens == BEHIND
    assert_same(run(model, **other), run(model, held, **other))
    assert held.unpin(given)
    assert held.stats().num_pinned_blocks == 0
    held.check()


@pytest.mark.parametrize("name", KINDS)
def test_continuations_of_an_image_are_scored_as_generate_scores_them(name: str) -> None:
    model, _ = tiny(name)
    held = PagedPrefixCache(model, block_size=8)
    continuations = [FIRST[:4], FIRST[:5], SECOND[:3], [7]]
    for seed in (1, 2, 1):
        given = ask(name, [TEXT, seed, FIRST])
        scores = held.score(given, continuations)
        for score, forced in zip(scores, continuations, strict=True):
            fresh = DynamicCache(config=model.config)
            output = run(
                model, past_key_values=fresh, **given, max_new_tokens=len(forced), logits_processor=[Forced(forced)]
            )
            wanted = [float(step[0].log_softmax(-1)[id_]) for step, id_ in zip(output.logits, forced, strict=True)]
            assert score.log_probs == pytest.approx(wanted, abs=1e-4)
    assert held.last_call.reused_tokens > BEHIND
    assert held.stats().num_blocks_in_use == 0


def test_what_cannot_be_asked_is_said() -> None:
    _, held, given = begin("qwen2_vl", [TEXT, 1, FIRST])
    with pytest.raises(UnsupportedModelError, match="the prompt ends with an image"):
        held.prefill(ask("qwen2_vl", [TEXT, 1]))
    assert held.lookup(ask("qwen2_vl", [TEXT, 1])).stopped.startswith("the prompt ends with an image")
    with pytest.raises(CacheArgumentError, match="give one row of token ids"):
        held.pin(ask("qwen2_vl", [TEXT, 1, FIRST], [TEXT, 2, FIRST]))
    with pytest.raises(CacheArgumentError, match="the prompt has padding"):
        held.lookup(
            {**given, "attention_mask": torch.ones_like(given["input_ids"]).index_fill_(1, torch.tensor([0]), 0)}
        )
    with pytest.raises(CacheArgumentError, match="the prompt has pixel_values; give it with its input_ids"):
        held.lookup({"pixel_values": given["pixel_values"]})
    with pytest.raises(CacheArgumentError, match='pass return_tensors="pt"'):
        held.lookup({**given, "input_ids": given["input_ids"].tolist()})
    with pytest.raises(CacheArgumentError, match="leave prefill_chunk_size out"):
        held.score(given, [FIRST], prefill_chunk_size=8)
    with pytest.raises(
        CacheArgumentError, match="tokens follow the context is not known: the prompt ends with an image"
    ):
        held.score(ask("qwen2_vl", [TEXT, 1]), [FIRST])
    with pytest.raises(CacheArgumentError, match="the placeholder of an image"):
        held.prefill(given["input_ids"])
    assert held.stats().num_cached_blocks == 0
