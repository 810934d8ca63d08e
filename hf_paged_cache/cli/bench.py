"""Runs the command `bench`: it measures what a model and its prompts would gain from the cache."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from ..errors import CacheArgumentError
from ..jobs.prompts import read_rows
from . import command
from .command import Device, Dtype, Revision
from .comparing import compare, summary
from .questions import QUESTIONS, SHOTS, ask, few_shot_prompt


def bench(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the hub.")],
    prompts: Annotated[
        Path | None,
        typer.Argument(help="A file of JSON lines, CSV or Parquet; without one, questions after one long prompt."),
    ] = None,
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
    if prompts is not None and prompts.is_dir():
        raise CacheArgumentError(f"{prompts} is a folder; give MODEL first, then PROMPTS, a file")
    rows = None if prompts is None else read_rows(prompts, column)  # before torch is imported
    command.require_model(model, revision, dtype)

    from hf_paged_cache import PagedPrefixCache, read_prompts

    loaded, tokenizer = command.load_model(model, revision, dtype, device)
    cache = PagedPrefixCache(loaded)
    texts: Any = rows or [few_shot_prompt(len(SHOTS)) + ask(question) for question in QUESTIONS]
    read = read_prompts(texts, tokenizer, column=column, model=loaded, max_new_tokens=max_new_tokens)
    print("warming up ...", file=sys.stderr, flush=True)
    warnings.filterwarnings("ignore", "PagedPrefixCache: this prompt of")  # prompts come one by one, and are no chat
    started, answered = perf_counter(), []
    for each in compare(cache, tokenizer, read.token_ids, max_new_tokens=max_new_tokens):
        answered.append(each)
        told = (
            f"first token {each['first_token_speedup']:.1f}x  reused {each['reused_tokens']} of {each['prompt_tokens']}"
        )
        print(f"{len(answered)}/{len(read.token_ids)}  {told}", file=sys.stderr, flush=True)
        spent = perf_counter() - started
        if spent > seconds and len(answered) > 1:
            break
    print(f"{len(answered)} of {len(read.token_ids)} prompts, {max_new_tokens} new tokens at most, in {spent:.0f} s.")
    print(summary(answered, "prompt"))
    share = f"{read.num_shared_tokens:,} ({read.num_shared_tokens / read.num_tokens:.0%})"
    shared = f"{share} stand at the beginning of another one, too, in whole blocks"
    print(f"Of the {read.num_tokens:,} tokens of all prompts, {shared}.")
    if str(loaded.dtype) == "torch.float32" and not all(each["same_tokens"] for each in answered):
        raise typer.Exit(1)
