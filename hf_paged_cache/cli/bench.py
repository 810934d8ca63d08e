"""`bench`: what would be gained, with this model and these prompts?"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .model_options import Device, Dtype, Revision, require_dtype
from .questions import QUESTIONS, SHOTS, ask, few_shot_prompt

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_PROMPTS = 2  # the first fills the cache


def bench(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the hub.")],
    prompts: Annotated[
        Path | None,
        typer.Argument(help="A file of JSON lines, CSV or Parquet; without one, questions behind one long prompt."),
    ] = None,
    column: Annotated[
        str, typer.Option(help="Where the prompt is: a text, or a chat as a list of messages.")
    ] = "prompt",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure.")] = 60,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer prompts one by one, in the order given, each with DynamicCache, then with PagedPrefixCache, for about a minute.

    Ends with the speed-ups, the tokens reused, and how much of all prompts is shared. Exits with 1 if tokens differ in float32.
    """
    from hf_paged_cache import CacheArgumentError

    from ..batch.rows import require_prompts
    from .hub import require_name
    from .refusal import in_one_line

    with in_one_line("bench"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PagedPrefixCache: this prompt of")  # one after the other, and no chat
        if prompts is not None and prompts.is_dir():
            raise CacheArgumentError(f"{prompts} is a folder; give MODEL first, then PROMPTS, a file")
        if prompts is not None:
            require_prompts(prompts, column)
        require_dtype(dtype)
        require_name(model, revision)

        import torch

        from hf_paged_cache import PagedPrefixCache, read_prompts

        from .demo import compare
        from .display import summary
        from .loading import load_model

        print(f"loading {model} ...", file=sys.stderr, flush=True)
        loaded, tokenizer = load_model(model, revision=revision, dtype=dtype, device=device)
        cache = PagedPrefixCache(loaded)
        read = read_prompts(
            _few_shot_prompts() if prompts is None else prompts,
            tokenizer,
            column=column,
            model=loaded,
            max_new_tokens=max_new_tokens,
        )
        started, answered = time.perf_counter(), []
        for each in compare(
            loaded, tokenizer, cache, _inputs(read.token_ids, tokenizer, loaded.device), max_new_tokens
        ):
            answered.append(each)
            _show_progress(
                len(answered), len(read.token_ids), each.speedup, each.paged.reused_tokens, each.paged.prompt_tokens
            )
            if time.perf_counter() - started > seconds and len(answered) >= _LEAST_PROMPTS:
                break
    spent = time.perf_counter() - started
    print(f"{len(answered)} of {len(read.token_ids)} prompts, {max_new_tokens} new tokens at most, in {spent:.0f} s.")
    print(summary(answered, "prompt"))
    share = read.num_shared_tokens / read.num_tokens
    print(
        f"Of the {read.num_tokens:,} tokens of all prompts, {read.num_shared_tokens:,} ({share:.0%}) stand at the beginning of another one, too."
    )
    if loaded.dtype == torch.float32 and not all(each.same_tokens for each in answered):
        raise typer.Exit(1)


def _few_shot_prompts() -> list[str]:
    return [few_shot_prompt(len(SHOTS)) + ask(question) for question in QUESTIONS]


def _inputs(tokens: Sequence[Sequence[int]], tokenizer: Any, device: Any) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    import torch

    for ids in tokens:
        given = torch.tensor([[*ids]], device=device)
        yield shorten(tokenizer.decode(ids[-16:]), 40), {"input_ids": given, "attention_mask": torch.ones_like(given)}


def _show_progress(done: int, total: int, speedup: float, reused: int, prompt_tokens: int) -> None:
    print(
        f"{done}/{total}  first token {speedup:.1f}x  reused {reused} of {prompt_tokens}", file=sys.stderr, flush=True
    )
