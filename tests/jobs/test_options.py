"""Options of `generate` in a job: each row's completion is what it would be alone; what cannot be is refused first."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hf_paged_cache import CacheArgumentError, generate_all
from hf_paged_cache.jobs import calls

from ..tiny_models import CHARACTERS, build, character_tokenizer
from . import test_job

NEW = 8
# a padded row begins with its first letter
PROMPTS = ["a", "The quick", "bbbb", "xa", "aaaaaaaaaaaaaaaaaaaaaaaab", "ab", "by"]
A, K = character_tokenizer(CHARACTERS)("ak").input_ids


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer(CHARACTERS)


def repeater(**saved: Any) -> Any:
    """A model that repeats the last letter, so that what a penalty or a stop string sees decides."""
    model: Any = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    for name, value in saved.items():
        setattr(model.generation_config, name, value)
    return model


def alone(model: Any, tokenizer: Any, prompt: str, **options: Any) -> Any:
    return test_job.alone(model, tokenizer, prompt, **{"max_new_tokens": NEW, **options})


def together(model: Any, tokenizer: Any, **options: Any) -> Any:
    return generate_all(model, tokenizer, PROMPTS, **{"max_new_tokens": NEW, "progress": False, **options}).completions


SEES_TOKENS: dict[str, dict[str, Any]] = {
    "ngrams": {"no_repeat_ngram_size": 2},
    "ngrams of three": {"no_repeat_ngram_size": 3},
    "ngrams of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "stop strings": {"stop_strings": ["aaa", "bbbbbb"]},
    "bad words": {"bad_words_ids": [[A, A, A]]},
    "biased sequences": {"sequence_bias": [[[A, A, A], -50.0]]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "a penalty": {"repetition_penalty": 1.5},
    "a penalty on the prompt": {"encoder_repetition_penalty": 3.0},
    "at least so many": {"min_new_tokens": 5, "eos_token_id": A},
    "suppressed": {"suppress_tokens": [A]},
    "no padding token": {"pad_token_id": -1},
    "a padding token that is generated, too": {"pad_token_id": A, "eos_token_id": 7},
    "a padding token and stop strings": {"pad_token_id": A, "stop_strings": ["aa", "b"]},
    "an end that is written": {"eos_token_id": K},
    "a forced end": {"forced_eos_token_id": A},
    "beams and stop strings": {"num_beams": 3, "stop_strings": ["aaa"]},
    "a watermark": {"watermarking_config": {"bias": 2.5}},
}


@pytest.mark.parametrize("how", [*SEES_TOKENS, *OTHERS])
def test_an_option_gives_each_row_what_it_gives_it_alone(how: str, tokenizer: Any, tmp_path: Path) -> None:
    model, options = repeater(), {**SEES_TOKENS, **OTHERS}[how]
    expected = [alone(model, tokenizer, prompt, **options) for prompt in PROMPTS]
    assert together(model, tokenizer, **options) == expected
    assert len({str(each) for each in expected}) > 1
    assert together(model, tokenizer, out=tmp_path / "out.jsonl", **options) is None


@pytest.mark.parametrize("how", SEES_TOKENS)
def test_padding_would_show(how: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = repeater()
    expected = [alone(model, tokenizer, prompt, **SEES_TOKENS[how]) for prompt in PROMPTS]
    monkeypatch.setattr(calls, "may_pad", lambda *_: True)
    assert together(model, tokenizer, **SEES_TOKENS[how]) != expected


SAVED: dict[str, dict[str, Any]] = {
    "a least length": {"min_length": 6, "eos_token_id": A},
    "a greatest length": {"max_length": 9},
    "stop strings": {"stop_strings": ["aaa"]},
    "neither pad nor end": {"pad_token_id": None, "eos_token_id": None},
    "no cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("what", SAVED)
def test_what_a_model_has_saved_is_heeded_as_in_a_call_of_one_row(what: str, tokenizer: Any) -> None:
    model = repeater(**SAVED[what])
    assert together(model, tokenizer) == [alone(model, tokenizer, prompt) for prompt in PROMPTS]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 0}, "strictly positive"),
    ({"stop_strings": []}, r"generate cannot run with stop_strings=\[\] \("),
    ({"stop_strings": 5}, r"generate cannot run with stop_strings=5 \("),
    ({"eos_token_id": "abc"}, r"generate cannot run with eos_token_id='abc' \("),
    ({"eos_token_id": [[1]]}, r"eos_token_id=\[\[1\]\] \("),
    ({"forced_eos_token_id": 9999}, "generate cannot run with"),
    ({"num_beams": 0}, "num_beams is 0; it must be an int"),
    ({"num_beams": 2.5}, "num_beams is 2.5; it must be an int"),
    ({"top_p": "high", "do_sample": True}, "generate cannot run with top_p='high', do_sample=True"),
    ({"bad_words_ids": 3}, "bad_words_ids"),
    ({"watermarking_config": 5}, r'watermarking_config is 5; give its settings by name, such as \{"bias": 2.5\}$'),
    ({"penalty_alpha": 0.5}, "generate cannot run with penalty_alpha=0.5"),
    ({"do_sample": "no"}, "do_sample is 'no'; give True or False"),
    ({"logits_processor": []}, "logits_processor is no option of generate that a job takes"),
    ({"cache_salt": "a"}, r"give cache=PagedPrefixCache\(model, cache_salt=\.\.\.\)"),
    ({"max_time": 3.0}, "max_time is not an option here"),
    ({"do_sample": True, "temperature": -1.0}, "strictly positive"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_generate_cannot_do_is_refused_before_anything_is_written(
    options: dict[str, Any], said: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(CacheArgumentError, match=said) as raised:
        together(repeater(), tokenizer, out=tmp_path / "out.jsonl", **options)
    assert "\n" not in str(raised.value)
    assert not [*tmp_path.iterdir()]


OFF: list[dict[str, Any]] = [
    {"diversity_penalty": 0.0, "encoder_repetition_penalty": 1.0},
    {"chat_format": "chatml", "_from_model_config": True},
]


@pytest.mark.parametrize("saved", OFF)
def test_what_changes_nothing_lets_rows_be_padded(saved: dict[str, Any], tokenizer: Any) -> None:
    model = repeater(**saved)
    result = generate_all(model, tokenizer, PROMPTS, max_new_tokens=NEW, progress=False)
    assert result.completions == [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    assert result.summary.num_batches < len({len(prompt) for prompt in PROMPTS})


def test_drafts_from_the_prompt_run_a_row_at_a_time(tokenizer: Any) -> None:
    model = repeater()
    options = {"prompt_lookup_num_tokens": 3}
    expected = [alone(model, tokenizer, prompt, **options) for prompt in PROMPTS]
    assert together(model, tokenizer, **options) == expected


def test_an_error_of_the_models_own_keeps_its_kind(tokenizer: Any) -> None:
    model, num_calls = repeater(), 0

    def fail(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 20:
            raise RuntimeError("a defect")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^a defect$"):
        together(model, tokenizer, max_new_tokens=40)
