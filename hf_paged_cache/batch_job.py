"""`generate_all`: completions of many prompts, with what they share computed once, in the order of their prefix tree.

Owns the job from its prompts to its summary: what is refused before anything runs, and what is kept where.
"""

import json
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm
from transformers import PreTrainedModel

from .batch.finished import Finished, finished_before, note_finished, record_of, require_same
from .batch.journal import Completion, Journal, Record, claimed, journal_of
from .batch.output import ORDERS, Output, require_writable
from .batch.placement import partition
from .batch.plan import batches, ordered
from .batch.prefix_tree import build_prefix_tree
from .batch.prompt_files import Row
from .batch.rows import digest_of, opened, require_room
from .batch_calls import BatchCalls
from .batch_options import NO_OPTIONS, generation_config, tokens_seen
from .batch_progress import BatchSummary, Progress, progress_bar
from .blocks.arguments import int_of_at_least
from .cache import PagedPrefixCache
from .errors import CacheArgumentError
from .integration.hooks import left_as_it_was
from .model.identity import sampled_digest
from .model.placeholders import Placeholders
from .model.support import require_supported, unwrapped
from .prefix_store import PrefixStore
from .prompts import require_positions, require_text, tokenized
from .store_options import require_attention, store_options

logger = logging.getLogger("hf_paged_cache")


class Batch(NamedTuple):
    """Rows that run in one call, if they fit.

    Attributes:
        rows: their numbers.
        prompts: token ids of each.
        done: of the rows, those that an earlier run of the job has done.
    """

    rows: list[int]
    prompts: "list[array[int]]"
    done: frozenset[int] = frozenset()


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
    block_size: int | None = None,
    num_blocks: int | None = None,
    max_bytes: int | str | None = None,
    attention: Literal["contiguous", "gather"] = "contiguous",
    host_bytes: int | str = 0,
    disk_folder: "str | PathLike[str] | None" = None,
    disk_bytes: int | str | None = None,
    disk_mode: int | None = None,
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
    call goes on where an earlier one was interrupted or killed: no prompt runs twice, and none is lost. When all are done the journal
    goes, and a record (`OUT.done`) says whose output it is: by it the same call, made again, finds that nothing is left to do.

    A prompt that does not fit into the pool alone runs without it; a line in the log (`hf_paged_cache`, WARNING) says so at once.

    Args:
        tokenizer: the model's. A chat goes through its chat template, with the beginning of an answer.
        prompts: a file (JSON lines, CSV or Parquet, read with `datasets`); or a list of texts, of chats (lists of messages), or
            of rows with a `column`, such as a `datasets.Dataset`.
        out: a file of JSON lines: each row with its `completion`. It grows while the job runs.
        column: where the prompt is, in a row.
        order: of the rows in `out`: as they were given, or as they are done.
        batch_size: rows of a `generate` at most.
        cache: to run on, or a store to make one of; None: a new one for this job, with `block_size` and the options that follow
            it, see `PagedPrefixCache`.
        overwrite: remove an `out`, a journal and a record that are there; without it an `out` of another job is refused, and this
            job's gone on from.
        progress: a bar on stderr, or where that is no terminal a line every 30 seconds and 5 % of the prompts, whichever is later;
            False: neither.
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
    how = How(out, column, order, batch_size, max_new_tokens, seed, overwrite, progress).checked()
    sizes = given_options(
        attention=attention,
        block_size=block_size,
        num_blocks=num_blocks,
        max_bytes=max_bytes,
        host_bytes=host_bytes,
        disk_folder=disk_folder,
        disk_bytes=disk_bytes,
        disk_mode=disk_mode,
    )
    options = {"max_new_tokens": max_new_tokens, **generation}
    if not callable(tokenizer):
        raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's")
    inside = unwrapped(model)
    require_supported(inside)
    config = generation_config(inside, options)
    if not isinstance(cache, PagedPrefixCache | PrefixStore | None):
        raise CacheArgumentError(
            f"cache is of type {type(cache).__name__}; give a PagedPrefixCache or a PrefixStore of this model, or None"
        )
    if isinstance(cache, PagedPrefixCache) and sizes:
        raise CacheArgumentError(
            f"{' and '.join(sizes)}: of the cache, which is there already; give it to PagedPrefixCache"
        )
    with ExitStack() as stack:
        stack.enter_context(left_as_it_was(inside))
        on = (
            cache
            if isinstance(cache, PagedPrefixCache)
            else PagedPrefixCache(model if cache is None else cache, **sizes)
        )
        if on.store.model is not inside:
            raise CacheArgumentError("cache is of another model than the one given")
        stack.callback(on.reset)
        calls = BatchCalls(on, tokenizer, config, options, seed)
        runner = Runner(
            tokenizer=tokenizer,
            config=inside.config,
            placeholders=on.store.placeholders,
            generation_config=config,
            digest=lambda: sampled_digest(inside),
            block_size=on.store.blocks.block_size,
            num_workers=1,
            try_out=calls.try_out,
            run=lambda queues: (record for batch in queues[0] for record in calls.run(*batch)),
        )
        return run_job(runner, prompts, how)


def given_options(*, attention: Any, host_bytes: Any, **others: Any) -> dict[str, Any]:
    """Of the options of a new cache those that are given, checked as far as that goes without a model.

    Raises:
        CacheArgumentError: see `PrefixStore`.
    """
    require_attention(attention)
    given = {name: value for name, value in others.items() if value is not None}
    if host_bytes not in (0, None):
        given["host_bytes"] = host_bytes
    store_options(**given)
    return given if attention == "contiguous" else {"attention": attention, **given}


class How(NamedTuple):
    """The arguments of a job that do not depend on where it runs; see `generate_all`."""

    out: "str | PathLike[str] | None"
    column: str
    order: Literal["given", "done"]
    batch_size: int
    max_new_tokens: int
    seed: int
    overwrite: bool
    progress: bool | None

    def checked(self) -> "How":
        """Itself.

        Raises:
            CacheArgumentError: naming the first argument that is of another type, or out of its range.
        """
        int_of_at_least("batch_size", self.batch_size, 1, "rows of a batch")
        int_of_at_least("max_new_tokens", self.max_new_tokens, 1, "tokens")
        int_of_at_least("seed", self.seed, 0, "as a seed")
        for name, value in (("overwrite", self.overwrite), ("progress", self.progress)):
            if not isinstance(value, bool) and (value is not None or name == "overwrite"):
                raise CacheArgumentError(f"{name} is {value!r}; give True or False")
        if not isinstance(self.column, str):
            raise CacheArgumentError(f"column is {self.column!r}; give the name of a column")
        if not isinstance(self.out, str | PathLike | None) or "\0" in fspath(self.out or "") or self.out == "":
            raise CacheArgumentError(f"out is {self.out!r}; give a file's path")
        if self.order not in ORDERS:
            raise CacheArgumentError(f"order is {self.order!r}; give {' or '.join(map(repr, ORDERS))}")
        return self


class Runner(NamedTuple):
    """What runs the batches of a job: a model here, or workers.

    Attributes:
        config: the model's.
        placeholders: the model's token ids that are no text.
        generation_config: what its calls go by.
        digest: of the model, computed when it is asked for.
        try_out: makes a short call with the options, on the beginnings of these prompts, and raises what is wrong with them.
        run: of each worker, its batches in order, each as row numbers and their token ids -> records, as they are done.
    """

    tokenizer: Any
    config: Any
    placeholders: Placeholders
    generation_config: Any
    digest: Callable[[], str]
    block_size: int
    num_workers: int
    try_out: "Callable[[Sequence[Sequence[int]]], None]"
    run: "Callable[[list[list[Batch]]], Iterator[Record]]"


def run_job(
    runner: Runner, prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]", how: How
) -> BatchResult:
    """A job on whatever runs its batches; see `generate_all` for what is refused."""
    if runner.generation_config.prompt_lookup_num_tokens and how.batch_size > 1:
        raise CacheArgumentError(
            f"prompt_lookup_num_tokens runs one row at a time; give batch_size=1, not {how.batch_size}"
        )
    path = None if how.out is None else Path(how.out)
    finished: Finished | None = None
    job: dict[str, Any] = {}
    with ExitStack() as stack:
        if path is not None:
            require_writable(path, prompts)
            stack.enter_context(claimed(path))
            finished = None if how.overwrite else finished_before(path)
        rows = stack.enter_context(opened(prompts, how.column))
        tokens = [*tokenized(rows, how.column, runner.tokenizer)]
        require_positions(runner.config, tokens, how.max_new_tokens)
        require_text(runner.placeholders, tokens)
        if path is not None:
            require_room(rows)
            job = {
                "model": runner.digest(),
                "prompts": digest_of(rows),
                "tokens of the prompts": _digest_of_tokens(tokens),
                "option": _options_of_results(runner, how),
            }
            if finished is not None:
                return _done_before(path, finished, {**job, "order": how.order}, len(rows))
        if tokens:
            runner.try_out([[*each[:2]] for each in tokens[: min(how.batch_size, 2)]])
        journal = output = None
        if path is not None:  # from here on there are files
            journal = stack.enter_context(Journal(journal_of(path), job, len(rows), anew=how.overwrite))
            record_of(path).unlink(missing_ok=True)
            output = stack.enter_context(Output(path, journal, rows.__getitem__, len(rows), how.order))
        done = Progress(len(rows), journal, output)
        queues = _planned(runner, tokens, how, done)
        with progress_bar(len(rows), done.num_rows, how.progress) as bar:
            for record in runner.run(queues):
                done.add(record)
                if remark := done.remark(record):
                    with tqdm.external_write_mode(file=sys.stderr):
                        logger.warning(remark)
                bar.set_postfix_str(f"{done.reused_share:.0%} of prompt tokens reused", refresh=False)
                bar.update(len(record.rows))
        if path is not None and output is not None and journal is not None:
            output.finish()
            note_finished(path, {**job, "order": how.order}, asdict(done.summary()))
            journal.remove()
        return BatchResult(done.completions, done.summary())


def _done_before(path: Path, finished: Finished, job: dict[str, Any], num_rows: int) -> BatchResult:
    """What the run has returned that has finished this very job.

    Raises:
        CacheArgumentError: the output is another job's.
    """
    require_same(path, finished, job)
    try:
        summary = BatchSummary(**{**finished.counts, "num_done_before": num_rows})
    except TypeError as error:
        raise CacheArgumentError(
            f"{record_of(path)} is no record of a finished job of this version ({error}); remove it and {path}, or overwrite both "
            "(overwrite, --overwrite)"
        ) from error
    return BatchResult(None, summary)


def _options_of_results(runner: Runner, how: How) -> dict[str, Any]:
    """What shapes the completions; of samples the batches do, too."""
    saved = json.loads(runner.generation_config.to_json_string())
    drawn = {
        "batch_size": how.batch_size,
        "seed": how.seed,
        "num_workers": runner.num_workers,
        "block_size": runner.block_size,
    }
    options = {name: value for name, value in saved.items() if name not in NO_OPTIONS}
    return {**options, "column": how.column, **(drawn if runner.generation_config.do_sample else {})}


def _digest_of_tokens(tokens: "Sequence[array[int]]") -> str:
    return digest_of([{"length": len(each), "ids": each.tobytes().hex()} for each in tokens])


def _planned(runner: Runner, tokens: "Sequence[array[int]]", how: How, done: Progress) -> "list[list[Batch]]":
    """Of each worker, the batches that it is to run, without the rows that are done."""
    tree, lengths = build_prefix_tree(tokens, block_size=runner.block_size), [*map(len, tokens)]
    least_padded = tokens_seen(runner.generation_config)
    order = [*ordered(tree, lengths)]
    if runner.num_workers > 1:
        place = {each.prompt: each for each in order}
        orders = [
            [place[number] for number in numbers]
            for numbers in partition(tree, lengths, runner.num_workers, how.max_new_tokens)
        ]
    else:
        orders = [order]
    queues: list[list[Batch]] = []
    for own in orders:
        queue = []
        for numbers in batches(own, how.batch_size, how.max_new_tokens, least_padded):
            known = frozenset(number for number in numbers if number in done)
            if len(known) < len(numbers):
                queue.append(Batch(numbers, [tokens[number] for number in numbers], known))
        queues.append(queue)
    return queues
