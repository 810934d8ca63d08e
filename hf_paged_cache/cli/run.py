"""Runs the command `run`: it runs somebody else's program in this process, with a prefix cache for each model."""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CacheArgumentError
from ..store_options import store_options
from .command import DiskFolder, MaxBytes

TAKES_A_PROGRAM = {"allow_interspersed_args": False}  # what follows PROGRAM is the program's own
_PYTHON = re.compile(rb"#!.*python|#!/bin/sh\n'''exec'.*python")  # how the file of a console command begins
_NOTHING_RAN = (
    "no generate call got a cache in this process. Plain forwards, generate_batch and vLLM run without this cache; so "
    "do processes that it starts, unless their code calls hf_paged_cache.cache_every_generate()"
)


class ProgramStart(Exception):  # noqa: N818  # nothing is wrong
    """`ProgramStart` carries a program, its argument, out of typer's handling of errors: its errors stay its own."""


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="A Python script, or a console command of this Python (lm_eval, trl); then its own arguments.",
        ),
    ],
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as of python -m.")] = False,
    max_bytes: MaxBytes = None,
    disk_folder: DiskFolder = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Of all blocks: a run with another one finds none of them.")
    ] = None,
    stats: Annotated[Path | None, typer.Option(metavar="FILE", help="Write counts there, as a line of JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing at the end.")] = False,
) -> None:
    """Run a program as ever, but with a prefix cache for each of its models. Options of `run` come before PROGRAM.

    Each generate that brings no cache gets one. What was reused, and why no more, is said on stderr at the end.
    Processes that the program starts have no cache, unless their code calls hf_paged_cache.cache_every_generate().

    Exits as the program does; with 2 where it cannot be run.
    """
    folder = disk_folder and Path(disk_folder).absolute()
    store_options(max_bytes=max_bytes, disk_folder=folder)  # bad options are refused before torch is imported
    start = _program(*program, is_module=module)
    if stats is not None:
        stats = stats.absolute()
        if stats.exists():
            raise CacheArgumentError(f"{stats} is there already, and would be lost; give --stats another file")
        stats.touch()

    from hf_paged_cache import cache_every_generate

    every = cache_every_generate(max_bytes=max_bytes, disk_folder=folder, cache_salt=cache_salt)
    atexit.register(_tell, every, os.getpid(), stats, quiet)
    raise ProgramStart(start)


def _program(name: str, *arguments: str, is_module: bool) -> Callable[[], Any]:
    """Return a function that runs a program, with its arguments and its import path; refuse what is none."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = name if is_module or Path(name).exists() else shutil.which(name, path=folders)
    if found is None:
        raise CacheArgumentError(f"there is no file and no command {name}")
    path = Path(found)
    if not (is_module or path.is_dir() or path.suffix == ".py" or _PYTHON.match(path.read_bytes()[:200])):
        programs = "a Python script, a console command of this Python, or -m MODULE"
        raise CacheArgumentError(f"{found} cannot run in this process; give {programs}")

    def start() -> None:
        sys.argv[:] = [found, *arguments]
        if not sys.flags.safe_path:
            sys.path[0] = str(Path.cwd() if is_module else path if path.is_dir() else path.resolve().parent)
        sys.excepthook = sys.__excepthook__  # typer has put its own hook there
        if Path(name.replace("-", "_")).name.partition(".")[0] == "lm_eval":
            import_module("hf_paged_cache.lm_eval")  # makes the models hf-paged and hf-paged-multimodal known
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(found, run_name="__main__")

    return start


def _tell(every: Any, pid: int, stats: Path | None, quiet: bool) -> None:
    """Say on stderr, and write, what was done; a fork, which has the counts of its parent, says nothing."""
    if os.getpid() != pid:
        return
    models = every.counts()
    lines = str(every).splitlines() if models else [_NOTHING_RAN]
    if not models and "lm_eval" in sys.modules:
        lines.append("lm_eval: --model hf scores by plain forwards; --model hf-paged reuses their contexts")
    if stats is not None:
        stats.write_text(json.dumps({"arguments": sys.argv, "models": models}) + "\n", encoding="utf-8")
    if not quiet:
        print(*(f"hf-paged-cache run: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
