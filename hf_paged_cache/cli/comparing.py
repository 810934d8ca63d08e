"""Prompts answered twice and timed: with generate's own cache, then with ours.

Owns what is run and what is timed; prints nothing. Time to first token is read when `generate` hands the first token to a streamer,
in the same way on both sides. A call of the first side starts with nothing, as `generate` does by default (`DynamicCache`); all calls
of the second side share one `PagedPrefixCache`, whose first call computes the whole prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hf_paged_cache import PagedPrefixCache

_ONE_GREEDY_ANSWER: dict[str, Any] = {  # whatever the model's generation config has saved
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "stop_strings": None,
    "use_cache": True,
    "cache_implementation": None,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
}
Model = Any  # a PreTrainedModel with a GenerationMixin, which transformers has no one type for


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


def totals(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Sums over all questions, the cold first call of our side included; times in seconds."""
    dynamic, paged = [each.dynamic for each in comparisons], [each.paged for each in comparisons]
    dynamic_seconds = sum(answer.first_token_seconds for answer in dynamic)
    paged_seconds = sum(answer.first_token_seconds for answer in paged)
    warm = [each.speedup for each in comparisons[1:]]  # the first question fills the cache
    whole = sum(answer.total_seconds for answer in dynamic) / sum(answer.total_seconds for answer in paged)
    return {
        "prompt_tokens": sum(answer.prompt_tokens for answer in paged),
        "reused_tokens": sum(answer.reused_tokens for answer in paged),
        "dynamic_cache_first_token_seconds": dynamic_seconds,
        "paged_prefix_cache_first_token_seconds": paged_seconds,
        "first_token_speedup": dynamic_seconds / paged_seconds,
        "first_token_speedup_after_first_question": median(warm) if warm else None,
        "total_speedup": whole,  # decoding included
        "same_tokens": all(each.same_tokens for each in comparisons),
    }


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


def compare(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    cache: PagedPrefixCache,
    prompts: Iterable[tuple[str, Sequence[int]]],
    max_new_tokens: int,
    **options: Any,
) -> Iterator[Comparison]:
    """Answer every prompt twice, when the next result is asked for: with generate's own cache, then with ours.

    Args:
        prompts: what to call each, and its token ids.
        options: of `generate`, besides those of one greedy answer.
    """
    import torch

    options = {**_ONE_GREEDY_ANSWER, **options}
    for number, (question, token_ids) in enumerate(prompts):
        ids = torch.tensor([[*token_ids]], device=model.device)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not number:
            _warm_up(model, prompt, cache, max_new_tokens=min(2, max_new_tokens))
        dynamic = _generate(model, tokenizer, prompt, cache=None, max_new_tokens=max_new_tokens, **options)
        paged = _generate(model, tokenizer, prompt, cache=cache, max_new_tokens=max_new_tokens, **options)
        yield Comparison(question, dynamic, paged)


def _warm_up(model: Model, prompt: Mapping[str, Tensor], cache: PagedPrefixCache, max_new_tokens: int) -> None:
    """Pay for first-time costs outside the clock, with tokens that no question starts with: the prompt, reversed."""
    ids, mask = prompt["input_ids"].flip(1), prompt["attention_mask"]
    short: Any = {"max_new_tokens": max_new_tokens, **_ONE_GREEDY_ANSWER}
    model.generate(input_ids=ids, attention_mask=mask, **short)
    model.generate(input_ids=ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache, **short)


def _generate(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Mapping[str, Tensor],
    *,
    cache: PagedPrefixCache | None,
    **options: Any,
) -> Answer:
    clock = FirstTokenClock()
    num_prompt_tokens = prompt["input_ids"].shape[1]
    started_at = time.perf_counter()
    output = model.generate(**prompt, past_key_values=cache, streamer=clock, pad_token_id=0, **options)
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


def summary(comparisons: Sequence[Comparison], noun: str = "question") -> str:
    """The totals, in three lines; `noun` says of what."""
    of = totals(comparisons)
    warm = of["first_token_speedup_after_first_question"]
    num_different = sum(not each.same_tokens for each in comparisons)
    return (
        f"Time to first token, {len(comparisons)} {noun}s: DynamicCache {of['dynamic_cache_first_token_seconds']:.2f} s, "
        f"PagedPrefixCache {of['paged_prefix_cache_first_token_seconds']:.2f} s: speed-up {of['first_token_speedup']:.1f}x"
        + ("" if warm is None else f", {warm:.1f}x after the first {noun} (median)")
        + f".\nWhole answers: speed-up {of['total_speedup']:.1f}x. Reused {of['reused_tokens']} of "
        f"{of['prompt_tokens']} prompt tokens ({of['reused_tokens'] / of['prompt_tokens']:.0%}).\nSame tokens"
        + (
            f": NO, {num_different} of {len(comparisons)} answers differ."
            if num_different
            else f" for every {noun}: yes."
        )
    )
