"""`generate`: a file of prompts in, a file of completions out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any, Literal

import typer

from ..errors import CacheArgumentError
from ..jobs.journal import finished_before, journal_of, note_command, require_writable
from ..jobs.rows import digest_of, opened, require_prompts
from ..jobs.summary import BatchSummary
from ..store_options import StoreOptions, store_options
from . import loading
from .command import DiskFolder, MaxBytes, terminated_as_interrupted
from .hub import known_folder
from .loading import Device, Dtype, Revision

ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended
_OF_THE_RUN = ("prompts", "model", "revision", "dtype", "device", "workers", "address")  # and not of `generate_all`
_NO_MATTER = ("prompts", "out", "overwrite", "device", "address")  # of what a job gives


def generate(
    context: typer.Context,
    prompts: Annotated[
        Path,
        typer.Argument(help="A file of JSON lines, JSON, CSV, TSV or Parquet (.jsonl, .json, .csv, .tsv, .parquet)."),
    ],
    model: Annotated[str, typer.Option(help="A folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="A file of JSON lines: each row of the input, with its completion.")],
    column: Annotated[
        str, typer.Option(help="Where the prompt is: a text, or a chat as a list of messages.")
    ] = "prompt",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest completion.")] = 128,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts that run at once, at most; by default as many as pay.", show_default=False),
    ] = None,
    order: Annotated[
        Literal["given", "done"], typer.Option(help="Rows as they are given, or as they are done.")
    ] = "given",
    seed: Annotated[int, typer.Option(min=0, help="Of samples, with --do-sample.")] = 0,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a block; prefixes are shared in whole blocks.")
    ] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(min=2, help="The most blocks, in place of --max-bytes.", show_default=False)
    ] = None,
    max_bytes: MaxBytes = None,
    host_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of host memory for evicted blocks, on an accelerator.", show_default=False),
    ] = None,
    disk_folder: DiskFolder = None,
    disk_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most there; half of what is free, if not given.", show_default=False),
    ] = None,
    eviction: Annotated[
        Literal["reuse", "lru"],
        typer.Option(help="What is evicted first: what is seldom used again, or what is least recently used."),
    ] = "reuse",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run on so many workers of Ray, each with a model.", show_default=False)
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster, such as auto; else this machine.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever is in OUT.")] = False,
) -> None:
    """Complete every prompt of a file; what prompts share is computed once.

    Each batch that is done is noted in OUT.journal: the same command resumes where it was stopped or killed. Run once more when all
    are done, it says so and exits with 0.

    Any other option of transformers' generate is given by its name, after PROMPTS: --do-sample --temperature 0.7 --stop-strings '["\\n"]'.

    Exits with 130 after Ctrl-C and after SIGTERM.
    """
    given = {name: value for name, value in context.params.items() if value is not None}
    try:
        with terminated_as_interrupted():
            # without torch, which takes seconds to import
            if str(prompts).startswith("--"):
                raise CacheArgumentError(f"give PROMPTS before options of transformers' generate, such as {prompts}")
            if address is not None and workers is None:
                raise CacheArgumentError("--address is of a Ray cluster; give --workers, too")
            store_options(**{name: given[name] for name in StoreOptions._fields if name in given})
            require_writable(out, prompts)
            finished = None if overwrite else finished_before(out)
            require_prompts(prompts, column, with_room=True)
            loading.require_model(model, revision, dtype)
            asked = _asked(context.args, given)
            if finished and asked and finished.command == asked and finished.job["prompts"] == _digest(prompts, column):
                summary = finished.summary
            else:
                load = partial(loading.load_model, model, revision, dtype, device)
                summary = _complete(load, prompts, context.args, given)
                if asked:
                    note_command(out, asked)
    except KeyboardInterrupt:
        journal = journal_of(out)
        how = "the same command without --overwrite" if overwrite else "the same command"
        done = f" What is done is in {journal}; {how} resumes from there." if journal.exists() else ""
        print(f"hf-paged-cache generate: stopped.{done}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    is_done = 0 < summary.num_prompts == summary.num_done_before
    print(f"{out}: {'done already: ' if is_done else ''}{summary}")


def _asked(options: list[str], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the output follows from besides the prompts, without loading the model: of its files, sizes and times.

    None where it cannot be told: the model is not on this machine, or its weights are elsewhere, too, as an adapter's.
    """
    folder = known_folder(given["model"], given.get("revision"))
    if folder is None or (folder / "adapter_config.json").exists():
        return None
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {
        "options": {name: str(value) for name, value in given.items() if name not in _NO_MATTER},
        "options of generate": options,
        "model": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "versions": [version(package) for package in ("hf-paged-cache", "transformers", "torch")],
    }


def _digest(prompts: Path, column: str) -> str:
    with opened(prompts, column) as rows:
        return digest_of(rows)


def _complete(load: Any, prompts: Path, options: list[str], given: Mapping[str, Any]) -> BatchSummary:
    from hf_paged_cache import generate_all, generate_all_on_ray

    from ..jobs.options import require_names

    generation = options_by_name(options)
    require_names(generation)
    how = {name: value for name, value in given.items() if name not in _OF_THE_RUN} | generation
    print(f"loading {given['model']} ...", file=sys.stderr, flush=True)
    if "workers" in given:
        on = {"num_workers": given["workers"], "address": given.get("address")}
        return generate_all_on_ray(load, prompts, **on, **how).summary
    loaded, tokenizer = load()
    return generate_all(loaded, tokenizer, prompts, **how).summary


def options_by_name(arguments: list[str]) -> dict[str, Any]:
    """`--do-sample --top-p 0.9` as the arguments of a call; a value is JSON, or else a text. `--no-do-sample` is False.

    Raises:
        CacheArgumentError: a value without a name, or a name that neither the command nor `generate` has.

    Examples:
        >>> options_by_name(["--do-sample", "--top-p", "0.9", "--stop-strings", '["a"]', "--eos-token-id=2"])
        {'do_sample': True, 'top_p': 0.9, 'stop_strings': ['a'], 'eos_token_id': 2}
    """
    from transformers import GenerationConfig

    from ..jobs.options import NEED_A_VALUE, REFUSED

    known = {*GenerationConfig().to_dict()}  # type: ignore[no-untyped-call]
    own = {*signature(generate).parameters} - {"context", "prompts"}
    options: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        given = waiting.pop(0)
        if not given.startswith("--"):
            raise CacheArgumentError(f"{given!r} belongs to no option; see --help")
        name, equals, value = given[2:].partition("=")
        if not equals and waiting and not waiting[0].startswith("--"):
            value, equals = waiting.pop(0), "="
        name = name.replace("-", "_")
        if not equals and name in NEED_A_VALUE:
            raise CacheArgumentError(f"{given} needs a value after it")
        if equals:
            options[name] = _value(value)
        else:
            is_off = name.startswith("no_") and not name.startswith("no_repeat")
            name = name.removeprefix("no_") if is_off else name
            options[name] = not is_off
        if name in own or name not in known:
            close = get_close_matches(name, [*(known - REFUSED.keys()), *own], 1)
            meant = f"; did you mean --{close[0].replace('_', '-')}?" if close else "."
            raise CacheArgumentError(f"there is no option {given.partition('=')[0]}{meant} See --help")
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        if fullmatch(r"(\\[nrt])+", text):
            raise CacheArgumentError(
                f"{text} is a backslash and a letter; as JSON it is the character: '\"{text}\"'"
            ) from error
        if text.startswith(("[", "{")):
            raise CacheArgumentError(f"{text} begins as JSON and is none ({error})") from error
        return {"True": True, "False": False, "None": None}.get(text, text)
