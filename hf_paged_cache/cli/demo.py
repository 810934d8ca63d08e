"""Runs the command `demo`: it asks questions after one long prompt, with `DynamicCache` and with `PagedPrefixCache`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from .comparing import compare, summary, totals
from .demo_model import DEMO_MODEL, load_demo_model
from .questions import QUESTIONS, SHOTS, ask, few_shot_prompt


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder, or a name on the hub. Default: SmolLM2-135M-Instruct.", show_default=False),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=len(QUESTIONS), help="How many questions to ask.")] = 8,
    shots: Annotated[
        int, typer.Option(min=1, max=len(SHOTS), help="Solved examples before each; all are about 1,000 tokens.")
    ] = len(SHOTS),
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=1024, help="The longest answer; it ends at the end of its line.")
    ] = 16,
    in_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Ask questions after one long prompt, each with DynamicCache, then with PagedPrefixCache, and compare.

    Exits with 1 if the tokens differ.
    """
    print("loading the model ...", file=sys.stderr, flush=True)
    loaded, tokenizer = load_demo_model(model)

    from hf_paged_cache import PagedPrefixCache, read_prompts

    cache, asked, shared = PagedPrefixCache(loaded), QUESTIONS[:questions], few_shot_prompt(shots)
    texts = [shared + ask(question) for question in asked]
    ids = read_prompts(texts, tokenizer, model=loaded, max_new_tokens=max_new_tokens).token_ids
    if not in_json:
        of = f"{questions} questions after one prompt of {len(tokenizer(shared)['input_ids'])} tokens"
        print(f"{model or DEMO_MODEL}: {of}, each with DynamicCache, then with PagedPrefixCache.", flush=True)
    print("warming up ...", file=sys.stderr, flush=True)
    answered: list[dict[str, Any]] = []
    for each in compare(cache, tokenizer, ids, max_new_tokens=max_new_tokens, stop_strings=["\n"]):
        number = f"{len(answered) + 1}/{questions}"
        answered.append({"question": asked[len(answered)], **each})
        if not in_json:
            print(
                f"DynamicCache      {number}  first token {each['dynamic_first_seconds'] * 1000:.0f} ms\n"
                f"PagedPrefixCache  {number}  first token {each['paged_first_seconds'] * 1000:.0f} ms"
                f"  {each['first_token_speedup']:.1f}x  reused {each['reused_tokens']} of {each['prompt_tokens']}"
                f"  same tokens: {'yes' if each['same_tokens'] else 'NO'}\n"
                f"                       {answered[-1]['question']}\n                       {each['answer']}",
                flush=True,
            )
    told = {"model": model or DEMO_MODEL, "questions": answered, "totals": totals(answered)}
    print(json.dumps(told, indent=2) if in_json else summary(answered, "question"))
    if not all(each["same_tokens"] for each in answered):
        raise typer.Exit(1)
