"""The command's arguments, and what each subcommand does with them."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from .bench import bench
from .doctor import doctor
from .generate import ANY_OPTION, generate
from .questions import QUESTIONS, SHOTS, few_shot_prompt
from .saved import load, save

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(doctor)
app.command()(bench)
app.command()(save)
app.command()(load)
app.command(context_settings=ANY_OPTION)(generate)


def _print_version(wanted: bool) -> None:
    if wanted:
        import hf_paged_cache

        print(hf_paged_cache.__version__)
        raise typer.Exit


@app.callback()
def hf_paged_cache(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """PagedPrefixCache: a cache for generate that computes a prompt's known beginning only once."""


@app.command()
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
    """Ask questions behind one long prompt, each with DynamicCache, then with PagedPrefixCache, and compare.

    Exits with 1 if the tokens differ.
    """
    from .demo import run_demo
    from .demo_model import DEMO_MODEL, load_demo_model
    from .display import as_json, show_lines, show_table, summary
    from .refusal import in_one_line

    console, name, asked = Console(), model or DEMO_MODEL, QUESTIONS[:questions]
    if not in_json:
        print("loading the model ...", file=sys.stderr, flush=True)
    with in_one_line("demo"):
        loaded, tokenizer = load_demo_model(model)
        comparisons = run_demo(loaded, tokenizer, questions=asked, num_shots=shots, max_new_tokens=max_new_tokens)
        if in_json:
            answered = list(comparisons)
            print(json.dumps(as_json(name, answered), indent=2))
        else:
            num_shared = len(tokenizer(few_shot_prompt(shots))["input_ids"])
            print(
                f"{name}: {questions} questions behind one prompt of {num_shared} tokens, each with DynamicCache, then with "
                "PagedPrefixCache.",
                flush=True,
            )
            answered = (
                show_table(comparisons, asked, console) if console.is_terminal else show_lines(comparisons, questions)
            )
            print(summary(answered))
    if not all(each.same_tokens for each in answered):
        raise typer.Exit(1)
