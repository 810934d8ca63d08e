"""How a run of the demo is shown: live on a terminal, as plain lines without one, or as one JSON object.

Owns formatting only; all numbers come from `demo.Report`. Everything goes to stdout, and in JSON nothing but the object does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .demo import Answer, Comparison, Display, Report


class LiveDisplay:
    """A table that fills while the questions are answered, a progress bar under it, and the totals at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._questions: Sequence[str] = ()
        self._dynamic: dict[int, Answer] = {}  # question's index -> the first side's answer
        self._compared: dict[int, Comparison] = {}  # question's index -> both answers

    def __enter__(self) -> Display:
        self._live.start()
        self._live.update(Text("warming up ..."))
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def started(self, model_name: str, questions: Sequence[str], shared_tokens: int) -> None:
        self._live.console.print(_headline(model_name, questions, shared_tokens), highlight=False)
        self._questions = questions
        self._task = self._progress.add_task("DynamicCache", total=2 * len(questions))
        self._show()

    def answered_with_dynamic(self, index: int, answer: Answer) -> None:
        self._dynamic[index] = answer
        description = "DynamicCache" if index + 1 < len(self._questions) else "PagedPrefixCache"
        self._progress.update(self._task, advance=1, description=description)
        self._show()

    def answered_with_paged(self, index: int, comparison: Comparison) -> None:
        self._compared[index] = comparison
        self._progress.advance(self._task)
        self._show()

    def finished(self, report: Report) -> None:
        self._live.update(self._table())
        self._live.stop()
        for line in summary(report):
            self._console.print(line, style="bold" if line.startswith("Time to first token") else "", highlight=False)

    def _show(self) -> None:
        self._live.update(Group(self._table(), self._progress))

    def _table(self) -> Table:
        table = Table(title="time to first token", title_style="", caption_style="")
        table.add_column("question and answer", ratio=1)
        for heading in ("Dynamic\nCache", "Paged\nPrefixCache", "tokens\nreused", "speed\n-up", "same\ntokens"):
            table.add_column(heading, justify="right", no_wrap=True)
        for index, question in enumerate(self._questions):
            answer, comparison = self._dynamic.get(index), self._compared.get(index)
            if answer is None:
                table.add_row(Text(question, style="dim"))
                continue
            said = Text.assemble(f"{question}\n", (answer.text, "green"))
            if comparison is None:
                table.add_row(said, _milliseconds(answer))
            else:
                paged = comparison.paged
                reused = f"{paged.reused_tokens} of {paged.prompt_tokens}"
                same = Text("yes") if comparison.same_tokens else Text("NO", style="bold red")
                table.add_row(
                    said, _milliseconds(answer), _milliseconds(paged), reused, f"{comparison.speedup:.1f}x", same
                )
        return table


class PlainDisplay:
    """One line for every answer, as it comes."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held open."""

    def started(self, model_name: str, questions: Sequence[str], shared_tokens: int) -> None:
        _say(_headline(model_name, questions, shared_tokens))
        self._num_questions = len(questions)

    def answered_with_dynamic(self, index: int, answer: Answer) -> None:
        _say(f"DynamicCache      {index + 1}/{self._num_questions}  first token {_milliseconds(answer)}")

    def answered_with_paged(self, index: int, comparison: Comparison) -> None:
        paged = comparison.paged
        _say(
            f"PagedPrefixCache  {index + 1}/{self._num_questions}  first token {_milliseconds(paged)}"
            f"  {comparison.speedup:.1f}x  reused {paged.reused_tokens} of {paged.prompt_tokens}"
            f"  same tokens: {_yes(comparison.same_tokens)}"
        )
        _say(f"                       {comparison.question}  {paged.text}")

    def finished(self, report: Report) -> None:
        for line in summary(report):
            _say(line)


class JsonDisplay:
    """Silent until the end, then the whole report as one JSON object; times in seconds."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held open."""

    def started(self, model_name: str, questions: Sequence[str], shared_tokens: int) -> None: ...
    def answered_with_dynamic(self, index: int, answer: Answer) -> None: ...
    def answered_with_paged(self, index: int, comparison: Comparison) -> None: ...

    def finished(self, report: Report) -> None:
        _say(json.dumps(as_json(report), indent=2))


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain dictionaries and lists, ready for `json.dumps`."""
    return {
        "model": report.model_name,
        "versions": _versions(),
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
            for each in report.comparisons
        ],
        "totals": {
            "prompt_tokens": report.prompt_tokens,
            "reused_tokens": report.reused_tokens,
            "dynamic_cache_first_token_seconds": report.dynamic_first_token_seconds,
            "paged_prefix_cache_first_token_seconds": report.paged_first_token_seconds,
            "first_token_speedup": report.speedup,
            "first_token_speedup_after_first_question": report.warm_speedup,
            "total_speedup": report.total_speedup,
            "same_tokens": report.same_tokens,
        },
    }


def summary(report: Report) -> list[str]:
    """The totals, a line each."""
    warm = "" if report.warm_speedup is None else f", {report.warm_speedup:.1f}x after the first question (median)"
    num_different = sum(not each.same_tokens for each in report.comparisons)
    return [
        f"Time to first token, {len(report.comparisons)} questions: DynamicCache {report.dynamic_first_token_seconds:.2f} s, "
        f"PagedPrefixCache {report.paged_first_token_seconds:.2f} s: speed-up {report.speedup:.1f}x{warm}.",
        f"Whole answers: speed-up {report.total_speedup:.1f}x. "
        f"Reused {report.reused_tokens} of {report.prompt_tokens} prompt tokens ({report.reused_tokens / report.prompt_tokens:.0%}).",
        "Same tokens for every question: yes."
        if report.same_tokens
        else f"Same tokens: NO, {num_different} of {len(report.comparisons)} answers differ.",
    ]


def _headline(model_name: str, questions: Sequence[str], shared_tokens: int) -> str:
    return f"{model_name}: {len(questions)} questions behind one prompt of {shared_tokens} tokens, each with DynamicCache, then with PagedPrefixCache."


def _times(answer: Answer) -> dict[str, float]:
    return {"first_token_seconds": answer.first_token_seconds, "total_seconds": answer.total_seconds}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    import hf_paged_cache

    return {
        "hf_paged_cache": hf_paged_cache.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _milliseconds(answer: Answer) -> str:
    return f"{answer.first_token_seconds * 1000:.0f} ms"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _say(line: str) -> None:
    print(line, flush=True)
