"""What is shown on stderr while a batch job runs: a bar, or where that is no terminal a line now and then; and what is said at once."""

import logging
import math
import sys
from typing import Any, TextIO

from tqdm import tqdm as plain_tqdm
from tqdm.auto import tqdm

from ..wording import counted
from .journal import Record

logger = logging.getLogger("hf_paged_cache")

_SECONDS_BETWEEN_LINES = 30.0  # and
_SHARE_BETWEEN_LINES = 0.05  # of the prompts, where stderr is no terminal
_LINE = "{n_fmt} of {total_fmt} prompts ({percentage:.0f}%) after {elapsed}, about {remaining} left{postfix}"


def progress_bar(total: int, initial: int, wanted: bool | None) -> Any:
    """A bar of prompts on a terminal or in a notebook; elsewhere a line now and then, of which a log does not fill up.

    Args:
        initial: prompts that are done.
        wanted: False: neither.
    """
    is_notebook = "tqdm_notebook" in (each.__name__ for each in tqdm.__mro__)  # importing it would import IPython
    if is_notebook or sys.stderr.isatty():
        return tqdm(total=total, initial=initial, unit="prompt", disable=wanted is False)
    return plain_tqdm(
        total=total,
        initial=initial,
        disable=wanted is False or not total,
        file=_Lines(sys.stderr),
        bar_format=_LINE,
        mininterval=_SECONDS_BETWEEN_LINES,
        maxinterval=math.inf,
        miniters=math.ceil(total * _SHARE_BETWEEN_LINES),
    )


class _Lines:
    """Makes a line of each state of a bar, which overwrites the one before on a terminal; of the same number of prompts, one."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._told = file, ""

    def write(self, text: str) -> None:
        told = text.strip().partition(" after ")[0]
        if told and told != self._told:
            self._told = told
            self._file.write(f"{text.strip().replace(', about ? left', '')}\n")

    def flush(self) -> None:
        self._file.flush()


def warn_of_bypassed(record: Record, num_bypassed: int) -> None:
    """Say at once that a batch reused and kept nothing; of many such, whenever they have doubled.

    Args:
        num_bypassed: prompts that did, with this batch's.
    """
    if num_bypassed.bit_length() == (num_bypassed - int(record.counts["bypassed"])).bit_length():
        return
    of_rows = f"row{'s' if len(record.rows) > 1 else ''} {', '.join(map(str, record.rows))}"
    so_far = "" if num_bypassed == len(record.rows) else f" ({counted(num_bypassed, 'prompt')} so far)"
    with tqdm.external_write_mode(file=sys.stderr):
        logger.warning(
            f"PagedPrefixCache: {of_rows}, counted from 0, reused and kept nothing{so_far}: cache.last_call says why"
        )
