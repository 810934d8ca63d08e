"""The demo's measurement: the same questions behind one long prompt, each with generate's own cache, then with ours.

Owns what is run and what is timed; prints nothing, but tells a `Display` as it goes. Time to first token is read when `generate`
hands the first token to a streamer, in the same way on both sides. Every call of the first side starts with nothing, as `generate`
does by default (`DynamicCache`); all calls of the second side share one `PagedPrefixCache`, whose first call computes the whole prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from .questions import ask, few_shot_prompt

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hf_paged_cache import PagedPrefixCache

Model = Any  # a PreTrainedModel with a GenerationMixin, which transformers has no one type for


class DemoInputError(ValueError):
    """What was asked for does not fit the model; the message says what to change."""


@dataclass(frozen=True)
class Answer:
    """One call of `generate`: its tokens, its times in seconds, and how many prompt tokens it did not compute."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Comparison:
    """One question, answered on both sides."""

    question: str
    dynamic: Answer
    paged: Answer

    @property
    def same_tokens(self) -> bool:
        return self.dynamic.token_ids == self.paged.token_ids

    @property
    def speedup(self) -> float:
        """Of the time to first token."""
        return self.dynamic.first_token_seconds / self.paged.first_token_seconds


@dataclass(frozen=True)
class Report:
    """All questions of a run. Sums are over all of them, the cold first call of our side included."""

    model_name: str
    comparisons: tuple[Comparison, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(each.paged.prompt_tokens for each in self.comparisons)

    @property
    def reused_tokens(self) -> int:
        return sum(each.paged.reused_tokens for each in self.comparisons)

    @property
    def dynamic_first_token_seconds(self) -> float:
        return sum(each.dynamic.first_token_seconds for each in self.comparisons)

    @property
    def paged_first_token_seconds(self) -> float:
        return sum(each.paged.first_token_seconds for each in self.comparisons)

    @property
    def speedup(self) -> float:
        """Of the summed times to first token."""
        return self.dynamic_first_token_seconds / self.paged_first_token_seconds

    @property
    def warm_speedup(self) -> float | None:
        """The median of the questions after the first, which fills the cache; None if there is only one."""
        return median(each.speedup for each in self.comparisons[1:]) if len(self.comparisons) > 1 else None

    @property
    def total_speedup(self) -> float:
        """Of the whole calls, decoding included."""
        dynamic = sum(each.dynamic.total_seconds for each in self.comparisons)
        return dynamic / sum(each.paged.total_seconds for each in self.comparisons)

    @property
    def same_tokens(self) -> bool:
        return all(each.same_tokens for each in self.comparisons)


class Display(Protocol):
    """What is told of a run while it goes on."""

    def started(self, model_name: str, questions: Sequence[str], shared_tokens: int) -> None: ...
    def answered_with_dynamic(self, index: int, answer: Answer) -> None: ...
    def answered_with_paged(self, index: int, comparison: Comparison) -> None: ...
    def finished(self, report: Report) -> None: ...


class FirstTokenClock:
    """A streamer that notes when the first new token is there. `generate` puts the prompt first, then every token."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.first_token_at: float | None = None

    def put(self, value: Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.first_token_at = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def run_demo(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_name: str,
    questions: Sequence[str],
    num_shots: int,
    max_new_tokens: int,
    display: Display,
) -> Report:
    """Ask every question twice and compare.

    Effects: runs `2 * len(questions) + 2` calls of `generate`, and leaves the cache's hooks on the model.
    Raises:
        DemoInputError: prompt and answer are longer than the model's positions; before anything is run.
        UnsupportedModelError: from `PagedPrefixCache`.
    """
    from hf_paged_cache import PagedPrefixCache

    shared = few_shot_prompt(num_shots)
    prompts = [_encode(tokenizer, shared + ask(question), model.device) for question in questions]
    _check_length(model, max(prompt["input_ids"].shape[1] for prompt in prompts) + max_new_tokens)
    stop_ids = _stop_ids(model, tokenizer)
    cache = PagedPrefixCache(model)
    _warm_up(model, prompts[0], cache)

    display.started(model_name, questions, shared_tokens=len(tokenizer(shared)["input_ids"]))
    comparisons: list[Comparison] = []
    for index, prompt in enumerate(prompts):
        dynamic = _generate(model, tokenizer, prompt, max_new_tokens, stop_ids, cache=None)
        display.answered_with_dynamic(index, dynamic)
        paged = _generate(model, tokenizer, prompt, max_new_tokens, stop_ids, cache=cache)
        comparisons.append(Comparison(questions[index], dynamic, paged))
        display.answered_with_paged(index, comparisons[-1])
    report = Report(model_name, tuple(comparisons))
    display.finished(report)
    return report


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, device: torch.device) -> dict[str, Tensor]:
    encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    return {name: tensor.to(device) for name, tensor in encoded.items()}


def _check_length(model: Model, num_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and num_tokens > limit:
        raise DemoInputError(
            f"prompt and answer need {num_tokens} positions and the model has {limit}: ask with fewer --shots or --max-new-tokens"
        )


def _stop_ids(model: Model, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The model's own ends of sequence, and the end of the line: an answer is one line."""
    own = model.generation_config.eos_token_id
    ids = [] if own is None else [own] if isinstance(own, int) else list(own)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    if len(newline) == 1 and newline[0] != tokenizer.unk_token_id:
        ids += newline
    return ids or None


def _warm_up(model: Model, prompt: dict[str, Tensor], cache: PagedPrefixCache) -> None:
    """Pay for first-time costs outside the clock, with tokens that no question starts with: the prompt, reversed."""
    ids, mask = prompt["input_ids"].flip(1), prompt["attention_mask"]
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    model.generate(
        input_ids=ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache, max_new_tokens=2, do_sample=False
    )


def _generate(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    prompt: dict[str, Tensor],
    max_new_tokens: int,
    stop_ids: list[int] | None,
    *,
    cache: PagedPrefixCache | None,
) -> Answer:
    clock = FirstTokenClock()
    num_prompt_tokens = prompt["input_ids"].shape[1]
    started_at = time.perf_counter()
    output = model.generate(
        **prompt,
        past_key_values=cache,
        streamer=clock,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=0,
    )
    ended_at = time.perf_counter()
    token_ids = output[0, num_prompt_tokens:].tolist()
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
    return Answer(
        text=text.splitlines()[0] if text else "",
        token_ids=tuple(token_ids),
        prompt_tokens=num_prompt_tokens,
        reused_tokens=0 if cache is None else cache.last_call.reused_tokens,
        first_token_seconds=(clock.first_token_at or ended_at) - started_at,
        total_seconds=ended_at - started_at,
    )
