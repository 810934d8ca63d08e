"""`generate_all`: completions of many prompts, with what they share computed once, in the order of their prefix tree.

Owns the job from its prompts to its summary: what is refused before anything runs, and what is kept where.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import GenerationConfig, PreTrainedModel

from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError
from ..integration.hooks import left_as_it_was
from ..model.support import require_supported, unwrapped
from ..prefix_store import PrefixStore
from ..store_options import shows_store_options
from .calls import BatchCalls, Described
from .journal import (
    Completion,
    Finished,
    Journal,
    Output,
    Record,
    claimed,
    finished_before,
    journal_of,
    note_finished,
    record_of,
    require_same,
    require_writable,
)
from .options import NO_OPTIONS, How, tokens_seen
from .order import NUM_UNSHARED, Limits, batches, build_prefix_tree, limits_that_pay, ordered, partition
from .pictures import ChatTokens
from .progress import progress_bar, warn_of_bypassed
from .prompts import require_positions, require_text, tokenized
from .rows import Row, digest_of, opened, require_room
from .summary import BatchSummary, Tally

_Prompts = str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]


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


@shows_store_options
def generate_all(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]",
    *,
    out: "str | PathLike[str] | None" = None,
    column: str = "prompt",
    image_column: str | None = None,
    order: Literal["given", "done"] = "given",
    batch_size: int | None = None,
    max_new_tokens: int = 128,
    cache: PagedPrefixCache | PrefixStore | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> BatchResult:
    """Complete many prompts, each as `model.generate` would: what they share is computed once, and is there when it is needed.

    Prompts run in the order of their prefix tree, in batches of rows of about the same length. With greedy search each
    completion is that of a `generate` of its prompt alone; in bf16 and fp16 a batch rounds otherwise than a row, with any cache. Samples (`do_sample`, here or in the model's `generation_config`) are
    drawn a batch at a time: they follow from `seed` and the batch, so the same job has the same ones, interrupted or not, if
    there is memory for as many rows; a prompt alone has others. A batch for which there is no memory runs in halves.

    With `out`, each batch that is done is in a journal beside that file (`OUT.journal`) before the next one runs. The same
    call resumes where an earlier one was interrupted or killed: no prompt runs twice, and none is lost. When all are done the journal
    goes, and a record (`OUT.done`) says whose output it is: by it the same call, made again, finds that nothing is left to do.

    Where calls reuse and keep nothing, as under a hook, a line in the log (`hf_paged_cache`, WARNING) says so at once.

    Args:
        tokenizer: the model's; for images its processor. A chat goes through the chat template, with the beginning of an answer.
        prompts: a file (JSON lines, JSON, CSV or Parquet); or a list of texts, of chats (lists of messages), or of rows with a
            `column`, such as a `datasets.Dataset`.
        out: a file of JSON lines: each row with its `completion`. It grows while the job runs.
        column: where the prompt is, in a row. A chat's messages may have image parts, as a processor takes them.
        image_column: where the images are that a text asks about: a path, a URL or a picture, or a list of such.
        order: of the rows in `out`: as they were given, or as they are done.
        batch_size: prompts of a `generate` at most; None: as many as pay, and 1 with images. That is 8 that share nothing; of prompts behind a common
            prefix, where the model reads that once, up to 64 in the same memory.
        cache: to run on, or a store to make one of; None: a new one for this job.
        overwrite: remove an `out`, a journal and a record that are there; without it an `out` of another job is refused, and this
            job's is resumed.
        progress: a bar on stderr, or where that is no terminal a line every 30 seconds and 5 % of the prompts, whichever is later;
            False: neither.
        options: of `generate` by name, such as `do_sample=True`, `num_beams=4`, `stop_strings=["\\n"]`.

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
    how = How(
        out=out,
        column=column,
        image_column=image_column,
        order=order,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        seed=seed,
        overwrite=overwrite,
        progress=progress,
        options=options,
    )
    if not callable(tokenizer):
        raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's")
    inside = unwrapped(model)
    require_supported(inside)
    if not isinstance(cache, PagedPrefixCache | PrefixStore | None):
        kind = type(cache).__name__
        raise CacheArgumentError(f"cache is of type {kind}; give a PagedPrefixCache or a PrefixStore of this model")
    if isinstance(cache, PagedPrefixCache) and how.of_cache:
        given = " and ".join(how.of_cache)
        raise CacheArgumentError(f"{given}: of the cache, which is there already; give it to PagedPrefixCache")
    with ExitStack() as stack:
        stack.enter_context(left_as_it_was(inside))
        calls = BatchCalls(model, tokenizer, how, cache)
        if calls.cache.store.model is not inside:
            raise CacheArgumentError("cache is of another model than the one given")
        stack.callback(calls.cache.reset)
        return run_job(Crew(calls), prompts, how)


class Crew:
    """What runs the batches of a job: this process; or workers, as a class that derives from this one."""

    num_workers = 1

    def __init__(self, calls: BatchCalls) -> None:
        self._calls = calls

    def ask(self, question: str, *given: Any) -> Any:
        """What the method `question` of `BatchCalls` answers."""
        return getattr(self._calls, question)(*given)

    def run(self, queues: list[list[Batch]]) -> Iterator[Record]:
        """Run the batches of each worker, each queue in its order, and yield what is done as it comes."""
        for batch in queues[0]:
            yield from self._calls.run(*batch)


def run_job(crew: Crew, prompts: _Prompts, how: How) -> BatchResult:
    """A job on whatever runs its batches; see `generate_all` for what is refused."""
    described: Described = crew.ask("describe")
    if described.generation_config.prompt_lookup_num_tokens and (how.batch_size or 1) > 1:
        alone = f"give batch_size=1, not {how.batch_size}"
        raise CacheArgumentError(f"prompt_lookup_num_tokens runs one row at a time; {alone}")
    path = None if how.out is None else Path(how.out)
    finished: Finished | None = None
    job: dict[str, Any] = {}
    with ExitStack() as stack:
        if path is not None:
            require_writable(path, prompts)
            stack.enter_context(claimed(path))
            finished = None if how.overwrite else finished_before(path)
        rows = stack.enter_context(opened(prompts, how.column))
        kinds = described.placeholders.kinds
        tokens = [
            *tokenized(rows, how.column, described.tokenizer, image_column=how.image_column, placeholders=kinds.keys())
        ]
        require_positions(described.config, tokens, how.max_new_tokens)
        require_text(described.placeholders, tokens)
        if path is not None:
            require_room(rows)
            job = {
                "model": crew.ask("digest"),
                "prompts": digest_of(rows),
                "tokens of the prompts": digest_of(
                    {"length": len(each), "ids": each.tobytes().hex()} for each in tokens
                ),
                "option": _options_of_results(described, how, crew.num_workers),
            }
            if finished is not None:
                require_same(path, finished, {**job, "order": how.order})
                return BatchResult(None, finished.summary)
        limits, have_images = Limits(how.batch_size or 1), any(isinstance(each, ChatTokens) for each in tokens)
        if have_images and limits.num_prompts > 1:
            raise CacheArgumentError(
                f"prompts with images run one row at a time; give batch_size=1, not {how.batch_size}"
            )
        if tokens:
            runs_alone = how.batch_size == 1 or have_images or described.generation_config.prompt_lookup_num_tokens
            crew.ask("try_out", tokens[: 1 if runs_alone else 2])
            if how.batch_size is None and not runs_alone:
                limits = _limits(crew, described.generation_config, tokens, how.max_new_tokens)
        beside = None if path is None else journal_of(path)
        journal = stack.enter_context(Journal(beside, job, len(rows), anew=how.overwrite))
        output = None
        if path is not None:
            record_of(path).unlink(missing_ok=True)
            output = stack.enter_context(Output(path, journal, rows, how.order))
        tally = Tally()
        for record in journal.records():
            tally.add(record.rows, record.counts)
        num_done_before = tally.num_rows
        queues = _planned(described, crew.num_workers, tokens, how, limits, journal)
        with progress_bar(len(rows), num_done_before, how.progress) as bar:
            for record in crew.run(queues):
                journal.add(record)
                if output is not None:
                    output.write_on()
                tally.add(record.rows, record.counts)
                warn_of_bypassed(record, tally.num_bypassed)
                bar.set_postfix_str(f"{tally.reused_share:.0%} of prompt tokens reused", refresh=False)
                bar.update(len(record.rows))
        summary = tally.summary(len(rows), num_done_before)
        if path is None or output is None:
            pairs = (pair for each in journal.records() for pair in zip(each.rows, each.completions, strict=True))
            return BatchResult([completion for _, completion in sorted(pairs, key=lambda pair: pair[0])], summary)
        output.finish()
        note_finished(path, {**job, "order": how.order}, summary)
        journal.remove()
        return BatchResult(None, summary)


def _options_of_results(described: Described, how: How, num_workers: int) -> dict[str, Any]:
    """What shapes the completions; of samples the batches do, too."""
    config = described.generation_config
    options = {name: each for name, each in json.loads(config.to_json_string()).items() if name not in NO_OPTIONS}
    options["column"] = how.column
    if how.image_column is not None:
        options["image_column"] = how.image_column
    if config.do_sample:
        options |= {"batch_size": how.batch_size, "seed": how.seed}
        options |= {"num_workers": num_workers, "block_size": described.block_size}
    return options


def _limits(crew: Crew, config: GenerationConfig, tokens: "Sequence[array[int]]", num_new_tokens: int) -> Limits:
    """As many prompts in a batch as pay."""
    one, reads_once = tokens[0][0], False
    other = next((each for of_prompt in tokens for each in of_prompt if each != one), None)
    if len(tokens) > NUM_UNSHARED and other is not None:
        reads_once = crew.ask("reads_once", one, other)
    num_sequences = max(config.num_beams or 1, config.num_return_sequences or 1)
    return limits_that_pay([*map(len, tokens)], num_new_tokens, num_sequences, read_once=reads_once)


def _planned(
    described: Described,
    num_workers: int,
    tokens: "Sequence[array[int]]",
    how: How,
    limits: Limits,
    done: Journal,
) -> list[list[Batch]]:
    """Of each worker, the batches that it is to run, without those that are done."""
    tree, lengths = build_prefix_tree(tokens, block_size=described.block_size), [*map(len, tokens)]
    least_padded = tokens_seen(described.generation_config)
    queues: list[list[Batch]] = []
    for own in partition([*ordered(tree, lengths)], num_workers, how.max_new_tokens):
        planned = (
            Batch(numbers, [tokens[number] for number in numbers], frozenset(n for n in numbers if n in done))
            for numbers in batches(own, limits, how.max_new_tokens, least_padded)
        )
        queues.append([batch for batch in planned if len(batch.done) < len(batch.rows)])
    return queues
