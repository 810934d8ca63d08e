"""`cache.explain`: what a lookup finds, and the very place where the closest cached prompt continues in another way."""

import random
from typing import Any

import pytest

from hf_paged_cache import CacheArgumentError, Explanation, PagedPrefixCache

from ..reference import batch, run
from ..tiny_models import build, tiny
from .test_prefixes import all_blocks, model_of

BLOCK = 16


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_prompts_part_where_they_part_by_comparing_token_by_token(name: str) -> None:
    random_ = random.Random(0)
    cache = PagedPrefixCache(model_of(name))
    known: list[list[int]] = []
    for _ in range(12):
        head = known[random_.randrange(len(known))][: random_.randrange(1, 60)] if known else []
        tokens = [*head, *(random_.randrange(1, 128) for _ in range(random_.randrange(20, 70)))]
        before = all_blocks(cache)
        found = cache.explain(tokens)
        assert all_blocks(cache) == before
        assert (found.num_known, found.stopped) == cache.lookup(tokens)[::2]
        whole = [each[: len(each) // BLOCK * BLOCK] for each in known]
        ends = [common(tokens, each[: (found.num_known // BLOCK + 1) * BLOCK]) for each in whole]
        assert found.parts_at == max([found.num_known, *ends])
        assert (found.cached is None) == (
            not any(
                each[: found.num_known] == tokens[: found.num_known] and len(each) > found.parts_at for each in whole
            )
        )
        cache.prefill(tokens)
        known.append(tokens)


def test_the_place_is_shown_as_text(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    shared = "Answer in one word.\nWhat is ice? "
    cache.prefill(tiny_tokenizer(shared + "And what is a fire?").input_ids)
    found = cache.explain(tiny_tokenizer(shared + "And what is snow?").input_ids, tiny_tokenizer)
    assert isinstance(found, Explanation)
    assert (found.num_tokens, found.num_known, found.parts_at) == (50, 32, 45)
    assert (found.before, found.after, found.cached) == ("ce? And what is ", "snow?", "a f")
    assert "13 tokens from token 32 on" in found.advice
    assert "32 of 50 tokens are known (64%); 18 would be computed" in str(found)
    assert "the prompt continues with   'snow?'" in str(found)


def test_the_last_calls_row_is_compared_token_by_token(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    inputs = tiny_tokenizer("What is snow, and what is hail?", return_tensors="pt", return_token_type_ids=False)
    tiny_llama.generate(**inputs, past_key_values=cache, max_new_tokens=2)
    found = cache.explain(tiny_tokenizer("What is snow, and what is rain?").input_ids, tiny_tokenizer)
    assert (found.num_known, found.parts_at, found.after, found.cached[:5]) == (26, 26, "rain?", "hail?")


def test_what_is_known_whole_has_nothing_to_part_from(tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    cache.prefill([*range(1, 33)])
    found = cache.explain([*range(1, 33)])
    assert (found.num_known, found.after, found.cached, found.advice) == (32, "", None, "")
    assert "1 would be computed" in str(found)


@pytest.mark.parametrize("length", [20, 32, 33])
def test_the_beginning_of_what_is_cached_is_said_to_be_that(length: int, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    text = "Answer in one word.\nWhat is ice? And what is snow?"
    cache = PagedPrefixCache(tiny_llama)
    cache.prefill(tiny_tokenizer(text).input_ids)
    found = cache.explain(tiny_tokenizer(text[:length]).input_ids, tiny_tokenizer)
    assert (found.num_known, found.parts_at, found.after) == (length // BLOCK * BLOCK, length, "")
    assert found.cached == text[length : min(48, length + 16, (length // BLOCK + 1) * BLOCK)]
    said = str(found)
    assert f"the prompt ends at token {length}, after   {found.before!r}" in said
    assert f"what is cached continues with   {found.cached!r}" in said
    assert "''" not in said
    assert "part" not in said.split("why no more")[1].split("\n", 1)[1]


def test_tokens_that_are_cached_behind_others_are_told(tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    cache.prefill([*range(1, 49)])
    assert "after others" in cache.explain([*range(17, 49)]).advice
    assert not cache.explain([*range(18, 49)]).advice


def test_what_is_cached_of_another_model_of_before_is_told() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    cache.prefill([*range(1, 49)])
    model.get_input_embeddings().weight.data.mul_(2.0)
    found = cache.explain([*range(1, 49)])
    assert (found.num_known, found.cached) == (0, None)
    assert "other weights" in found.advice


def test_nothing_is_told_of_another_salt() -> None:
    cache = PagedPrefixCache(tiny("llama"))
    cache.prefill([*range(1, 49)])
    run(tiny("llama"), cache, **batch([*range(1, 60)]), max_new_tokens=1)
    found = PagedPrefixCache(cache.store, cache_salt="other").explain([*range(1, 49)])
    assert (found.num_known, found.cached, found.advice) == (0, None, "")


def test_a_text_is_no_prompt() -> None:
    with pytest.raises(CacheArgumentError, match="type str"):
        PagedPrefixCache(tiny("llama")).explain("a text")  # type: ignore[arg-type]
