"""What a command cannot do becomes one line on stderr and the exit code 2; a defect of ours keeps its traceback."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

import typer

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # what torch says of it, by platform


@contextmanager
def in_one_line(command: str) -> Iterator[None]:
    """End the command with one line where what runs inside is refused, cannot be read, or finds no memory.

    Raises:
        typer.Exit: with 2, for a refusal (`PagedCacheError`), a file that cannot be read, or memory that is not there.
    """
    from hf_paged_cache import PagedCacheError, UnsupportedModelError

    try:
        yield
    except UnsupportedModelError as error:
        _say(command, f"the model is not supported: {error}")
        raise typer.Exit(2) from error
    except (PagedCacheError, OSError, UnicodeDecodeError) as error:
        _say(command, str(error))
        raise typer.Exit(2) from error
    except RuntimeError as error:  # torch.OutOfMemoryError is one; of a host torch raises no kind of its own
        if not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        said = shorten(str(error).partition("\n")[0], 200, placeholder=" ...")
        _say(command, f"there is no memory for it ({said}); take a smaller model or dtype, or another device")
        raise typer.Exit(2) from error


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


def _say(command: str, what: str) -> None:
    print(f"hf-paged-cache {command}: {what}", file=sys.stderr)
