"""What all commands have in common: what they cannot do is one line on stderr and the exit code 2; a defect of ours keeps its traceback."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from textwrap import shorten
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

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # what torch says of it, by platform


class Command(TyperCommand):
    """A command that ends with one line where what it runs is refused, cannot be read, or finds no memory.

    Its help is wrapped as the terminal is, and shows no type beside an option that takes no value.

    Exit codes: 2, with that line; else the command's own.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        paragraphs = cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(each.replace("\n", " ") for each in paragraphs)

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params

    def invoke(self, ctx: Any) -> Any:
        cause: Exception
        try:
            return super().invoke(ctx)
        except UnsupportedModelError as error:
            said, cause = f"the model is not supported: {error}", error
        except (PagedCacheError, OSError, UnicodeDecodeError) as error:
            said, cause = _as_typed(str(error), ctx), error
        except RuntimeError as error:  # torch.OutOfMemoryError is one; of a host torch raises no kind of its own
            if not any(words in str(error) for words in _OUT_OF_MEMORY):
                raise
            said = shorten(str(error).partition("\n")[0], 200, placeholder=" ...")
            said, cause = f"there is no memory for it ({said}); take a smaller model or dtype, or another device", error
        print(f"hf-paged-cache {ctx.info_name}: {said}", file=sys.stderr)
        raise typer.Exit(2) from cause


def _as_typed(said: str, ctx: Any) -> str:
    """A message with the names of arguments as this command has them: `--max-bytes` for `max_bytes`; not in quotes or paths."""
    options = {each.name: max(each.opts, key=len) for each in ctx.command.params}
    others = [given.partition("=")[0] for given in ctx.args if given.startswith("--")]
    options |= {option[2:].replace("-", "_"): option for option in others}
    names = [re.escape(name) for name, option in options.items() if "_" in name and option.startswith("--")]
    return re.sub(rf"(?<![\w'\"./-])({'|'.join(names) or '(?!)'})(?![\w'\"./-])", lambda name: options[name[0]], said)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, with which a batch system ends a job, does what Ctrl-C does: what is open is closed, and temporary files go.

    Raises:
        KeyboardInterrupt: in the main thread, when the signal comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
