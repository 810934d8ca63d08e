"""`demo`: the same questions after one long prompt, shown as a table that fills, as plain lines, or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import CacheArgumentError
from ..jobs.rows import RowError
from .comparing import Answer, Comparison, Model, compare, summary, totals
from .questions import QUESTIONS, SHOTS, ask, few_shot_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder, or a name on the hub. Default: SmolLM2-135M-Instruct.", show_default=False),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=len(QUESTIONS), help="How many questions to ask.")] = 8,
    shots: Annotated[
        int,
        typer.Option(
            min=1, max=len(SHOTS), help="Solved examples before each question; all together are about 1,000 tokens."
        ),
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
    from .demo_model import DEMO_MODEL, load_demo_model

    console, name, asked = Console(), model or DEMO_MODEL, QUESTIONS[:questions]
    if not in_json:
        print("loading the model ...", file=sys.stderr, flush=True)
    loaded, tokenizer = load_demo_model(model)
    if model is None and not in_json:
        print(f"the model is in {loaded.config.name_or_path}", file=sys.stderr, flush=True)
    comparisons = run_demo(loaded, tokenizer, questions=asked, num_shots=shots, max_new_tokens=max_new_tokens)
    if in_json:
        answered = list(comparisons)
        print(json.dumps(as_json(name, answered), indent=2))
    else:
        of = f"{questions} questions after one prompt of {len(tokenizer(few_shot_prompt(shots))['input_ids'])} tokens"
        print(f"{name}: {of}, each with DynamicCache, then with PagedPrefixCache.", flush=True)
        is_table = console.is_terminal
        answered = show_table(comparisons, asked, console) if is_table else show_lines(comparisons, questions)
        print(summary(answered))
    if not all(each.same_tokens for each in answered):
        raise typer.Exit(1)


def run_demo(
    model: Model, tokenizer: PreTrainedTokenizerBase, *, questions: Sequence[str], num_shots: int, max_new_tokens: int
) -> Iterator[Comparison]:
    """Ask every question twice, when the next result is asked for; what cannot be run is refused at once.

    Effects: runs `2 * len(questions) + 2` calls of `generate`, and leaves the cache's hooks on the model.

    Raises:
        UnsupportedModelError: from `PagedPrefixCache`.
        CacheArgumentError: the tokenizer is another model's, or prompt and answer are longer than the model's positions.
    """
    from hf_paged_cache import PagedPrefixCache, read_prompts

    cache = PagedPrefixCache(model)  # first: a model that is refused needs no advice on shots
    texts = [few_shot_prompt(num_shots) + ask(question) for question in questions]
    try:
        read = read_prompts(texts, tokenizer, model=model, max_new_tokens=max_new_tokens)
    except RowError as error:
        raise CacheArgumentError(f"question {error.number + 1}: {error.problem}; or ask with fewer --shots") from error
    asked = zip(questions, read.token_ids, strict=True)
    return compare(model, tokenizer, cache, asked, max_new_tokens, **_ends(model, tokenizer))


def _ends(model: Model, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """As an option of `generate`, the model's own ends of sequence, and the end of the line: an answer is one line."""
    own = model.generation_config.eos_token_id
    ids = [] if own is None else [own] if isinstance(own, int) else list(own)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    if len(newline) == 1 and newline[0] != tokenizer.unk_token_id:
        ids += newline
    return {"eos_token_id": ids} if ids else {}


def show_table(comparisons: Iterable[Comparison], questions: Sequence[str], console: Console) -> list[Comparison]:
    """Fill a table on a terminal as the answers come; returns them."""
    shown: list[Comparison] = []
    with Live(_table(shown, questions), console=console) as live:
        for comparison in comparisons:
            shown.append(comparison)
            live.update(_table(shown, questions))
    return shown


def _table(shown: Sequence[Comparison], questions: Sequence[str]) -> Table:
    table = Table(title="time to first token", title_style="")
    table.add_column("question and answer", ratio=1)
    for heading in ("Dynamic\nCache", "Paged\nPrefixCache", "tokens\nreused", "speed\n-up", "same\ntokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in shown:
        table.add_row(
            Text.assemble(f"{each.question}\n", (each.paged.text, "green")),
            _milliseconds(each.dynamic),
            _milliseconds(each.paged),
            f"{each.paged.reused_tokens} of {each.paged.prompt_tokens}",
            f"{each.speedup:.1f}x",
            "yes" if each.same_tokens else Text("NO", style="bold red"),
        )
    for question in questions[len(shown) :]:
        table.add_row(Text(question, style="dim"))
    return table


def show_lines(comparisons: Iterable[Comparison], num_questions: int) -> list[Comparison]:
    """Print three lines for each question as the answers come; returns them."""
    shown = []
    for number, each in enumerate(comparisons, 1):
        shown.append(each)
        counted = f"{number}/{num_questions}  first token"
        print(
            f"DynamicCache      {counted} {_milliseconds(each.dynamic)}\n"
            f"PagedPrefixCache  {counted} {_milliseconds(each.paged)}  {each.speedup:.1f}x"
            f"  reused {each.paged.reused_tokens} of {each.paged.prompt_tokens}"
            f"  same tokens: {'yes' if each.same_tokens else 'NO'}\n"
            f"                       {each.question}  {each.paged.text}",
            flush=True,
        )
    return shown


def as_json(model_name: str, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The whole run as plain dictionaries and lists, ready for `json.dumps`; times in seconds."""
    import torch
    import transformers

    import hf_paged_cache

    return {
        "model": model_name,
        "versions": {module.__name__: module.__version__ for module in (hf_paged_cache, torch, transformers)},
        "questions": [
            {
                "question": each.question,
                "answer": each.paged.text,
                "prompt_tokens": each.paged.prompt_tokens,
                "reused_tokens": each.paged.reused_tokens,
                "new_tokens": len(each.paged.token_ids),
                "dynamic_cache": _times(each.dynamic),
                "paged_prefix_cache": _times(each.paged),
                "same_tokens": each.same_tokens,
            }
            for each in comparisons
        ],
        "totals": totals(comparisons),
    }


def _times(answer: Answer) -> dict[str, float]:
    return {"first_token_seconds": answer.first_token_seconds, "total_seconds": answer.total_seconds}


def _milliseconds(answer: Answer) -> str:
    return f"{answer.first_token_seconds * 1000:.0f} ms"
