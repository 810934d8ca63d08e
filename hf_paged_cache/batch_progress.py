"""What of a batch job is done, and what it took: in memory, in the journal and output where there are any, and on stderr meanwhile."""

import math
import sys
from array import array
from dataclasses import dataclass
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm as plain_tqdm
from tqdm.auto import tqdm

from .batch.journal import Completion, Journal, Record
from .batch.output import Output
from .wording import counted

_SECONDS_BETWEEN_LINES = 30.0  # and
_SHARE_BETWEEN_LINES = 0.05  # of the prompts, where stderr is no terminal
_MORE_BLOCKS = "more blocks are needed (num_blocks or max_bytes, --num-blocks or --max-bytes)"
_LINE = "{n_fmt} of {total_fmt} prompts ({percentage:.0f}%) after {elapsed}, about {remaining} left{postfix}"


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a job has done; of one that was interrupted, all its runs together. `print` shows it in a few lines.

    Attributes:
        prompt_tokens: of all prompts, without padding.
        reused_tokens: of these, those that did not run through the model.
        num_done_before: prompts that were done when this run began.
        num_batches: calls of `generate`.
        num_bypassed: prompts that did not fit into the pool alone, and ran without it.
        seconds: that the calls took; loading and tokenizing are not in it.
        seconds_without: an estimate of what they would take without the cache: besides, what was reused at the price of a token,
            which is the time by which the calls that computed most took longer for a first token than for a next one. None
            where no call computed more tokens than it has rows.

    Examples:
        >>> summary = generate_all(model, tokenizer, ["What is one?", "What is two?"], max_new_tokens=2).summary
        >>> summary.num_prompts, summary.num_batches
        (2, 1)
    """

    num_prompts: int
    num_done_before: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    num_batches: int
    num_bypassed: int
    seconds: float
    seconds_without: float | None

    def __str__(self) -> str:
        share = self.reused_tokens / max(1, self.prompt_tokens)
        lines = [
            f"{counted(self.num_prompts, 'prompt')} in {counted(self.num_batches, 'batch')}: "
            f"{counted(self.prompt_tokens, 'prompt token')}, of which {self.reused_tokens:,} were reused ({share:.0%}); "
            f"{counted(self.new_tokens, 'new token')}",
            f"{self.seconds:,.1f} s",
        ]
        if self.num_done_before:
            lines[-1] += f" in all runs, of which earlier ones did {counted(self.num_done_before, 'prompt')}"
        if self.seconds_without is not None and self.seconds:
            lines[-1] += (
                f"; without the cache about {self.seconds_without:,.1f} s ({self.seconds_without / self.seconds:.1f}x)"
            )
        if self.num_bypassed:
            lines.append(
                f"{counted(self.num_bypassed, 'prompt')} did not fit into the pool, and ran without it: {_MORE_BLOCKS}"
            )
        return "\n".join(lines)


class Progress:
    """What of a job is done, and what it counted.

    Args:
        num_rows: of the job.
    """

    def __init__(self, num_rows: int, journal: Journal | None, output: Output | None) -> None:
        self._journal, self._output = journal, output
        self._kept: dict[int, Completion] = {}
        self._total = num_rows
        self._counts = dict.fromkeys(("prompt_tokens", "computed_tokens", "new_tokens", "bypassed"), 0)
        self._num_batches = self.num_rows = 0
        self._seconds = 0.0
        self._computed, self._prices = array("q"), array("d")  # of each call: tokens, and the seconds of one
        for record in () if journal is None else journal.records():
            self._count(record)
        self._num_done_before = self.num_rows

    def __contains__(self, row: int) -> bool:
        return row in self._kept if self._journal is None else row in self._journal

    def add(self, record: Record) -> None:
        if self._journal is None:
            self._kept.update(zip(record.rows, record.completions, strict=True))
        else:
            self._journal.add(record)
        if self._output is not None:
            self._output.take(record)
        self._count(record)

    @property
    def completions(self) -> list[Completion] | None:
        return None if self._journal is not None else [self._kept[row] for row in range(self._total)]

    def remark(self, record: Record) -> str | None:
        """What is to be said of a batch at once: that it ran without the pool; of many such, whenever they have doubled."""
        num_bypassed = self._counts["bypassed"]
        if num_bypassed.bit_length() == (num_bypassed - int(record.counts["bypassed"])).bit_length():
            return None
        of_rows = f"row{'s' if len(record.rows) > 1 else ''} {', '.join(map(str, record.rows))}"
        so_far = "" if num_bypassed == len(record.rows) else f" ({counted(num_bypassed, 'prompt')} so far)"
        return f"PagedPrefixCache: {of_rows}, counted from 0, did not fit into the pool, and ran without it{so_far}: {_MORE_BLOCKS}"

    @property
    def reused_share(self) -> float:
        return 1 - self._counts["computed_tokens"] / max(1, self._counts["prompt_tokens"])

    def summary(self) -> BatchSummary:
        prompt_tokens, computed = self._counts["prompt_tokens"], self._counts["computed_tokens"]
        price = self._price()
        without = None if price is None else self._seconds + (prompt_tokens - computed) * price
        return BatchSummary(
            num_prompts=self._total,
            num_done_before=self._num_done_before,
            prompt_tokens=prompt_tokens,
            reused_tokens=prompt_tokens - computed,
            new_tokens=self._counts["new_tokens"],
            num_batches=self._num_batches,
            num_bypassed=self._counts["bypassed"],
            seconds=self._seconds,
            seconds_without=without,
        )

    def _count(self, record: Record) -> None:
        counts = record.counts
        for name in self._counts:
            self._counts[name] += int(counts[name])
        self._num_batches += 1
        self.num_rows += len(record.rows)
        self._seconds += counts["seconds"]
        prefill, num_steps = counts["prefill_seconds"], counts["decode_steps"]
        step = (counts["seconds"] - prefill) / num_steps if num_steps else 0.0
        num_computed = int(counts["computed_tokens"]) - len(record.rows)  # a step computes a token of each row
        if num_computed > 0:
            self._computed.append(num_computed)
            self._prices.append(max(0.0, prefill - step) / num_computed)

    def _price(self) -> float | None:
        """Seconds that a prompt token takes: the median of the calls that computed at least half as many as any did."""
        most = max(self._computed, default=0)
        prices = (price for number, price in zip(self._computed, self._prices, strict=True) if 2 * number >= most)
        return median(prices) if most else None


def progress_bar(total: int, initial: int, wanted: bool | None) -> Any:
    """A bar of prompts on a terminal or in a notebook; elsewhere a line now and then, of which a log does not fill up.

    Args:
        initial: prompts that are done.
        wanted: False: neither.
    """
    is_notebook = any(
        each.__name__ == "tqdm_notebook" for each in tqdm.__mro__
    )  # whose import would take IPython's time
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
    """Makes a line of each state of a bar, which overwrites the one before on a terminal."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        if line := text.strip():
            self._file.write(f"{line}\n")

    def flush(self) -> None:
        self._file.flush()
