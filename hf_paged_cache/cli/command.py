"""Owns what all commands have in common: shared options, and how a command ends.

What a command cannot do is one line on stderr and the exit code 2; a defect of this package keeps its traceback.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import PagedCacheError, UnsupportedModelError

MaxBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most memory of a model's keys and values, such as 4GB or 4GiB, without a space. Half of what is free, if not "
        "given. What a token takes: hf-paged-cache doctor MODEL.",
        show_default=False,
    ),
]
DiskFolder = Annotated[Path | None, typer.Option(help="Where evicted blocks go, to be read back.", show_default=False)]
Mode = Annotated[
    str | None,
    typer.Option(
        help="Permissions of the files of blocks, such as 660 for a group; their owner's alone, if not given.",
        show_default=False,
    ),
]


class Command(TyperCommand):
    """`Command` ends with one line and the exit code 2 if what it runs is refused or cannot be read."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (PagedCacheError, OSError, UnicodeDecodeError) as error:
            is_of_model = isinstance(error, UnsupportedModelError)
            said = f"the model is not supported: {error}" if is_of_model else _as_typed(str(error), ctx)
            print(f"hf-paged-cache {ctx.info_name}: {said}", file=sys.stderr)
            raise typer.Exit(2) from error


def _as_typed(said: str, ctx: Any) -> str:
    """Return a message with options as they are typed: `--max-bytes` for `max_bytes`; words in quotes or paths stay."""
    names = [each.name for each in ctx.command.params] + [given[2:].partition("=")[0] for given in ctx.args]
    options = {name.replace("-", "_") for name in names if "_" in name or "-" in name}
    words = "|".join(map(re.escape, options)) or "(?!)"
    return re.sub(rf"(?<![\w'\"./-])({words})(?![\w'\"./-])", lambda name: f"--{name[0].replace('_', '-')}", said)
