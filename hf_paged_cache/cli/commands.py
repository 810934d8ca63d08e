"""Lists the subcommands, and says what the command itself does."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .command import Command
from .demo import demo
from .doctor import doctor
from .generate import ANY_OPTION, generate
from .run import TAKES_A_PROGRAM, run
from .saved import load, save

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
for each in (demo, doctor, bench, save, load):
    app.command(cls=Command)(each)
app.command(cls=Command, context_settings=ANY_OPTION)(generate)
app.command(cls=Command, context_settings=TAKES_A_PROGRAM)(run)


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
