"""`run`: becomes a program whose models have prefix caches, without a changed line of it."""

from __future__ import annotations

import os
import shutil
import sys
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CacheArgumentError
from ..programs.options import RunOptions
from ..store_options import store_options
from .command import Command, DiskFolder, MaxBytes

TAKES_A_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM",
            show_default=False,
            help="A Python script, an installed command (lm_eval, accelerate, trl, transformers), or -m MODULE; then its own "
            "arguments.",
        ),
    ] = None,
    max_bytes: MaxBytes = None,
    disk_folder: DiskFolder = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Of all blocks: a run with another one finds none of them.", show_default=False)
    ] = None,
    stats: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write counts there, a line of JSON for each process.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing at the end.")] = False,
) -> None:
    """Run a program as ever, but with a prefix cache for each of its models.

    Options of this command come before PROGRAM. Each generate that brings no cache gets one, in this process and in every Python
    that it starts. What was reused, and why no more, is said on stderr at the end.

    Exits as the program does; with 2 where it cannot be run.
    """
    sizes = {"max_bytes": max_bytes, "disk_folder": disk_folder and str(disk_folder.absolute())}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    store_options(**given)
    if cache_salt == "":
        raise CacheArgumentError("cache_salt is empty; leave it out")
    command = _command_line(program or [])
    if stats is not None:
        try:
            stats.write_text("", encoding="utf-8")
        except OSError as error:
            raise CacheArgumentError(f"--stats {stats} cannot be written: {error.strerror}") from error
    given |= {} if cache_salt is None else {"cache_salt": cache_salt}
    options = RunOptions(given, None if stats is None else str(stats.absolute()), quiet, os.getpid())
    sys.stdout.flush()
    os.execvpe(command[0], command, options.environment(os.environ))


def _command_line(given: list[str]) -> list[str]:
    """The command line of a program: scripts and modules are of this Python, and so are commands that it has.

    Raises:
        CacheArgumentError: there is no such program.
    """
    name, others = (given[0], given[1:]) if given else ("-m", [])
    if name == "-m" and others:
        return [sys.executable, *given]
    if name.startswith("-"):
        if name != "-m":
            options = [f"--{each.replace('_', '-')}" for each in signature(run).parameters if each != "program"]
            close = get_close_matches(name, options, 1, cutoff=0.8)
            raise CacheArgumentError(
                f"there is no option {name}{f'; did you mean {close[0]}?' if close else '.'} See --help"
            )
        raise CacheArgumentError("give a program to run: a Python script, an installed command, or -m MODULE")
    if Path(name).suffix == ".py" or Path(name).is_dir():
        if not Path(name).exists():
            raise CacheArgumentError(f"there is no file {name}")
        return [sys.executable, name, *others]
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        raise CacheArgumentError(f"there is no command {name}; a Python script has a name in .py")
    return [found, *others]


# alone: programs do not wait for other commands
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(cls=Command, context_settings=TAKES_A_PROGRAM)(run)


@app.callback()
def _alone() -> None:
    """Makes it a subcommand."""
