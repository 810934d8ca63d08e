"""Runs a job from its prompts to its summary: `generate_all` completes many prompts and computes once what they share.

It owns what is refused before anything runs. torch is imported where a model is needed.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..errors import CacheArgumentError
from ..store_options import shows_store_options
from ..wording import counted
from .answers import COMPLETION, INDEX, Answers, digest_of
from .options import How, tokens_seen
from .order import Limits, batches, ordered
from .prompts import Row, read_rows, tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache import PagedPrefixCache
    from ..prefix_store import PrefixStore
    from .calls import BatchCalls, Completion, Record

logger = logging.getLogger("hf_paged_cache")

_SECONDS_BETWEEN_LINES = 30.0  # of progress, if stderr is no terminal


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """`BatchSummary` says what a run of a job has done. `print` shows it in a line.

    `num_done_before` of the `num_prompts` prompts were done before this run; the other numbers leave them out.

    Attributes:
        prompt_tokens: tokens of prompts, without padding.
        reused_tokens: number of these tokens that did not run through the model.
        num_batches: number of calls of `generate`.
        num_bypassed: number of prompts in calls that reused and kept nothing, such as under a hook.
        seconds: seconds that the calls took, without loading and tokenizing.

    Examples:
        >>> summary = generate_all(model, tokenizer, ["What is one?", "What is two?"], max_new_tokens=2).summary
        >>> summary.num_prompts, summary.num_batches
        (2, 1)
    """

    num_prompts: int
    num_done_before: int
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    num_batches: int = 0
    num_bypassed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.num_prompts == self.num_done_before > 0:
            return f"done already: {counted(self.num_prompts, 'prompt')}"
        before = f", {self.num_done_before:,} of them done before" if self.num_done_before else ""
        reused = f"{self.reused_tokens:,} reused ({self.reused_tokens / max(1, self.prompt_tokens):.0%})"
        tokens = f"{counted(self.prompt_tokens, 'prompt token')}, {reused}; {counted(self.new_tokens, 'new token')}"
        bypassed = f"; {counted(self.num_bypassed, 'prompt')} reused and kept nothing" if self.num_bypassed else ""
        ran = f"{counted(self.num_batches, 'batch')} in {self.seconds:,.1f} s"
        return f"{counted(self.num_prompts, 'prompt')}{before}; {ran}; {tokens}{bypassed}"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """`BatchResult` is what `generate_all` returns.

    Attributes:
        completions: completion of each prompt, in the order given: a text, or a list of texts with
            `num_return_sequences`. None if they went into a file.

    Examples:
        >>> len(generate_all(model, tokenizer, ["What is one?", "What is two?"], max_new_tokens=2).completions)
        2
    """

    completions: list[Completion] | None
    summary: BatchSummary


@shows_store_options
def generate_all(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row],
    *,
    out: str | PathLike[str] | None = None,
    column: str = "prompt",
    batch_size: int | None = None,
    max_new_tokens: int = 128,
    cache: PagedPrefixCache | PrefixStore | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> BatchResult:
    """Complete many prompts, each as `model.generate` would, and compute once what they share.

    Prompts run in an order in which what they share is there when it is needed. With greedy search each completion is
    that of a `generate` of its prompt alone; in bf16 and fp16 a batch rounds otherwise than a row, with any cache.
    Samples are drawn a batch at a time, from `seed` and the batch. If calls reuse and keep nothing, as under a hook, a
    line in the log says so.

    Args:
        prompts: a file (.jsonl, .csv, .parquet); or a list of texts, of chats (lists of messages), or of rows with a
            `column`, such as a `datasets.Dataset`.
        out: a file of JSON lines: each row as it was, with its `index` and its `completion`, written when its batch is
            done. The same call, made again, runs what is not there yet.
        batch_size: most prompts of a `generate`; None: as many as pay.
        cache: cache on which the job runs, or a store for a new cache; None: a new cache for this job.
        overwrite: begin `out` anew; without it an `out` of another job is refused, and this job's is resumed.
        progress: False: no bar on stderr.
        options: options of `generate` by name, such as `num_beams=4`, and of a new cache.

    Raises:
        CacheArgumentError: a row has no prompt or is too long, options do not fit, or `out` is another job's; nothing
            has run.

    Examples:
        >>> result = generate_all(model, tokenizer, ["What is one and one?", "What is one?"], max_new_tokens=4)
        >>> len(result.completions), result.summary.num_prompts
        (2, 2)
    """
    how = How(out, column, batch_size, max_new_tokens, seed, overwrite, progress, options)
    with _calls_on(model, tokenizer, cache, how) as calls:
        return run_job(partial(complete, calls, how), prompts, how, {} if out is None else calls.facts())


@contextmanager
def _calls_on(model: Any, tokenizer: Any, cache: Any, how: How) -> Iterator[BatchCalls]:
    """Yield calls on a model of the caller's, which is left as it was."""
    from ..cache import PagedPrefixCache
    from ..integration.hooks import left_as_it_was
    from ..model.support import require_supported, unwrapped
    from ..prefix_store import PrefixStore
    from .calls import BatchCalls

    if not callable(tokenizer):
        raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's")
    require_supported(unwrapped(model))
    if not isinstance(cache, PagedPrefixCache | PrefixStore | None):
        kind = type(cache).__name__
        raise CacheArgumentError(f"cache is of type {kind}; give a PagedPrefixCache or a PrefixStore of this model")
    if isinstance(cache, PagedPrefixCache) and how.of_cache:
        given = " and ".join(how.of_cache)
        raise CacheArgumentError(f"{given}: of the cache, which is there already; give it to PagedPrefixCache")
    with left_as_it_was(unwrapped(model)):
        calls = BatchCalls(model, tokenizer, how, cache)
        if calls.model is not unwrapped(model):
            raise CacheArgumentError("cache is of another model than the one given")
        try:
            yield calls
        finally:
            calls.cache.reset()


def load_and_complete(load: Callable[[], Any], how: How, rows: Mapping[int, Row]) -> Iterator[Record]:
    """Load a model and do `complete` on it."""
    loaded = load()
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        kind = type(loaded).__name__
        raise CacheArgumentError(f"load returned {kind}; it is to return a model and its tokenizer")

    from .calls import BatchCalls

    model, tokenizer = loaded
    yield from complete(BatchCalls(model, tokenizer, how), how, rows)


def complete(calls: BatchCalls, how: How, rows: Mapping[int, Row]) -> Iterator[Record]:
    """Run rows, by their numbers; what can be refused is refused before the first one runs."""
    numbers, config = [*rows], calls.config
    tokens = [*tokenized(rows, how.column, calls.tokenizer)]
    calls.require_room(dict(zip(numbers, tokens, strict=True)))
    batch_size = 1 if config.prompt_lookup_num_tokens else how.batch_size
    if how.batch_size not in (None, batch_size):
        alone = f"give batch_size=1, not {how.batch_size}"
        raise CacheArgumentError(f"prompt_lookup_num_tokens runs one row at a time; {alone}")
    reads_once = calls.try_out(1 if batch_size == 1 else 2)
    num_sequences = max(config.num_beams or 1, config.num_return_sequences or 1)
    limits = Limits(batch_size or 1, math.inf, how.max_new_tokens, num_sequences, tokens_seen(config))
    if batch_size is None:
        limits = limits.that_pay(max(map(len, tokens)), reads_once)
    for batch in batches(ordered(tokens), limits):
        yield from calls.run([numbers[at] for at in batch], [tokens[at] for at in batch])


def run_job(
    records: Callable[[dict[int, Row]], Iterator[Record]], prompts: Any, how: How, facts: Mapping[str, str]
) -> BatchResult:
    """Run a job on a function that makes records of rows; the facts are those by which the model is known again."""
    rows = read_rows(prompts, how.column)
    with ExitStack() as stack:
        answers, done = None, set[int]()
        if how.out is not None:
            job = {**facts, "input": digest_of(rows), "column": how.column, "seed": how.seed, **how.generation}
            answers = stack.enter_context(Answers(Path(how.out), prompts, job, how.overwrite))
            done = answers.done
        left = {number: row for number, row in enumerate(rows) if number not in done}
        counts, completions = Counter[str](), dict[int, Any]()
        seconds = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
        shown = {"unit": "prompt", "delay": 1e-3, "mininterval": seconds, "disable": how.progress is False}
        bar = stack.enter_context(
            tqdm(total=len(rows), initial=len(done), **shown)
        )  # after a delay, so not of a refusal
        for record in records(left) if left else ():
            completed = dict(zip(record.rows, record.completions, strict=True))
            if answers:
                answers.add({INDEX: number, **left[number], COMPLETION: each} for number, each in completed.items())
            else:
                completions |= completed
            if record.counts["num_bypassed"] and not counts["num_bypassed"]:
                logger.warning("PagedPrefixCache: a batch reused and kept nothing: cache.last_call says why")
            counts.update(record.counts)
            bar.set_postfix_str(f"{counts['reused_tokens'] / counts['prompt_tokens']:.0%} reused", refresh=False)
            bar.update(len(record.rows))
        summary = BatchSummary(len(rows), len(done), **counts)
        return BatchResult(None if answers else [completions[number] for number in range(len(rows))], summary)
