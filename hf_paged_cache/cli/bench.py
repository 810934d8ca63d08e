"""Answers prompts with `DynamicCache` and with `PagedPrefixCache`, and times both; runs the command `bench`."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..errors import CacheArgumentError
from ..jobs.order import ordered
from ..jobs.prompts import read_rows, tokenized
from ..wording import counted
from . import command
from .command import Device, Dtype, Revision

if TYPE_CHECKING:
    from hf_paged_cache import PagedPrefixCache

_WARM_UP = 1024  # most tokens of the call that is not timed


class Compared(NamedTuple):
    """`Compared` is one prompt, answered with both caches: seconds to the first token, and to the last one."""

    dynamic_first: float
    paged_first: float
    dynamic: float
    paged: float
    prompt_tokens: int
    reused_tokens: int
    same_tokens: bool


def bench(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the hub.")],
    prompts: Annotated[Path, typer.Argument(help="A file of JSON lines, CSV or Parquet.")],
    column: Annotated[
        str, typer.Option(help="Where the prompt is: a text, or a chat as a list of messages.")
    ] = "prompt",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure; two prompts at least.")] = 60,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer prompts one by one, in the order given, each with DynamicCache, then with PagedPrefixCache, for about a
    minute.

    Ends with the speed-ups, the tokens reused, and how much of all prompts is shared. Exits with 1 if tokens differ in
    float32.
    """
    if prompts.is_dir():
        raise CacheArgumentError(f"{prompts} is a folder; the order is MODEL PROMPTS")
    rows = dict(enumerate(read_rows(prompts, column)))  # before torch is imported
    command.require_model(model, revision, dtype)

    from hf_paged_cache import PagedPrefixCache

    loaded, tokenizer = command.load_model(model, revision, dtype, device)
    ids = tokenized(rows, column, tokenizer, loaded.config, max_new_tokens)
    warnings.filterwarnings("ignore", "PagedPrefixCache: this prompt of")  # prompts come one by one, and are no chat
    cache = PagedPrefixCache(loaded)
    is_same = measure(cache, tokenizer, ids, "prompt", seconds=seconds, max_new_tokens=max_new_tokens)
    num_tokens = sum(map(len, ids))
    num_shared = num_tokens - sum(each.num_computed for each in ordered(ids))
    share = f"{num_shared:,} of {num_tokens:,} prompt tokens ({num_shared / num_tokens:.0%}) can be shared"
    print(f"All {counted(len(ids), 'prompt')}: {share}.")
    if str(loaded.dtype) == "torch.float32" and not is_same:
        raise typer.Exit(1)


def measure(
    cache: PagedPrefixCache,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    noun: str,
    *,
    seconds: float = math.inf,
    titles: Sequence[str] = (),
    **options: Any,
) -> bool:
    """Answer prompts greedily with both caches, print how long each took, and return whether all tokens are the same.

    No prompt begins after so many seconds, but for the second one. One call of each side comes before, and is not
    timed. A first token counts once its logits are there.
    """
    from transformers import DynamicCache

    options = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "tokenizer": tokenizer, **options}
    model, answered = cache.store.model, list[Compared]()
    print("warming up ...", file=sys.stderr, flush=True)
    for on in (DynamicCache(config=model.config), cache):
        _answer(model, prompts[0][:-_WARM_UP:-1], on, options)  # tokens that no prompt begins with
    cache.reset()
    cache.store.reset_prefix_cache()
    start = perf_counter()
    for ids in prompts:
        plain, first, dynamic = _answer(model, ids, DynamicCache(config=model.config), options)
        tokens, paged_first, paged = _answer(model, ids, cache, options)
        reused, is_same = cache.last_call.reused_tokens, tokens == plain
        answered.append(Compared(first, paged_first, dynamic, paged, len(ids), reused, is_same))
        number = f"{len(answered)}/{len(prompts)}"
        text = (tokenizer.decode(tokens, skip_special_tokens=True).strip().splitlines() or [""])[0]
        print(
            f"DynamicCache      {number}  first token {first * 1000:.0f} ms\n"
            f"PagedPrefixCache  {number}  first token {paged_first * 1000:.0f} ms  {first / paged_first:.1f}x  "
            f"reused {reused} of {len(ids)}  same tokens: {'yes' if is_same else 'NO'}",
            *titles[len(answered) - 1 : len(answered)],
            text,
            sep=f"\n{'':23}",
            flush=True,
        )
        if perf_counter() - start > seconds and len(answered) > 1:
            break
    if len(answered) < len(prompts):
        print(f"Stopped after {len(answered)} of {counted(len(prompts), noun)}: {seconds:g} s are over (--seconds).")
    print(_summary(answered, noun))
    return all(each.same_tokens for each in answered)


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


def _summary(answered: Sequence[Compared], noun: str) -> str:
    """Return what all answers show, in three lines; also the first one counts, which finds nothing in the cache."""
    sums = [sum(each) for each in zip(*(one[:6] for one in answered), strict=True)]
    first, paged_first, dynamic, paged, prompt, reused = sums
    later = [each.dynamic_first / each.paged_first for each in answered[1:]]
    after = f", {median(later):.1f}x after the first {noun} (median)" if later else ""
    num_different = sum(not each.same_tokens for each in answered)
    differ = (
        f": NO, {num_different} of {len(answered)} answers differ." if num_different else f" for every {noun}: yes."
    )
    return (
        f"Time to first token, {counted(len(answered), noun)}: DynamicCache {first:.2f} s, "
        f"PagedPrefixCache {paged_first:.2f} s: speed-up {first / paged_first:.1f}x{after}.\n"
        f"Whole answers: speed-up {dynamic / paged:.1f}x. Reused {reused} of {prompt} prompt tokens "
        f"({reused / prompt:.0%}).\nSame tokens{differ}"
    )
