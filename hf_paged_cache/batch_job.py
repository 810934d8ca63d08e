"""`generate_all`: completions of many prompts, with what they share computed once, in the order of their prefix tree.

Owns the job from its prompts to its summary: what is refused before anything runs, and what is kept where.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .batch.journal import Completion, Journal, Record, journal_of
from .batch.output import ORDERS, Output, require_room
from .batch.placement import placed
from .batch.plan import batches, ordered
from .batch.prefix_tree import grow
from .batch.prompt_files import Row
from .batch.rows import digest_of, opened
from .batch_calls import BatchCalls, digest_of_model
from .batch_options import generation_config, tokens_seen
from .blocks.arguments import int_of_at_least
from .cache import PagedPrefixCache
from .errors import CacheArgumentError
from .integration.hooks import detach, is_attached
from .model.support import require_supported, unwrapped
from .prefix_store import PrefixStore
from .prompts import require_positions, tokenized

_NO_OPTION = "transformers_version"

Batch = tuple[list[int], "list[array[int]]"]  # row numbers, and the token ids of each


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a job has done; of one that was interrupted, all its runs together. `print` shows it in a few lines.

    Attributes:
        prompt_tokens: of all prompts, without padding.
        reused_tokens: of these, those that did not run through the model.
        num_batches: calls of `generate`.
        num_bypassed: prompts that did not fit into the pool alone, and ran without it.
        seconds: that the calls took; loading and tokenizing are not in it.
        seconds_without: an estimate of what they would take without the cache: every prompt token at the fastest rate of the
            calls that computed at least half of theirs, and the same decode steps. None where there was no such call.

    Examples:
        >>> summary = generate_all(model, tokenizer, ["What is one?", "What is two?"], max_new_tokens=2).summary
        >>> summary.num_prompts, summary.num_batches
        (2, 1)
    """

    num_prompts: int
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
            f"{self.num_prompts:,} prompts in {self.num_batches:,} batches: {self.prompt_tokens:,} prompt tokens, of which "
            f"{self.reused_tokens:,} were reused ({share:.0%}); {self.new_tokens:,} new tokens",
            f"{self.seconds:,.1f} s",
        ]
        if self.seconds_without is not None and self.seconds:
            lines[-1] += (
                f"; without the cache about {self.seconds_without:,.1f} s ({self.seconds_without / self.seconds:.1f}x)"
            )
        if self.num_bypassed:
            lines.append(f"{self.num_bypassed:,} prompts did not fit into the pool, and ran without it")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What `generate_all` returns.

    Attributes:
        completions: of each prompt, in the order given: a text, or a list of them with `num_return_sequences`. None where they
            went into a file.

    Examples:
        >>> result = generate_all(model, tokenizer, ["What is one?", "What is two?"], max_new_tokens=2)
        >>> len(result.completions)
        2
    """

    completions: list[Completion] | None
    summary: BatchSummary


def generate_all(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]",
    *,
    out: "str | PathLike[str] | None" = None,
    column: str = "prompt",
    order: Literal["given", "done"] = "given",
    batch_size: int = 8,
    max_new_tokens: int = 128,
    cache: PagedPrefixCache | PrefixStore | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool | None = None,
    **generation: Any,
) -> BatchResult:
    """Complete many prompts, each as `model.generate` would: what they share is computed once, and is there when it is needed.

    Prompts run in the order of their prefix tree, in batches of rows that go on about as long. With greedy search each
    completion is that of a `generate` of its prompt alone; in bf16 and fp16 a batch rounds otherwise than a row, with any cache. Samples (`do_sample`, here or in the model's `generation_config`) are
    drawn a batch at a time: they follow from `seed` and the batch, so the same job has the same ones, interrupted or not, and
    a prompt alone has others. A batch that does not fit into the pool runs in halves.

    With `out`, each batch that is done is in a journal beside that file (`OUT.journal`) before the next one runs. The same
    call goes on where an earlier one was interrupted or killed: no prompt runs twice, and none is lost.

    Args:
        tokenizer: the model's. A chat goes through its chat template, with the beginning of an answer.
        prompts: a file (JSON lines, CSV or Parquet, read with `datasets`); or a list of texts, of chats (lists of messages), or
            of rows with a `column`, such as a `datasets.Dataset`.
        out: a file of JSON lines: each row with its `completion`. It grows while the job runs.
        column: where the prompt is, in a row.
        order: of the rows in `out`: as they were given, or as they are done.
        batch_size: rows of a `generate` at most.
        cache: to run on, or a store to make one of; None: a new one for this job.
        overwrite: remove an `out` and a journal that are there; without it they are refused, or gone on from.
        progress: show a bar on stderr; None: only on a terminal.
        generation: options of `generate` by name, such as `do_sample=True`, `num_beams=4`, `stop_strings=["\\n"]`.

    Raises:
        CacheArgumentError: a row that has no prompt, a prompt that is longer than the model's positions, options that do not fit, an
            `out` that another job has written; nothing has run.
        UnsupportedModelError: see `PagedPrefixCache`.

    Examples:
        >>> shared = "Question: What is one and one?\\nAnswer: Two.\\n"
        >>> result = generate_all(
        ...     model, tokenizer, [shared + "Question: What is ice?\\nAnswer:", shared], max_new_tokens=4
        ... )
        >>> len(result.completions), result.summary.num_prompts
        (2, 2)
    """
    int_of_at_least("batch_size", batch_size, 1, "rows of a batch")
    int_of_at_least("max_new_tokens", max_new_tokens, 1, "tokens")
    int_of_at_least("seed", seed, 0, "as a seed")
    if order not in ORDERS:
        raise CacheArgumentError(f"order is {order!r}; give {' or '.join(map(repr, ORDERS))}")
    options = {"max_new_tokens": max_new_tokens, **generation}
    inside = unwrapped(model)
    require_supported(inside)
    config = generation_config(inside, options)
    if not isinstance(cache, PagedPrefixCache | PrefixStore | None):
        raise CacheArgumentError(
            f"cache is of type {type(cache).__name__}; give a PagedPrefixCache or a PrefixStore of this model, or None"
        )
    with ExitStack() as stack:
        if not is_attached(inside):
            stack.callback(detach, inside)
        on = cache if isinstance(cache, PagedPrefixCache) else PagedPrefixCache(model if cache is None else cache)
        if on.store.model is not inside:
            raise CacheArgumentError("cache is of another model than the one given")
        stack.callback(on.reset)
        calls = BatchCalls(on, tokenizer, config, options, seed)
        runner = Runner(
            tokenizer,
            inside.config,
            config,
            lambda: digest_of_model(inside),
            on.store.blocks.block_size,
            1,
            calls.try_out,
            lambda queues: (record for batch in queues[0] for record in calls.run(*batch)),
        )
        return run_job(
            runner,
            prompts,
            out=out,
            column=column,
            order=order,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )


class Runner(NamedTuple):
    """What runs the batches of a job: a model here, or workers.

    Attributes:
        config: the model's.
        generation_config: what its calls go by.
        digest: of the model, computed when it is asked for.
        try_out: makes a short call with the options, on the beginnings of these prompts, and raises what is wrong with them.
        run: of each worker, its batches in order, each as row numbers and their token ids -> records, as they are done.
    """

    tokenizer: Any
    config: Any
    generation_config: Any
    digest: Callable[[], str]
    block_size: int
    num_workers: int
    try_out: "Callable[[Sequence[Sequence[int]]], None]"
    run: "Callable[[list[list[Batch]]], Iterator[Record]]"


def run_job(
    runner: Runner,
    prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]",
    *,
    out: "str | PathLike[str] | None",
    column: str,
    order: Literal["given", "done"],
    batch_size: int,
    max_new_tokens: int,
    seed: int,
    overwrite: bool,
    progress: bool | None,
) -> BatchResult:
    """A job on whatever runs its batches; see `generate_all` for the arguments and what is refused."""
    with ExitStack() as stack:
        rows = stack.enter_context(opened(prompts, column))
        tokens = [*tokenized(rows, column, runner.tokenizer)]
        require_positions(runner.config, tokens, max_new_tokens)
        journal = output = None
        if out is not None:
            _require_free(Path(out), prompts, overwrite)
            require_room(rows)
        if tokens:
            runner.try_out([[*each[:2]] for each in tokens[: min(batch_size, 2)]])
        if out is not None:
            path = Path(out)
            job = {
                "the model": runner.digest(),
                "the prompts' file": digest_of(rows),
                "the prompts' tokens": _digest_of_tokens(tokens),
                "the option": _options_of_results(runner.generation_config, column, batch_size, seed),
            }
            journal = stack.enter_context(Journal(journal_of(path), job, len(rows), anew=overwrite))
            output = stack.enter_context(Output(path, journal, rows.__getitem__, len(rows), order))
        done = _Done(len(rows), journal, output)
        queues = _planned(runner, tokens, batch_size, max_new_tokens, done)
        with tqdm(total=len(rows), initial=done.num_rows, unit="prompt", disable=_is_off(progress)) as bar:
            for record in runner.run(queues):
                done.add(record)
                bar.set_postfix_str(f"{done.reused_share:.0%} of prompt tokens reused", refresh=False)
                bar.update(len(record.rows))
        if output is not None and journal is not None:
            output.finish()
            journal.remove()
        return BatchResult(done.completions, done.summary())


def _is_off(progress: bool | None) -> bool | None:
    return None if progress is None else not progress


def _require_free(out: Path, prompts: object, overwrite: bool) -> None:
    """Refuse a file that is not this job's to write."""
    if not out.parent.is_dir():
        raise CacheArgumentError(f"there is no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise CacheArgumentError(f"{out} is a folder; give a file to write into")
    if out.exists() and not out.is_file():
        raise CacheArgumentError(f"{out} is no regular file; give a file to write into")
    if out.suffix in (".csv", ".tsv", ".parquet"):
        raise CacheArgumentError(f"{out}: what is written are JSON lines; give a name that ends with .jsonl")
    if isinstance(prompts, str | PathLike) and out.exists() and out.samefile(prompts):
        raise CacheArgumentError(f"{out} holds the prompts themselves, which would be lost; give another file")
    if out.exists() and not (overwrite or journal_of(out).exists()):
        raise CacheArgumentError(
            f"{out} is there already, and no journal beside it: it is done, or another's. Give another file, or overwrite"
        )


def _options_of_results(config: Any, column: str, batch_size: int, seed: int) -> dict[str, Any]:
    """What shapes the completions; of samples the batches do, too."""
    options = {name: value for name, value in json.loads(config.to_json_string()).items() if name != _NO_OPTION}
    drawn = {"batch_size": batch_size, "seed": seed} if config.do_sample else {}
    return {**options, "column": column, **drawn}


def _digest_of_tokens(tokens: "Sequence[array[int]]") -> str:
    return digest_of([{"length": len(each), "ids": each.tobytes().hex()} for each in tokens])


def _planned(
    runner: Runner, tokens: "Sequence[array[int]]", batch_size: int, max_new_tokens: int, done: "_Done"
) -> "list[list[Batch]]":
    """Of each worker, the batches that it is to run, without the rows that are done."""
    tree, lengths = grow(tokens, block_size=runner.block_size), [*map(len, tokens)]
    least_padded = tokens_seen(runner.generation_config)
    order = [*ordered(tree, lengths)]
    if runner.num_workers > 1:
        place = {each.prompt: each for each in order}
        orders = [
            [place[number] for number in numbers]
            for numbers in placed(tree, lengths, runner.num_workers, max_new_tokens)
        ]
    else:
        orders = [order]
    queues: list[list[Batch]] = []
    for own in orders:
        left = (
            [number for number in numbers if number not in done]
            for numbers in batches(own, batch_size, max_new_tokens, least_padded)
        )
        queues.append([(numbers, [tokens[number] for number in numbers]) for numbers in left if numbers])
    return queues


class _Done:
    """What of a job is done, and what it counted: in memory, and in journal and output where there are any."""

    def __init__(self, num_rows: int, journal: Journal | None, output: Output | None) -> None:
        self._journal, self._output = journal, output
        self._kept: dict[int, Completion] = {}
        self._total = num_rows
        self._counts = dict.fromkeys(("prompt_tokens", "computed_tokens", "new_tokens", "bypassed"), 0)
        self._num_batches = self.num_rows = 0
        self._seconds = self._decode_seconds = self._best_rate = 0.0
        for record in () if journal is None else journal.records():
            self._count(record)

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

    @property
    def reused_share(self) -> float:
        return 1 - self._counts["computed_tokens"] / max(1, self._counts["prompt_tokens"])

    def summary(self) -> BatchSummary:
        prompt_tokens, computed = self._counts["prompt_tokens"], self._counts["computed_tokens"]
        without = self._decode_seconds + prompt_tokens / self._best_rate if self._best_rate else None
        return BatchSummary(
            num_prompts=self._total,
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
        prefill = counts["prefill_seconds"]
        self._decode_seconds += counts["seconds"] - prefill
        if prefill and counts["computed_tokens"] * 2 >= counts["prompt_tokens"]:  # the others' time is that of a call
            self._best_rate = max(self._best_rate, counts["computed_tokens"] / prefill)
