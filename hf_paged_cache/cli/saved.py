"""Runs the commands `save` and `load`, for prompts that are computed once and kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..blocks.arguments import file_mode_of_text
from ..errors import CacheArgumentError
from ..jobs.prompts import RowError, tokenized
from ..wording import counted
from . import command
from .command import Device, Dtype, Mode, Revision

_MODEL = typer.Option(help="A folder, or a name on the hub. Default: SmolLM2-135M-Instruct.", show_default=False)


def save(
    folder: Annotated[Path, typer.Argument(help="Where the blocks are written; made if it is not there.")],
    prompt_file: Annotated[
        list[Path], typer.Option(help="A text file: one prefix, as prompts begin with it. May be given more than once.")
    ],
    model: Annotated[str | None, _MODEL] = None,
    mode: Mode = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Compute prefixes and write what was computed into a folder, from which any run with the same model loads it."""
    if folder.exists() and not folder.is_dir():
        raise CacheArgumentError(f"{folder} is a file; give a folder to write into")
    for path in prompt_file:
        if not path.is_file():
            raise CacheArgumentError(f"there is no file {path}")
    texts = [{"prefix": path.read_text(encoding="utf-8")} for path in prompt_file]
    permissions = file_mode_of_text("--mode", mode)
    command.require_model(model, revision, dtype)

    from hf_paged_cache import PagedPrefixCache

    loaded, tokenizer = command.load_model(model, revision, dtype, device)
    cache = PagedPrefixCache(loaded)
    try:
        prefixes = [[*each] for each in tokenized(dict(enumerate(texts)), "prefix", tokenizer, loaded.config)]
    except RowError as error:
        number, problem = error.args
        raise CacheArgumentError(f"{prompt_file[number]}: {problem}") from error
    done = cache.prefill(prefixes)
    saved = cache.store.save(folder, prefixes, mode=permissions)
    computed = f"computed {done.num_computed} tokens of {counted(len(prefixes), 'prefix')}"
    print(f"{computed}, {done.num_tokens} in whole blocks")
    known = f"; there already: {counted(saved.num_known, 'block')}" if saved.num_known else ""
    print(f"wrote {counted(saved.num_blocks, 'block')}, {saved.num_bytes / 2**20:,.1f} MiB, into {folder}{known}")
    _print_rest("not saved", saved.not_saved)


def load(
    folder: Annotated[Path, typer.Argument(help="That `save` has written.")],
    check: Annotated[
        bool,
        typer.Option("--check", help="Read every file to its end, without a model. Exits with 1 if one is damaged."),
    ] = False,
    model: Annotated[str | None, _MODEL] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Say what a folder holds: with --check whether its files are whole, else what of it this model takes, and why not
    the rest.

    Exits with 1 if a file is damaged, or nothing was taken.
    """
    if not folder.is_dir():
        raise CacheArgumentError(f"there is no folder {folder}; give one that `save` has written")
    command.require_model(model, revision, dtype)

    from hf_paged_cache import PagedPrefixCache, saved_report

    if check:
        reports = saved_report(folder)
        if not reports:
            raise CacheArgumentError(f"{folder} holds no saved blocks")
        for report in reports:
            what = report.problem or (
                f"{counted(report.num_blocks, 'block')}, {report.num_tokens} tokens, {report.num_bytes / 2**20:,.1f} "
                f"MiB, of {report.model.get('model')} in {report.model.get('dtype')}, "
                f"transformers {report.model.get('transformers')}"
            )
            print(f"{report.path.name}: {what}")
        damaged = sum(report.problem is not None for report in reports)
        print(f"{counted(len(reports), 'file')}, {damaged} of them damaged")
        raise typer.Exit(1 if damaged else 0)
    tried, _ = command.load_model(model, revision, dtype, device)
    loaded = PagedPrefixCache(tried).store.load(folder)
    print(f"took {counted(loaded.num_blocks, 'block')}, {loaded.num_bytes / 2**20:,.1f} MiB, from {folder}")
    _print_rest("not taken", loaded.not_loaded)
    if not loaded.num_blocks and model is None:
        print("this was tried with the demo's model; name the one that has computed it: --model MODEL")
    raise typer.Exit(0 if loaded.num_blocks else 1)


def _print_rest(what: str, reasons: dict[str, int]) -> None:
    for reason, number in reasons.items():
        print(f"{what}: {counted(number, 'block') + ': ' if number else ''}{reason}")
