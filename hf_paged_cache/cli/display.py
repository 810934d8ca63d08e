"""How a run of the demo is shown: as a table that fills, as plain lines, or as one JSON object. Formatting only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .demo import Answer, Comparison, totals


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
