"""`generate`: a file of prompts in, a file of completions out."""

from __future__ import annotations

import json
import sys
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from inspect import signature
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any

import typer

from .model_options import Device, Dtype, Mode, Revision, permissions_of, require_dtype

ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended


class Attention(StrEnum):
    """How keys and values are read."""

    CONTIGUOUS = "contiguous"
    GATHER = "gather"


class Order(StrEnum):
    """Of the rows in the output."""

    GIVEN = "given"
    DONE = "done"


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
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run at once, at most.")] = 8,
    order: Annotated[Order, typer.Option(help="Rows as they are given, or as they are done.")] = Order.GIVEN,
    seed: Annotated[int, typer.Option(min=0, help="Of samples, with --do-sample.")] = 0,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a block; prefixes are shared in whole blocks.")
    ] = 16,
    num_blocks: Annotated[int | None, typer.Option(min=2, help="The most blocks.", show_default=False)] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Instead, the most memory of keys and values, such as 4GB or 4GiB; half of what is free, if neither is given.",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        Attention, typer.Option(help="How keys and values are read; gather needs less memory.")
    ] = Attention.CONTIGUOUS,
    host_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of host memory for evicted blocks, on an accelerator.", show_default=False),
    ] = None,
    disk_folder: Annotated[
        Path | None, typer.Option(help="Where evicted blocks go, to be read back.", show_default=False)
    ] = None,
    disk_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most there; half of what is free, if not given.", show_default=False),
    ] = None,
    disk_mode: Mode = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run on so many workers of Ray, each with a model.", show_default=False)
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster, such as auto; else this machine.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever is in OUT.")] = False,
) -> None:
    """Complete every prompt of a file; what prompts share is computed once.

    Each batch that is done is noted in OUT.journal: the same command goes on where it was stopped or killed. Run once more when all
    are done, it says so and exits with 0.

    Any other option of transformers' generate is given by its name, behind PROMPTS: --do-sample --temperature 0.7 --stop-strings '["\\n"]'.

    Exits with 130 after Ctrl-C and after SIGTERM.
    """
    from hf_paged_cache import CacheArgumentError

    from ..batch.finished import finished_before
    from ..batch.output import require_writable
    from ..batch.rows import require_prompts
    from ..store_options import store_options
    from .hub import require_name
    from .refusal import in_one_line, terminated_as_interrupted

    journal = out.with_name(f"{out.name}.journal")
    try:
        with terminated_as_interrupted(), in_one_line("generate"):
            # without torch, which takes seconds to import
            if str(prompts).startswith("--"):
                raise CacheArgumentError(f"give PROMPTS before options of transformers' generate, such as {prompts}")
            if address is not None and workers is None:
                raise CacheArgumentError("--address is of a Ray cluster; give --workers, too")
            require_dtype(dtype)
            sizes = {
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_bytes": max_bytes,
                "host_bytes": host_bytes,
                "disk_folder": disk_folder,
                "disk_bytes": disk_bytes,
                "disk_mode": permissions_of("--disk-mode", disk_mode),
            }
            sizes = {name: size for name, size in sizes.items() if size is not None}
            store_options(**sizes)  # type: ignore[arg-type]
            require_writable(out, prompts)
            if not overwrite:
                finished_before(out)
            require_prompts(prompts, column, with_room=True)
            require_name(model, revision)

            from hf_paged_cache import generate_all, generate_all_on_ray

            from ..batch_options import require_names
            from .loading import load_model

            options = options_by_name(context.args)
            require_names(options)
            shaped: dict[str, Any] = {
                "out": out,
                "column": column,
                "order": order.value,
                "batch_size": batch_size,
                "max_new_tokens": max_new_tokens,
                "attention": attention.value,
                "seed": seed,
                "overwrite": overwrite,
                **sizes,
                **options,
            }
            load = partial(load_model, model, revision=revision, dtype=dtype, device=device)
            print(f"loading {model} ...", file=sys.stderr, flush=True)
            if workers is not None:
                result = generate_all_on_ray(load, prompts, num_workers=workers, address=address, **shaped)
            else:
                loaded, tokenizer = load()
                result = generate_all(loaded, tokenizer, prompts, **shaped)
    except KeyboardInterrupt:
        how = "the same command without --overwrite" if overwrite else "the same command"
        done = f" What is done is in {journal}; {how} goes on from there." if journal.exists() else ""
        print(f"hf-paged-cache generate: stopped.{done}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    is_done = 0 < result.summary.num_prompts == result.summary.num_done_before
    print(f"{out}: {'done already: ' if is_done else ''}{result.summary}")


def options_by_name(arguments: list[str]) -> dict[str, Any]:
    """`--do-sample --top-p 0.9` as the arguments of a call; a value is JSON, or else a text. `--no-do-sample` is False.

    Raises:
        CacheArgumentError: a value without a name, or a name that neither the command nor `generate` has.

    Examples:
        >>> options_by_name(["--do-sample", "--top-p", "0.9", "--stop-strings", '["a"]', "--eos-token-id=2"])
        {'do_sample': True, 'top_p': 0.9, 'stop_strings': ['a'], 'eos_token_id': 2}
    """
    from transformers import GenerationConfig

    from hf_paged_cache import CacheArgumentError

    from ..batch_options import NEED_A_VALUE, REFUSED

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
            raise CacheArgumentError(f"{given} needs a value behind it")
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
    from hf_paged_cache import CacheArgumentError

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
