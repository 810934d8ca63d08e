"""Answers prompts twice and times them: with a `DynamicCache` a call, then with one `PagedPrefixCache` for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..wording import counted

if TYPE_CHECKING:
    from hf_paged_cache import PagedPrefixCache

_WARM_UP = 1024  # most tokens of the call that is not timed
_TIMES = ("dynamic_first_seconds", "paged_first_seconds", "dynamic_seconds", "paged_seconds")
_SUMMED = ("prompt_tokens", "reused_tokens", *_TIMES)


def compare(
    cache: PagedPrefixCache, tokenizer: Any, prompts: Iterable[Sequence[int]], **options: Any
) -> Iterator[dict[str, Any]]:
    """Answer every prompt, given as token ids, greedily on both sides, each when the next result is asked for.

    One call of each side comes before, and is not timed.

    Args:
        options: options of `generate`.

    Yields:
        The answer, numbers of tokens, whether the tokens are the same, and for each side two times in seconds: until
        the logits of its first token are there, and until its last token.
    """
    from transformers import DynamicCache

    options = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "tokenizer": tokenizer, **options}
    model = cache.store.model
    for number, ids in enumerate(prompts):
        if not number:  # warm up on tokens that no prompt begins with
            for on in (DynamicCache(config=model.config), cache):
                _answer(model, ids[:-_WARM_UP:-1], on, options)
            cache.reset()
            cache.store.reset_prefix_cache()
        plain, dynamic_first, dynamic = _answer(model, ids, DynamicCache(config=model.config), options)
        tokens, paged_first, paged = _answer(model, ids, cache, options)
        yield {
            "answer": (tokenizer.decode(tokens, skip_special_tokens=True).strip().splitlines() or [""])[0],
            "prompt_tokens": len(ids),
            "reused_tokens": cache.last_call.reused_tokens,
            "new_tokens": len(tokens),
            "same_tokens": tokens == plain,
            **dict(zip(_TIMES, (dynamic_first, paged_first, dynamic, paged), strict=True)),
            "first_token_speedup": dynamic_first / paged_first,
        }


def _answer(model: Any, ids: Sequence[int], cache: Any, options: dict[str, Any]) -> tuple[list[int], float, float]:
    """Return new tokens, and the seconds until the first and until the last of them."""
    import torch

    seconds: list[float] = []

    def clock(_: Any, scores: Any) -> Any:
        scores[0, 0].item()  # waits for the device
        seconds.append(perf_counter() - start)
        return scores

    inputs = torch.tensor([[*ids]], device=model.device)
    given = {"attention_mask": torch.ones_like(inputs), "past_key_values": cache, "logits_processor": [clock]}
    start = perf_counter()
    tokens = model.generate(inputs, **given, **options)[0, len(ids) :].tolist()
    return tokens, seconds[0], perf_counter() - start


def totals(answered: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return sums over all prompts, also the first one, which finds nothing in the cache."""
    of = {name: sum(each[name] for each in answered) for name in _SUMMED}
    later = [each["first_token_speedup"] for each in answered[1:]]
    return of | {
        "first_token_speedup": of["dynamic_first_seconds"] / of["paged_first_seconds"],
        "first_token_speedup_after_first_question": median(later) if later else None,
        "total_speedup": of["dynamic_seconds"] / of["paged_seconds"],
        "same_tokens": all(each["same_tokens"] for each in answered),
    }


def summary(answered: Sequence[dict[str, Any]], noun: str) -> str:
    """Return the totals in three lines; the noun is what one prompt is called."""
    of, num_different = totals(answered), sum(not each["same_tokens"] for each in answered)
    later = of["first_token_speedup_after_first_question"]
    after = "" if later is None else f", {later:.1f}x after the first {noun} (median)"
    differ = f": NO, {num_different} of {len(answered)} answers differ."
    return (
        f"Time to first token, {counted(len(answered), noun)}: DynamicCache {of['dynamic_first_seconds']:.2f} s, "
        f"PagedPrefixCache {of['paged_first_seconds']:.2f} s: speed-up {of['first_token_speedup']:.1f}x{after}.\n"
        f"Whole answers: speed-up {of['total_speedup']:.1f}x. Reused {of['reused_tokens']} of {of['prompt_tokens']} "
        f"prompt tokens ({of['reused_tokens'] / of['prompt_tokens']:.0%}).\n"
        f"Same tokens{differ if num_different else f' for every {noun}: yes.'}"
    )
