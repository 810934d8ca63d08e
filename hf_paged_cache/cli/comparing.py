"""Prompts answered twice and timed: with generate's own cache, then with ours.

Prints nothing. Time to first token ends when its logits are there, on both sides. Each call of the first side has a `DynamicCache` of
its own; all calls of the second side share one `PagedPrefixCache`, whose first call computes the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_paged_cache import PagedPrefixCache

_ONE_GREEDY_ANSWER = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "stop_strings": None}
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
    from ..jobs.calls import BatchCalls
    from ..jobs.options import How

    how = How(max_new_tokens=max_new_tokens, options={**_ONE_GREEDY_ANSWER, **options})
    calls = BatchCalls(model, tokenizer, how, cache)

    def answer(token_ids: Sequence[int], cache: PagedPrefixCache | None) -> Answer:
        done = calls.answer([0], [token_ids], cache)
        return Answer(
            text=(done.texts[0].strip().splitlines() or [""])[0],
            token_ids=tuple(done.token_ids[0]),
            prompt_tokens=len(token_ids),
            reused_tokens=0 if cache is None else cache.last_call.reused_tokens,
            first_token_seconds=done.first_token_seconds,
            total_seconds=done.seconds,
        )

    for number, (question, token_ids) in enumerate(prompts):
        if not number:  # first-time costs stay outside the clock, on tokens that no question starts with
            short, other = min(2, max_new_tokens), token_ids[::-1]
            calls.answer([0], [other], None, max_new_tokens=short)
            calls.answer([0], [other[:8]], cache, max_new_tokens=short)
        yield Comparison(question, answer(token_ids, None), answer(token_ids, cache))


def summary(comparisons: Sequence[Comparison], noun: str = "question") -> str:
    """The totals, in three lines; `noun` says of what."""
    of = totals(comparisons)
    warm = of["first_token_speedup_after_first_question"]
    num_different = sum(not each.same_tokens for each in comparisons)
    differ = f": NO, {num_different} of {len(comparisons)} answers differ."
    same = differ if num_different else f" for every {noun}: yes."
    return (
        f"Time to first token, {len(comparisons)} {noun}s: DynamicCache {of['dynamic_cache_first_token_seconds']:.2f} s, "
        f"PagedPrefixCache {of['paged_prefix_cache_first_token_seconds']:.2f} s: speed-up {of['first_token_speedup']:.1f}x"
        + ("" if warm is None else f", {warm:.1f}x after the first {noun} (median)")
        + f".\nWhole answers: speed-up {of['total_speedup']:.1f}x. Reused {of['reused_tokens']} of "
        f"{of['prompt_tokens']} prompt tokens ({of['reused_tokens'] / of['prompt_tokens']:.0%}).\nSame tokens{same}"
    )
