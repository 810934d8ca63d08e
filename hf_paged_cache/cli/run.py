"""Runs the command `run`: it runs somebody else's program in this process, with a prefix cache for each model."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CacheArgumentError
from ..store_options import store_options
from .command import DiskFolder, MaxBytes

TAKES_A_PROGRAM = {"allow_interspersed_args": False}  # what follows PROGRAM is the program's own
_NOTHING_RAN = (
    "no generate call was seen in this process. Plain forwards, generate_batch and vLLM run without this cache; so do "
    "processes that it starts, unless their code calls hf_paged_cache.cache_every_generate()"
)


class ProgramStart(Exception):  # noqa: N818  # nothing is wrong
    """`ProgramStart` carries a program out of typer's handling of errors, so that its errors and exit code stay its
    own.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self.start = start


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="A Python script, or a console command of this Python (lm_eval, trl, transformers); "
            "then its own arguments.",
        ),
    ],
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as of python -m.")] = False,
    max_bytes: MaxBytes = None,
    disk_folder: DiskFolder = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Of all blocks: a run with another one finds none of them.", show_default=False)
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write counts there, as a line of JSON.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing at the end.")] = False,
) -> None:
    """Run a program as ever, but with a prefix cache for each of its models.

    Options of this command come before PROGRAM. Each generate that brings no cache gets one. What was reused, and why
    no more, is said on stderr at the end. Processes that the program starts have no cache, unless their code calls
    hf_paged_cache.cache_every_generate().

    Exits as the program does; with 2 where it cannot be run.
    """
    folder = disk_folder and Path(disk_folder).absolute()
    store_options(max_bytes=max_bytes, disk_folder=folder)  # bad options are refused before torch is imported
    start = _program(*program, is_module=module)
    if stats is not None:
        stats = stats.absolute()
        stats.write_text("", encoding="utf-8")

    from hf_paged_cache import cache_every_generate

    every = cache_every_generate(max_bytes=max_bytes, disk_folder=folder, cache_salt=cache_salt)
    atexit.register(_tell, every, os.getpid(), stats, quiet)
    raise ProgramStart(start)


def _program(name: str, *arguments: str, is_module: bool) -> Callable[[], Any]:
    """Return a function that runs a program, with its arguments and its import path; refuse what is none."""
    path, first, top = Path(name), name, name.replace("-", "_").partition(".")[0]
    command = next(iter(entry_points(group="console_scripts", name=name)), None)
    if is_module:
        folder = Path.cwd()
    elif command is not None:
        first, folder = shutil.which(name) or name, Path(sys.executable).parent
    elif path.suffix == ".py" or path.is_dir():
        folder = path if path.is_dir() else path.resolve().parent
        if not path.exists():
            raise CacheArgumentError(f"there is no file {name}")
    else:
        found = name if path.exists() else shutil.which(name)
        problem = f"{found} cannot run in this process" if found else f"there is no command {name}"
        programs = "a Python script (its name ends in .py), a console command of this Python, or -m MODULE"
        raise CacheArgumentError(f"{problem}; give {programs}")

    def start() -> None:
        sys.argv[:] = [first, *arguments]
        if not sys.flags.safe_path:
            sys.path[0] = str(folder)
        sys.excepthook = sys.__excepthook__  # typer has put its own hook there
        if top == "lm_eval":
            import_module("hf_paged_cache.lm_eval")  # makes the models hf-paged and hf-paged-multimodal known
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif command is not None:
            sys.exit(command.load()())
        else:
            runpy.run_path(name, run_name="__main__")

    return start


def _tell(every: Any, pid: int, stats: Path | None, quiet: bool) -> None:
    """Say on stderr, and write, what was done; do nothing in a fork, which has the counts of its parent."""
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
