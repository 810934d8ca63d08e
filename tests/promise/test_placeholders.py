"""Chats about an image, passed again with the whole conversation each turn, or new tokens alone: as without a cache."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore, generate_all

from ..conformance.image_zoo import IMAGE_TOKEN, build, example_inputs, prompt, tiny
from ..reference import Forwards, assert_same, is_same, row, run
from ..tiny_models import CHARACTERS, character_tokenizer

NAMES = ("llava", "gemma3", "gemma4", "qwen2_vl", "qwen3_5", "cohere_compass", "idefics3", "qwen2_audio")
SIMPLE, WITH_DELTAS, WITH_WINDOWS, WITH_STATES = "llava", "qwen2_vl", "gemma3", "qwen3_5"
KINDS = (SIMPLE, WITH_DELTAS, WITH_WINDOWS, WITH_STATES)
COMPUTED_WHOLE = ("qwen2_audio",)
FILLED_BY = {"qwen2_audio": "input_features", "gemma4": "pixel_values"}
TYPES = ("token_type_ids", "mm_token_type_ids")
PLAIN = {"suppress_tokens": [IMAGE_TOKEN + extra for extra in range(8)]}  # no placeholder is generated

Inputs = dict[str, torch.Tensor]


def without_content(inputs: Inputs) -> Inputs:
    """Ids, mask, and the token types."""
    return {key: inputs[key] for key in ("input_ids", "attention_mask", *TYPES) if key in inputs}


def content_of(inputs: Inputs) -> Inputs:
    """The image itself, and what says how it lies."""
    return {key: value for key, value in inputs.items() if key not in without_content(inputs)}


def turn(inputs: Inputs, output: Any, tokens: list[int]) -> Inputs:
    """The whole conversation with its images, and these tokens more."""
    said = output.sequences
    new = torch.tensor([tokens], dtype=torch.long).expand(len(said), -1)
    grown = content_of(inputs) | {"input_ids": torch.cat([said, new], 1)}
    num_new = grown["input_ids"].shape[1] - inputs["input_ids"].shape[1]
    for key, fill in (("attention_mask", 1), *((key, 0) for key in TYPES)):
        if key in inputs:
            times = len(said) // len(inputs[key])
            grown[key] = torch.nn.functional.pad(inputs[key].repeat_interleave(times, 0), (0, num_new), value=fill)
    return grown


def chat(model: PreTrainedModel, held: Any, inputs: Inputs, num_turns: int = 3, **options: Any) -> list[Any]:
    """The outputs of a chat on a cache, or without; `options` are those of the turns after the first."""
    cached = () if held is None else (held,)
    outputs = [run(model, *cached, **inputs, **PLAIN)]
    for number in range(1, num_turns):
        inputs = turn(inputs, outputs[-1], row((number, 9)))
        outputs.append(run(model, *cached, **inputs, **PLAIN, **options))
    return outputs


def begun(name: str) -> tuple[PreTrainedModel, Inputs, PagedPrefixCache, Any]:
    """A model, a prompt with an image, a cache, and what it answered on that."""
    model, image = tiny(name)[0], example_inputs(name)[1]
    held = PagedPrefixCache(model, block_size=8)
    return model, image, held, run(model, held, **image, **PLAIN)


def reference_chat(model: PreTrainedModel, inputs: Inputs, num_turns: int = 3, **options: Any) -> list[Any]:
    return chat(model, None, inputs, num_turns, **options)


def shows_pixels(model: PreTrainedModel, outputs: list[Any]) -> bool:
    """Whether pixels matter to what a chat gives: it differs from what its ids give as text, or those cannot be run."""
    ids = outputs[-1].sequences[:, :-6]
    try:
        return not is_same(outputs[-1], run(model, input_ids=ids, **PLAIN))
    except (IndexError, ValueError, RuntimeError):
        return True


@pytest.mark.parametrize("is_used", [False, True], ids=["an empty store", "a used store"])
@pytest.mark.parametrize("name", NAMES)
def test_later_turns_of_a_chat_about_an_image_are_those_of_dynamic_cache(name: str, is_used: bool) -> None:
    model, (text, image) = tiny(name)[0], example_inputs(name)
    reference = reference_chat(model, image)
    assert shows_pixels(model, reference)
    held = PagedPrefixCache(model, block_size=8)
    if is_used:
        chat(model, held, example_inputs(name, seed=1)[1])
        run(model, held, **text)
    for wanted, got in zip(reference, chat(model, held, image), strict=True):
        assert_same(wanted, got)
    if name not in COMPUTED_WHOLE:
        assert held.last_call.computed_tokens == 10  # the last one generated, and what was said since
    held.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_without_its_image_is_refused_and_changes_nothing(name: str) -> None:
    model, image = tiny(name)[0], example_inputs(name)[1]
    reference = reference_chat(model, image, num_turns=2)
    filled_by = FILLED_BY.get(name, "pixel_values")
    refusal = (
        f"token {IMAGE_TOKEN} at position 24 is the placeholder of .*, and nothing was passed that fills it: "
        f"pass {filled_by}"
    )
    held = PagedPrefixCache(model, block_size=8)
    with pytest.raises(CacheArgumentError, match=refusal):
        run(model, held, **without_content(image))
    assert held.stats().num_calls == 0
    first = run(model, held, **image, **PLAIN)
    second = turn(image, first, row((1, 9)))
    with pytest.raises(CacheArgumentError, match=refusal):
        run(model, held, **without_content(second))
    assert_same(reference[1], run(model, held, **second, **PLAIN))  # the rows are as they were
    held.check()


def same_text(name: str, image_seeds: list[int]) -> Inputs:
    """A row for each image, all of one text."""
    rows = [prompt(tiny(name)[1], [row((1, 24)), seed, row((2, 12))]) for seed in image_seeds]
    return {key: torch.cat([inputs[key] for inputs in rows]) for key in rows[0]}


def ask_all(model: PreTrainedModel, held: Any, images: Inputs) -> Any:
    """A first turn in which each row says the same, so that only images tell rows apart."""
    return run(model, held, **images, max_new_tokens=1, prefix_allowed_tokens_fn=lambda *_: [5])


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", [*KINDS, "qwen2_audio"])
def test_rows_of_one_text_go_on_each_with_its_image(name: str, copies: int) -> None:
    model, images = tiny(name)[0], same_text(name, [0, 1, 2])
    held = PagedPrefixCache(model, block_size=8)
    second = turn(images, ask_all(model, held, images), row((1, 9)))
    again = {key: value.repeat_interleave(copies, 0) for key, value in without_content(second).items()}
    content = content_of(same_text(name, [seed for seed in (0, 1, 2) for _ in range(copies)]))
    wanted = run(model, **again, **content, **PLAIN)
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": copies} if copies > 1 else {}
    got = run(model, held, **second, **PLAIN, **sampled)
    assert not torch.equal(wanted.logits[0][0], wanted.logits[0][copies])
    assert_same(wanted, got)


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_forward_of_placeholders_that_nothing_fills_is_refused(name: str) -> None:
    model, image = tiny(name)[0], example_inputs(name)[1]
    held = PagedPrefixCache(model, block_size=8)
    with (
        torch.no_grad(),
        pytest.raises(CacheArgumentError, match=f"token {IMAGE_TOKEN} at position 24 is the placeholder"),
    ):
        model(**without_content(image), past_key_values=held)
    assert held.get_seq_length() == 0
    with torch.no_grad():
        model(**image, past_key_values=held)
        new = torch.tensor([[3, IMAGE_TOKEN]])
        with pytest.raises(
            CacheArgumentError, match=f"at position {image['input_ids'].shape[1] + 1} is the placeholder"
        ):
            model(input_ids=new, past_key_values=held)
        model(input_ids=new[:, 1:], past_key_values=held)  # a decode step: a model may have generated it


@pytest.mark.parametrize("name", [WITH_DELTAS, "qwen2_5_vl", WITH_STATES])
def test_only_new_tokens_go_on_at_the_positions_of_their_own_image(name: str) -> None:
    model, image, held, first = begun(name)
    reference = reference_chat(model, image, num_turns=2)
    run(model, PagedPrefixCache(held.store), **example_inputs(name)[0])
    second = turn(image, first, row((1, 9)))
    new = second["input_ids"][:, held.get_seq_length() :]
    assert_same(reference[1], run(model, held, input_ids=new, attention_mask=second["attention_mask"], **PLAIN))


@pytest.mark.parametrize("name", KINDS)
def test_scores_and_prefills_of_placeholders_are_refused(name: str) -> None:
    model, ids = tiny(name)[0], example_inputs(name)[1]["input_ids"]
    held = PagedPrefixCache(model, block_size=8)
    if model.config.get_text_config().vocab_size <= IMAGE_TOKEN:
        pytest.skip("outside of the vocabulary")
    for refused in (lambda: held.prefill(ids), lambda: held.score(ids, [[1, 2]]), lambda: held.score([1, 2], [ids])):
        with pytest.raises(CacheArgumentError, match=f"token {IMAGE_TOKEN} at position 24, the placeholder of"):
            refused()
    assert held.prefill(ids[:, :24]).num_tokens == 24


def test_a_job_of_prompts_with_placeholders_is_refused_before_anything_runs() -> None:
    model, tokenizer = build(SIMPLE), character_tokenizer(CHARACTERS)
    model.config.image_token_index = tokenizer("#").input_ids[0]
    refusal = (
        rf"row 1, counted from 0: its prompt has token {model.config.image_token_index} at position 2, the placeholder"
    )
    PrefixStore(model)  # tries the model, where transformers is not the tested version
    with Forwards(model) as forwards, pytest.raises(CacheArgumentError, match=refusal):
        generate_all(model, tokenizer, ["What is ice?", "A #?"], max_new_tokens=2)
    assert forwards == []
    assert len(generate_all(model, tokenizer, ["What is ice?", "A ?"], max_new_tokens=2).completions) == 2


@pytest.mark.parametrize("left_out", [TYPES, (*TYPES, "attention_mask")], ids=["token types", "the mask, too"])
@pytest.mark.parametrize("name", KINDS)
def test_a_later_turn_may_leave_out_what_is_not_needed(name: str, left_out: tuple[str, ...]) -> None:
    model, image = tiny(name)[0], example_inputs(name)[1]
    outputs = []
    for held in (None, PagedPrefixCache(model, block_size=8)):
        cached = {} if held is None else {"past_key_values": held}
        first = run(model, **image, **PLAIN) if held is None else run(model, held, **image, **PLAIN)
        given = {key: value for key, value in turn(image, first, row((1, 9))).items() if key not in left_out}
        asked = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        outputs.append(model.generate(**given, **PLAIN, **cached, **asked))
    assert_same(*outputs)
