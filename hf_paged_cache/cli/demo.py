"""Runs the command `demo`: it asks questions after one long prompt, with `DynamicCache` and with `PagedPrefixCache`.

The questions, and the solved examples before every question, are in questions.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..jobs.prompts import tokenized
from .bench import measure
from .demo_model import DEMO_MODEL, load_demo_model

_DATA = json.loads(Path(__file__).with_name("questions.json").read_text("utf-8"))
SHOTS: list[list[str]] = _DATA["shots"]  # question and answer; all are about 1,000 tokens
QUESTIONS: list[str] = _DATA["questions"]


def few_shot_prompt(num_shots: int) -> str:
    """Return the instruction and the first `num_shots` solved examples, which all questions share."""
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n" for question, answer in SHOTS[:num_shots])
    return f"Answer each question in one short sentence.\n{shots}"


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
) -> None:
    """Ask questions after one long prompt, each with DynamicCache, then with PagedPrefixCache, and compare.

    Exits with 1 if the tokens differ.
    """
    print("loading the model ...", file=sys.stderr, flush=True)
    loaded, tokenizer = load_demo_model(model)

    from hf_paged_cache import PagedPrefixCache

    cache, asked, shared = PagedPrefixCache(loaded), QUESTIONS[:questions], few_shot_prompt(shots)
    rows = {number: {"prompt": f"{shared}Question: {question}\nAnswer:"} for number, question in enumerate(asked)}
    ids = tokenized(rows, "prompt", tokenizer, loaded.config, max_new_tokens)
    of = f"{questions} questions after one prompt of {len(tokenizer(shared)['input_ids'])} tokens"
    print(f"{model or DEMO_MODEL}: {of}, each with DynamicCache, then with PagedPrefixCache.", flush=True)
    options: Any = {"max_new_tokens": max_new_tokens, "stop_strings": ["\n"]}
    is_same = measure(cache, tokenizer, ids, "question", titles=asked, **options)
    print(f"More of this model: hf-paged-cache doctor {loaded.name_or_path}")
    if not is_same:
        raise typer.Exit(1)
