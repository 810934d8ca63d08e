"""Completes many prompts, and computes once what they share: `generate_all`, on many machines `generate_all_on_ray`.

With Ray each worker, a task, has a model and a store of its own, and runs a stretch of the order of all prompts. torch
is imported where a model is needed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError, PagedCacheError
from ..wording import counted
from .answers import COMPLETION, INDEX, Answers
from .options import How, require_names
from .order import ordered, partition
from .prompts import Row, prompt_of, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache import PagedPrefixCache
    from ..prefix_store import PrefixStore
    from .calls import Completion, Record

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

    Completions are in the order of the prompts, each a text, or a list of texts with `num_return_sequences`. They are
    None if they went into a file.
    """

    completions: list[Completion] | None
    summary: BatchSummary


class WorkersLostError(PagedCacheError):
    """Raised when a worker of a job has died: what is done is in its output, and the same job resumes."""


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
    Samples are drawn a batch at a time, from `seed` and the batch.

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
    how = How({}, out, column, batch_size, max_new_tokens, seed, overwrite, progress, options)

    from ..integration.hooks import left_as_it_was
    from ..model.identity import sampled_digest
    from ..model.support import require_supported, unwrapped
    from .calls import complete

    inner = unwrapped(model)
    require_supported(inner)
    if out is not None:
        how.model.update(model=inner.config.name_or_path, weights=sampled_digest(inner)[:16])
    with left_as_it_was(inner):
        return run_job(partial(complete, model, tokenizer, cache, how), prompts, how)


def generate_all_on_ray(
    load: Callable[[], tuple[Any, Any]],
    prompts: str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row],
    *,
    num_workers: int,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    **options: Any,
) -> BatchResult:
    """Run `generate_all` on workers of Ray. Prompts that share a prefix go to one worker.

    Args:
        load: function that makes the model and its tokenizer in each worker's process, such as
            `functools.partial(load_my_model, "name")`; it is pickled.
        num_workers: number of tasks, each with a model and a store.
        address: address of a Ray cluster, such as "auto"; None: the cluster to which this process is connected, the one
            that `RAY_ADDRESS` names, or a new one on this machine.
        gpus_per_worker: GPUs that Ray counts for a worker; None: 1, or an equal part of a GPU if there are fewer GPUs
            than workers.
        options: all other options of `generate_all` but `cache`, by name.

    Raises:
        CacheArgumentError: see `generate_all`; or Ray is not installed. What only a model can tell of a prompt, the
            prompt's worker refuses.
        WorkersLostError: a worker has died; the others have run to their end.

    Examples:
        >>> from functools import partial
        >>> from hf_paged_cache.cli.demo_model import load_demo_model
        >>> model.save_pretrained(folder), tokenizer.save_pretrained(folder)
        (...)
        >>> load = partial(load_demo_model, folder)
        >>> len(generate_all_on_ray(load, ["One and one", "One and two"], num_workers=1, max_new_tokens=4).completions)
        2
    """
    own = {each.name: options.pop(each.name) for each in fields(How) if each.name in options}
    how = How({}, **own, options=options)
    if not callable(load) or hasattr(load, "parameters"):
        kind, such = type(load).__name__, "functools.partial(load_my_model, 'name')"
        raise CacheArgumentError(f"load is a {kind}; give a function that returns model and tokenizer, such as {such}")
    return run_on_ray(load, prompts, how, num_workers, address, gpus_per_worker)


def load_and_complete(load: Callable[[], Any], how: How, rows: Mapping[int, Row]) -> Iterator[Record]:
    """Load a model and complete rows on it."""
    require_names(how.generation)
    loaded = load()
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        kind = type(loaded).__name__
        raise CacheArgumentError(f"load returned {kind}; it is to return a model and its tokenizer")
    model, tokenizer = loaded

    from .calls import complete

    yield from complete(model, tokenizer, None, how, rows)


def run_job(records: Callable[[dict[int, Row]], Iterator[Record]], prompts: Any, how: How) -> BatchResult:
    """Run a job on a function that makes records of rows."""
    rows = read_rows(prompts, how.column)
    answers = None if how.out is None else Answers(prompts, rows, how)
    done = set[int]() if answers is None else answers.done
    left = {number: row for number, row in enumerate(rows) if number not in done}
    counts, completions = Counter[str](), dict[int, Any]()
    seconds = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    shown = {"unit": "prompt", "mininterval": seconds, "disable": how.progress is False}
    with tqdm(total=len(rows), initial=len(done), delay=1e-3, **shown) as bar:  # after a delay, so not of a refusal
        for record in records(left) if left else ():
            completed = dict(zip(record.rows, record.completions, strict=True))
            if answers is None:
                completions |= completed
            else:
                answers.add({INDEX: number, **left[number], COMPLETION: each} for number, each in completed.items())
            counts.update(record.counts)
            bar.set_postfix_str(f"{counts['reused_tokens'] / counts['prompt_tokens']:.0%} reused", refresh=False)
            bar.update(len(record.rows))
    summary = BatchSummary(len(rows), len(done), **counts)
    return BatchResult([completions[number] for number in range(len(rows))] if answers is None else None, summary)


def run_on_ray(
    load: Any,
    prompts: Any,
    how: How,
    num_workers: int,
    address: str | None,
    gpus: float | None = None,
) -> BatchResult:
    """Run a job on a cluster of Ray that is there, or on one that begins here and ends with the job."""
    int_of_at_least("num_workers", num_workers, 1, "workers")
    if find_spec("ray") is None:
        raise CacheArgumentError("workers need Ray: pip install ray, or '.[ray]'")
    import ray

    def records(rows: Mapping[int, Row]) -> Iterator[Record]:
        begins = not ray.is_initialized()
        if begins:
            ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=False)
        try:
            num_gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
            each = min(1.0, num_gpus / num_workers // 0.01 / 100) if gpus is None else gpus
            task: Any = ray.remote(load_and_complete).options(num_gpus=each, num_returns="streaming", max_retries=0)
            yield from _records(partial(task.remote, load, how), _stretches(rows, how, num_workers))
        finally:
            if begins:
                ray.shutdown()

    return run_job(records, prompts, how)


def _stretches(rows: Mapping[int, Row], how: How, num_workers: int) -> list[dict[int, Row]]:
    """Return the rows of each worker: stretches of the order of all prompts, in which letters stand for tokens."""
    numbers = [*rows]
    prompts = [prompt_of(row, number, how.column) for number, row in rows.items()]
    texts = [each if isinstance(each, str) else json.dumps(each) for each in prompts]
    parts = partition(ordered([[*map(ord, text)] for text in texts]), num_workers, how.max_new_tokens)
    return [{numbers[at]: rows[numbers[at]] for at in part} for part in parts if part]


def _records(start: Callable[[Mapping[int, Row]], Any], stretches: Iterable[dict[int, Row]]) -> Iterator[Record]:
    """Run each stretch on a worker, and yield what is done as it comes; WorkersLostError, at the end: one has died."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    running = [start(rows) for rows in stretches]
    lost: Exception | None = None
    try:
        while running:
            worker: Any = ray.wait(running, num_returns=1)[0][0]
            running.remove(worker)
            try:
                record: Record = ray.get(next(worker))
            except StopIteration:
                continue
            except RayTaskError as error:  # the worker's own error
                raise (error.cause if isinstance(error.cause, PagedCacheError) else error) from None
            except RayError as error:  # the worker has died: by itself, for want of memory, or with its machine
                lost = error
                continue
            running.append(worker)
            yield record
    finally:
        for each in running:  # tasks that still run where one has failed
            ray.cancel(each)
    if lost is not None:
        why = str(lost).strip().splitlines()[0]
        advice = "what `out` holds is done, and the same job resumes; give smaller batches if memory ran out"
        raise WorkersLostError(f"a worker has died ({why}); {advice}") from lost
