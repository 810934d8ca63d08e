"""Runs the command `generate`: it reads a file of prompts and writes a file of completions."""

from __future__ import annotations

import json
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CacheArgumentError
from ..jobs.job import load_and_complete, run_job, run_on_ray
from ..jobs.options import FLAGS, How
from ..store_options import store_options
from . import command
from .command import Device, DiskFolder, Dtype, MaxBytes, Revision

ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}
_INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended
_OF_A_MODEL = ("*.safetensors", "*.bin", "*config.json", "tokenizer*")  # files; a job may write others beside them


def generate(
    context: typer.Context,
    prompts: Annotated[Path, typer.Argument(help="A file of JSON lines, CSV or Parquet (.jsonl, .csv, .parquet).")],
    model: Annotated[str, typer.Option(help="A folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="A file of JSON lines: each row, with its index and its completion.")],
    column: Annotated[
        str, typer.Option(help="Where the prompt is: a text, or a chat as a list of messages.")
    ] = "prompt",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest completion.")] = 128,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts that run at once, at most; by default as many as pay.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of samples, with --do-sample.")] = 0,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    max_bytes: MaxBytes = None,
    disk_folder: DiskFolder = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run on so many workers of Ray, each with a model.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster, such as auto; else this machine.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever is in OUT.")] = False,
) -> None:
    """Complete every prompt of a file; what prompts share is computed once.

    Each batch that is done is written to OUT: the same command resumes where it was stopped or killed. When all are
    done, it says so.

    Any other option of transformers' generate, and of a PagedPrefixCache, is given by its name, after PROMPTS:
    --do-sample --temperature 0.7 --stop-strings '["\\n"]' --block-size 32.

    Exits with 130 after Ctrl-C.
    """
    if str(prompts).startswith("--"):
        raise CacheArgumentError(f"give PROMPTS before options of transformers' generate, such as {prompts}")
    if address is not None and workers is None:
        raise CacheArgumentError("--address is of a Ray cluster; give --workers, too")
    store_options(max_bytes=max_bytes)  # refuses the 8 of "8 GB" before its GB is read as an option
    options = {"max_bytes": max_bytes, "disk_folder": disk_folder, **options_by_name(context.args)}
    found = (path.stat() for each in _OF_A_MODEL for path in sorted(Path(model).expanduser().glob(each)))
    files = sha256(repr([(each.st_size, each.st_mtime_ns) for each in found]).encode()).hexdigest()
    facts = {"model": model, "revision": revision, "dtype": dtype, "model files": files[:16]}
    how = How(facts, out, column, batch_size, max_new_tokens, seed, overwrite, options=options)
    command.require_model(model, revision, dtype)
    load = partial(command.load_model, model, revision, dtype, device)
    try:
        if workers is None:
            summary = run_job(partial(load_and_complete, load, how), prompts, how).summary
        else:
            summary = run_on_ray(load, prompts, how, workers, address).summary
    except KeyboardInterrupt:
        again = "the same command without --overwrite" if overwrite else "the same command"
        done = f" What is done is in {out}; {again} resumes." if out.exists() else ""
        print(f"hf-paged-cache generate: stopped.{done}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    print(f"{out}: {summary}")


def options_by_name(arguments: list[str]) -> dict[str, Any]:
    """Return `--do-sample --top-p 0.9` as the arguments of a call. `--no-do-sample` is False.

    Examples:
        >>> options_by_name(["--do-sample", "--top-p", "0.9", "--stop-strings", '["a"]', "--eos-token-id=2"])
        {'do_sample': True, 'top_p': 0.9, 'stop_strings': ['a'], 'eos_token_id': 2}
    """
    options: dict[str, Any] = {}
    waiting = [*arguments]
    while waiting:
        given = waiting.pop(0)
        if not given.startswith("--"):
            raise CacheArgumentError(f"{given!r} belongs to no option; see --help")
        name, equals, value = given[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            options[name] = _value(value)
        elif waiting and not waiting[0].startswith("--"):
            options[name] = _value(waiting.pop(0))
        elif name.removeprefix("no_") in FLAGS:
            options[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            raise CacheArgumentError(f"{given} needs a value after it")
    return options


def _value(text: str) -> Any:
    """Return a value that is given as JSON, or as a plain text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError as error:
        if text.startswith(("\\", "[", "{")):
            raise CacheArgumentError(f"""{text} is no JSON ({error}); a line break is given as '"\\\\n"'""") from error
        return text
