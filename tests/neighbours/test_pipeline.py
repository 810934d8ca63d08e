"""`pipeline("text-generation")`: the same answers and logits as without the cache, in all ways to hand it over."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, pipeline

from hf_paged_cache import PagedPrefixCache

from ..reference import zero_blocks
from .recorder import Recorder, are_same_steps, assert_same_steps

PREAMBLE = "A long preamble that all of the questions share, word by word. "
QUESTIONS = [PREAMBLE + question for question in ("Who?", "What was it?", "And where, if anywhere?", "Why?")]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}


@pytest.fixture
def asking(model: PreTrainedModel, tiny_tokenizer: Any) -> Any:
    tiny_tokenizer.padding_side = "left"
    return pipeline("text-generation", model=model, tokenizer=tiny_tokenizer)


def with_argument(asking: Any, cache: PagedPrefixCache, tokenizer: Any) -> Callable[..., Any]:
    return lambda texts, **options: asking(texts, past_key_values=cache, **options)


def in_block(asking: Any, cache: PagedPrefixCache, tokenizer: Any) -> Callable[..., Any]:
    def ask(texts: Any, **options: Any) -> Any:
        with cache:
            return asking(texts, **options)

    return ask


def at_construction(asking: Any, cache: PagedPrefixCache, tokenizer: Any) -> Callable[..., Any]:
    return pipeline("text-generation", model=asking.model, tokenizer=tokenizer, past_key_values=cache)


WAYS = {"an argument of the call": with_argument, "a with block": in_block, "an argument of pipeline": at_construction}


@pytest.mark.parametrize("way", WAYS)
def test_one_question_after_another(
    asking: Any, cache: PagedPrefixCache, recorder: Recorder, tiny_tokenizer: Any, way: str
) -> None:
    ask = WAYS[way](asking, cache, tiny_tokenizer)
    for number, question in enumerate(QUESTIONS):
        wanted, steps = recorder.during(asking, question, **GREEDY)
        got, our_steps = recorder.during(ask, question, **GREEDY)
        assert got == wanted
        assert_same_steps(steps, our_steps)
        assert cache.last_call.reused_tokens >= (len(PREAMBLE) // 16 * 16 if number else 0)
    assert cache.stats().num_calls == len(QUESTIONS)
    zero_blocks(cache)
    assert not are_same_steps(steps, recorder.during(ask, QUESTIONS[-1], **GREEDY)[1])


def test_questions_in_padded_batches(
    asking: Any, cache: PagedPrefixCache, recorder: Recorder, tiny_tokenizer: Any
) -> None:
    ask = with_argument(asking, cache, tiny_tokenizer)
    texts = ["A first one, which has nothing to share.", *QUESTIONS, "Short."]
    wanted, steps = recorder.during(asking, texts, batch_size=2, **GREEDY)
    for turn in range(2):
        got, our_steps = recorder.during(ask, texts, batch_size=2, **GREEDY)
        assert got == wanted
        assert_same_steps(steps, our_steps)
        if turn:
            assert cache.last_call.rows[0].matched_tokens >= len(PREAMBLE) // 16 * 16
    known = [PREAMBLE + "Really?", PREAMBLE + "Oh, really?"]
    wanted, steps = recorder.during(asking, known, batch_size=2, **GREEDY)
    zero_blocks(cache)
    assert not are_same_steps(steps, recorder.during(ask, known, batch_size=2, **GREEDY)[1])
    assert min(row.matched_tokens for row in cache.last_call.rows) >= len(PREAMBLE) // 16 * 16
    assert cache.last_call.reused_tokens > len(PREAMBLE)  # all rows start at one column


def test_a_chat_that_grows_computes_only_what_is_new(
    asking: Any, cache: PagedPrefixCache, recorder: Recorder, tiny_tokenizer: Any
) -> None:
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    options = {**GREEDY, "return_full_text": True, "tokenizer_encode_kwargs": {"add_special_tokens": False}}
    chat = [{"role": "system", "content": PREAMBLE}]
    said = 0
    for question in ("Hello, who are you?", "Why?", "And then?"):
        chat.append({"role": "user", "content": question})
        wanted, steps = recorder.during(asking, chat, **options)
        got, our_steps = recorder.during(asking, chat, past_key_values=cache, **options)
        assert got == wanted
        assert_same_steps(steps, our_steps)
        assert cache.last_call.reused_tokens >= said
        said = cache.last_call.prompt_tokens
        chat = got[0]["generated_text"]
    assert said > len(PREAMBLE)
    zero_blocks(cache)
    chat.append({"role": "user", "content": "So?"})
    steps = recorder.during(asking, chat, **options)[1]
    assert not are_same_steps(steps, recorder.during(asking, chat, past_key_values=cache, **options)[1])


def test_a_generator_of_texts(asking: Any, cache: PagedPrefixCache) -> None:
    wanted = list(asking((text for text in QUESTIONS), **GREEDY))
    assert list(asking((text for text in QUESTIONS), past_key_values=cache, **GREEDY)) == wanted
    assert cache.stats().reused_tokens >= 3 * (len(PREAMBLE) // 16 * 16)
