"""`bench`: what would be gained, with this model and these prompts?"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights, such as bfloat16; as they are on the disk, if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to run, such as cuda; an accelerator if there is one.", show_default=False)
    ] = None,
) -> None:
    """Answer prompts one by one, in the order given, each with DynamicCache, then with PagedPrefixCache, for about a minute.

    Ends with the speed-ups, the tokens reused, and how much of all prompts is shared. Exits with 1 if tokens differ in float32.
    """
    import torch

    from ..batch.prefix_tree import num_shared_tokens
    from ..batch_job import require_positions
    from ..cache import PagedPrefixCache
    from ..errors import PagedCacheError
    from .demo import compare
    from .display import summary
    from .loading import load_model

    try:
        if prompts is not None and not prompts.is_file():
            raise typer.BadParameter(f"there is no file {prompts}", param_hint="PROMPTS")
        print(f"loading {model} ...", file=sys.stderr, flush=True)
        loaded, tokenizer = load_model(model, dtype=dtype, device=device)
        cache = PagedPrefixCache(loaded)
        tokens = _tokens(prompts, column, tokenizer)
        require_positions(loaded, tokens, max_new_tokens)
        started, answered = time.perf_counter(), []
        for each in compare(loaded, tokenizer, cache, _inputs(tokens, tokenizer, loaded.device), max_new_tokens):
            answered.append(each)
            _show_progress(len(answered), len(tokens), each.speedup, each.paged.reused_tokens, each.paged.prompt_tokens)
            if time.perf_counter() - started > seconds and len(answered) >= _LEAST_PROMPTS:
                break
    except (PagedCacheError, OSError) as error:
        print(f"hf-paged-cache bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    spent, num_tokens = time.perf_counter() - started, sum(map(len, tokens))
    shared = num_shared_tokens(tokens, block_size=cache.store.blocks.block_size)
    print(f"{len(answered)} of {len(tokens)} prompts, {max_new_tokens} new tokens at most, in {spent:.0f} s.")
    print(summary(answered).replace("questions", "prompts").replace("question", "prompt"))
    print(
        f"Of the {num_tokens:,} tokens of all prompts, {shared:,} ({shared / num_tokens:.0%}) begin another prompt, too."
    )
    if loaded.dtype == torch.float32 and not all(each.same_tokens for each in answered):
        raise typer.Exit(1)


def _tokens(prompts: Path | None, column: str, tokenizer: Any) -> list[Sequence[int]]:
    """Token ids of every prompt."""
    if prompts is None:
        shared = few_shot_prompt(len(SHOTS))
        return [tokenizer(shared + ask(question))["input_ids"] for question in QUESTIONS]
    from ..batch.rows import opened
    from ..batch_job import tokenized
    from ..errors import CacheArgumentError

    with opened(prompts, column) as rows:
        if not len(rows):
            raise CacheArgumentError(f"{prompts} has no rows")
        return list(tokenized(rows, column, tokenizer))


def _inputs(tokens: Sequence[Sequence[int]], tokenizer: Any, device: Any) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    import torch

    for ids in tokens:
        given = torch.tensor([[*ids]], device=device)
        yield shorten(tokenizer.decode(ids[-16:]), 40), {"input_ids": given, "attention_mask": torch.ones_like(given)}


def _show_progress(done: int, total: int, speedup: float, reused: int, prompt_tokens: int) -> None:
    print(
        f"{done}/{total}  first token {speedup:.1f}x  reused {reused} of {prompt_tokens}", file=sys.stderr, flush=True
    )
