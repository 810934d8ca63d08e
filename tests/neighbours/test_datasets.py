"""`datasets.Dataset.map` with a function that generates: here with the cache, elsewhere with a cache of its own."""

from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import zero_blocks
from .recorder import Recorder, are_same_steps, assert_same_steps

PREAMBLE = "A long preamble that all of the questions share, word by word. "
QUESTIONS = ["Who?", "What was it?", "And where, if anywhere?", "Why?", "When?"]


@pytest.fixture
def questions() -> Dataset:
    return Dataset.from_dict({"question": [PREAMBLE + question for question in QUESTIONS]})


class Answer:
    """What a user maps over a dataset: a batch of questions -> their answers.

    Pickled, as for another process, it leaves its cache behind and builds one there.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, use_cache: bool = True) -> None:
        tokenizer.padding_side = "left"
        self.model, self.tokenizer, self.use_cache = model, tokenizer, use_cache
        self.cache: PagedPrefixCache | None = None

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        if self.use_cache and self.cache is None:
            self.cache = PagedPrefixCache(self.model)
        inputs = self.tokenizer(batch["question"], return_tensors="pt", padding=True)
        output = self.model.generate(**inputs, past_key_values=self.cache, max_new_tokens=6, do_sample=False)
        generated = output[:, inputs["input_ids"].shape[1] :]
        reused = self.cache.last_call.reused_tokens if self.cache is not None else 0
        return {"answer": self.tokenizer.batch_decode(generated), "reused": [reused] * len(generated)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": None}


def mapped(questions: Dataset, function: Any, **options: Any) -> Dataset:
    return questions.map(function, batched=True, batch_size=2, **options)


def test_batches_of_a_map_reuse_what_they_share(
    model: PreTrainedModel, cache: PagedPrefixCache, recorder: Recorder, questions: Dataset, tiny_tokenizer: Any
) -> None:
    tiny_tokenizer.padding_side = "left"

    def answer(batch: dict[str, list[str]], past_key_values: PagedPrefixCache | None) -> dict[str, list[str]]:
        inputs = tiny_tokenizer(batch["question"], return_tensors="pt", padding=True)
        output = model.generate(**inputs, past_key_values=past_key_values, max_new_tokens=6, do_sample=False)
        return {"answer": tiny_tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])}

    wanted, steps = recorder.during(mapped, questions, lambda batch: answer(batch, None))
    for turn in range(2):
        got, our_steps = recorder.during(mapped, questions, lambda batch: answer(batch, cache))
        assert got["answer"] == wanted["answer"]
        assert_same_steps(steps, our_steps)
        assert cache.stats().num_calls == 3 * (turn + 1)  # a map that cannot be hashed runs each time
    assert cache.stats().reused_tokens > len(PREAMBLE) * (2 * len(QUESTIONS) - 2) * 0.7
    zero_blocks(cache)
    assert not are_same_steps(steps, recorder.during(mapped, questions, lambda batch: answer(batch, cache))[1])


def test_another_process_is_refused_a_cache_that_a_function_holds(cache: PagedPrefixCache, questions: Dataset) -> None:
    def count(batch: dict[str, list[str]]) -> dict[str, list[int]]:
        return {"calls": [cache.stats().num_calls] * len(batch["question"])}

    with pytest.raises(TypeError, match="build a new one on the model"):
        mapped(questions, count, num_proc=1)


@pytest.mark.parametrize("num_proc", [None, 1])
def test_a_callable_that_builds_its_cache_where_it_runs_works_in_any_process(
    model: PreTrainedModel, questions: Dataset, tiny_tokenizer: Any, num_proc: int | None
) -> None:
    wanted = mapped(questions, Answer(model, tiny_tokenizer, use_cache=False))
    answer = Answer(model, tiny_tokenizer)
    got = mapped(questions, answer, num_proc=num_proc)
    assert got["answer"] == wanted["answer"]
    assert min(got["reused"][2:]) > len(PREAMBLE) * 0.7
    assert got["reused"][:2] == [0, 0]
    assert (answer.cache is None) == (num_proc == 1)


def test_an_attached_model_is_hashed_as_it_was(model: PreTrainedModel, questions: Dataset, tiny_tokenizer: Any) -> None:
    """Its hooks and bracket are no part of a cache, so a map over it without one is found on disk again."""

    def length(batch: dict[str, list[str]]) -> dict[str, list[int]]:
        ids = tiny_tokenizer(batch["question"], return_tensors="pt", padding=True)["input_ids"]
        return {"length": [int(model(ids, use_cache=False).logits.shape[1])] * len(ids)}

    PagedPrefixCache(model)
    assert mapped(questions, length)._fingerprint == mapped(questions, length)._fingerprint
