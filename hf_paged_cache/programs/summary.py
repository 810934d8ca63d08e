"""What a program's models did on their caches: counted, said at its end, and written to a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..store.call_totals import CallTotals
from ..wording import counted
from .options import RunOptions

_MOST_REASONS = 3


@dataclass
class ModelRun:
    """What was done of one model.

    Attributes:
        name: its class, and where its weights are from.
        refused: why it has no cache; "": it has one, or was not asked for any.
        without: why a `generate` ran without a cache -> how many did.
        accounts: what is counted of its stores, without their blocks.
    """

    name: str
    refused: str = ""
    without: Counter[str] = field(default_factory=Counter)
    accounts: list[CallTotals] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Its counts, named as in `CacheStats`."""
        metrics = [each.metrics for each in self.accounts]
        prompt, reused = sum(each.num_queried_tokens for each in metrics), sum(each.num_hit_tokens for each in metrics)
        shared = sum(each.num_shared_tokens for each in metrics)
        return {
            "model": self.name,
            "refused": self.refused,
            "num_calls": sum(each.num_calls for each in self.accounts),
            "num_bypassed_calls": sum(each.num_bypassed_calls for each in self.accounts),
            "prompt_tokens": prompt,
            "computed_tokens": prompt - reused - shared,
            "reused_tokens": reused,
            "shared_tokens": shared,
            "computed_because": dict(sum((each.computed_because for each in self.accounts), Counter())),
            "calls_without_cache": dict(self.without),
        }


def report(options: RunOptions, models: Sequence[ModelRun], advice: Sequence[str]) -> None:
    """Say on stderr what was done, and add it to the file of stats."""
    counts = [each.as_dict() for each in models]
    if not options.is_quiet:
        for each in counts:
            _say_of_model(each)
        for what in advice:
            say(what)
        if not counts and os.getpid() == options.pid:
            say(
                "no generate was called in this process; plain forwards, generate_batch, continuous batching and vLLM have "
                "caches of their own or none"
            )
        if "lm_eval" in sys.modules and "hf_paged_cache.lm_eval" not in sys.modules:
            say(
                "lm_eval: --model hf scores by plain forwards; with --model hf-paged in place of hf, their contexts are reused, too"
            )
    if options.stats is not None and (counts or os.getpid() == options.pid):
        line = json.dumps({"pid": os.getpid(), "arguments": sys.argv, "models": counts, "advice": [*advice]})
        try:
            with open(options.stats, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"{options.stats} could not be written: {error}")


def say(what: str) -> None:
    """A line on stderr, if there is one still."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"hf-paged-cache run: {what}\n")  # at once: several processes may write to one pipe
        sys.stderr.flush()


def _say_of_model(counts: dict[str, Any]) -> None:
    name = counts["model"]
    if counts["num_calls"]:
        shared = counts["shared_tokens"]
        of_rows = f", {shared:,} computed once for several rows" if shared else ""
        say(
            f"{name}: {counted(counts['num_calls'], 'call')}, {counts['prompt_tokens']:,} prompt tokens: "
            f"{counts['reused_tokens']:,} reused{of_rows}, {counts['computed_tokens']:,} computed"
        )
        reasons = Counter(counts["computed_because"]).most_common(_MOST_REASONS)
        for why, num_tokens in reasons:
            say(f"  {counted(num_tokens, 'token')} computed: {why}")
        if counts["num_bypassed_calls"]:
            say(f"  {counted(counts['num_bypassed_calls'], 'call')} reused and kept nothing, for the reasons above")
    for why, number in counts["calls_without_cache"].items():
        say(f"{name}: {counted(number, 'call')} without the cache: {counts['refused'] or why}")
