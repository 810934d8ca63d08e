"""What a batch job has done, and what it took: counted a batch at a time, and told at the end."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..wording import counted


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a job has done; of one that was interrupted, all its runs together. `print` shows it in a few lines.

    Attributes:
        prompt_tokens: of all prompts, without padding.
        reused_tokens: of these, those that did not run through the model.
        num_done_before: prompts that were done when this run began.
        num_batches: calls of `generate`.
        num_bypassed: prompts of calls that reused and kept nothing, such as under a hook.
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
        reused = f"{self.reused_tokens:,} were reused ({self.reused_tokens / max(1, self.prompt_tokens):.0%})"
        text = (
            f"{counted(self.num_prompts, 'prompt')} in {counted(self.num_batches, 'batch')}: "
            f"{counted(self.prompt_tokens, 'prompt token')}, of which {reused}; {counted(self.new_tokens, 'new token')}\n"
            f"{self.seconds:,.1f} s"
        )
        if self.num_done_before:
            text += f" in all runs, of which earlier ones did {counted(self.num_done_before, 'prompt')}"
        if (without := self.seconds_without) is not None and self.seconds:
            text += f"; without the cache about {without:,.1f} s ({without / self.seconds:.1f}x)"
        if self.num_bypassed:
            text += f"\n{counted(self.num_bypassed, 'prompt')} reused and kept nothing: cache.last_call says why"
        return text


class Tally:
    """Counts what is done of a job."""

    def __init__(self) -> None:
        self.num_rows = self.num_batches = 0
        self._sum: Counter[str] = Counter()
        self._computed, self._prices = array("q"), array("d")  # of each call: tokens, and the seconds of one

    def add(self, rows: Sequence[int], counts: Mapping[str, float]) -> None:
        """A batch is done; see `BatchCalls` for what it counts."""
        self.num_rows += len(rows)
        self.num_batches += 1
        self._sum.update(counts)
        prefill, num_steps = counts["prefill_seconds"], counts["decode_steps"]
        step = (counts["seconds"] - prefill) / num_steps if num_steps else 0.0
        num_computed = int(counts["computed_tokens"]) - len(rows)  # a step computes a token of each row
        if num_computed > 0:
            self._computed.append(num_computed)
            self._prices.append(max(0.0, prefill - step) / num_computed)

    @property
    def num_bypassed(self) -> int:
        return self._sum["bypassed"]

    @property
    def reused_tokens(self) -> int:
        return self._sum["prompt_tokens"] - self._sum["computed_tokens"]

    @property
    def reused_share(self) -> float:
        return self.reused_tokens / max(1, self._sum["prompt_tokens"])

    def summary(self, num_prompts: int, num_done_before: int = 0) -> BatchSummary:
        price, seconds = self._price(), float(self._sum["seconds"])
        return BatchSummary(
            num_prompts=num_prompts,
            num_done_before=num_done_before,
            prompt_tokens=self._sum["prompt_tokens"],
            reused_tokens=self.reused_tokens,
            new_tokens=self._sum["new_tokens"],
            num_batches=self.num_batches,
            num_bypassed=self.num_bypassed,
            seconds=seconds,
            seconds_without=None if price is None else seconds + self.reused_tokens * price,
        )

    def _price(self) -> float | None:
        """Seconds that a prompt token takes: the median of the calls that computed at least half as many as any did."""
        most = max(self._computed, default=0)
        prices = (price for number, price in zip(self._computed, self._prices, strict=True) if 2 * number >= most)
        return median(prices) if most else None
