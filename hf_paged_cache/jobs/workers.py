"""Runs a batch job on many machines with Ray: `generate_all_on_ray`.

Each worker, a task of Ray, has a model and a store of its own, and runs a stretch of the order of all prompts, in which
letters stand for tokens, since the driver has no tokenizer. Ray Data would give a block of rows to any worker that is
free, so what shares a prefix would not stay together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError, PagedCacheError
from ..store_options import shows_store_options
from .job import BatchResult, load_and_complete, run_job
from .options import How
from .order import ordered, partition
from .prompts import Row, prompt_of

if TYPE_CHECKING:
    from .calls import Record

_MOST_DEATHS = 3  # deaths of workers, without a batch done between them


class WorkersLostError(PagedCacheError):
    """Raised when workers of a batch job die one after another: what is done is in the output, and the same job
    resumes.

    Examples:
        >>> issubclass(WorkersLostError, PagedCacheError)
        True
    """


@shows_store_options
def generate_all_on_ray(
    load: Callable[[], tuple[Any, Any]],
    prompts: str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row],
    *,
    num_workers: int,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    **options: Any,
) -> BatchResult:
    """Run `generate_all` on workers of Ray.

    Prompts that share a prefix go to one worker, and a worker that dies is replaced.

    Args:
        load: function that makes the model and its tokenizer in each worker's process, such as
            `functools.partial(load_my_model, "name")`; it is pickled.
        num_workers: number of tasks, each with a model and a store.
        address: address of a Ray cluster, such as "auto"; None: the cluster to which this process is connected, the one
            that `RAY_ADDRESS` names, or a new one on this machine.
        gpus_per_worker: GPUs that Ray counts for a worker; None: 1, or an equal part of a GPU if there are fewer GPUs
            than workers.
        options: all other options of `generate_all` but `cache`, by name. A `disk_folder` that all workers reach gives
            a new worker the prefixes of the others.

    Raises:
        CacheArgumentError: see `generate_all`; or Ray is not installed. What only a model can tell of a prompt, the
            prompt's worker refuses.
        WorkersLostError: three workers died one after another.

    Examples:
        >>> from functools import partial
        >>> from hf_paged_cache.cli.demo_model import load_demo_model
        >>> model.save_pretrained(folder), tokenizer.save_pretrained(folder)
        (...)
        >>> load = partial(load_demo_model, folder)
        >>> len(generate_all_on_ray(load, ["One and one", "One and two"], num_workers=1, max_new_tokens=4).completions)
        2
    """
    int_of_at_least("num_workers", num_workers, 1, "workers")
    own = {each.name: options.pop(each.name) for each in fields(How) if each.name in options}
    how = How(**own, options=options)
    if not callable(load) or hasattr(load, "parameters"):
        kind, such = type(load).__name__, "functools.partial(load_my_model, 'name')"
        raise CacheArgumentError(f"load is a {kind}; give a function that returns model and tokenizer, such as {such}")
    return run_on_ray(load, prompts, how, {}, num_workers, address, gpus_per_worker)


def run_on_ray(
    load: Any,
    prompts: Any,
    how: How,
    facts: Mapping[str, str],
    num_workers: int,
    address: str | None,
    gpus: float | None = None,
) -> BatchResult:
    """Run a job on a cluster of Ray that is there, or on one that begins here and ends with the job."""
    if find_spec("ray") is None:
        raise CacheArgumentError("workers need Ray: pip install ray, or '.[ray]'")
    import ray

    with ExitStack() as stack:

        def records(rows: Mapping[int, Row]) -> Iterator[Record]:
            if not ray.is_initialized():
                ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=False)
                stack.callback(ray.shutdown)
            num_gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
            each = min(1.0, num_gpus / num_workers // 0.01 / 100) if gpus is None else gpus
            task: Any = ray.remote(load_and_complete).options(num_gpus=each, num_returns="streaming", max_retries=0)
            return _records(partial(task.remote, load, how), _stretches(rows, how, num_workers))

        return run_job(records, prompts, how, facts)


def _stretches(rows: Mapping[int, Row], how: How, num_workers: int) -> list[dict[int, Row]]:
    """Return the rows of each worker."""
    numbers = [*rows]
    prompts = [prompt_of(row, number, how.column) for number, row in rows.items()]
    texts = [each if isinstance(each, str) else json.dumps(each) for each in prompts]
    parts = partition(ordered([[*map(ord, text)] for text in texts]), num_workers, how.max_new_tokens)
    return [{numbers[at]: rows[numbers[at]] for at in part} for part in parts if part]


def _records(start: Callable[[Mapping[int, Row]], Any], stretches: Iterable[dict[int, Row]]) -> Iterator[Record]:
    """Run stretches, and yield what is done as it comes. What a worker that died has left, another one runs."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    running: dict[Any, dict[int, Row]] = {start(rows): rows for rows in stretches}
    num_deaths = 0
    try:
        while running:
            ready: Any = ray.wait([*running], num_returns=1)[0][0]
            left = running.pop(ready)
            try:
                record: Record = ray.get(next(ready))
            except StopIteration:
                continue
            except RayTaskError as error:  # the worker's own error
                raise (error.cause if isinstance(error.cause, PagedCacheError) else error) from None
            except RayError as error:  # the worker has died: by itself, for want of memory, or with its machine
                num_deaths += 1
                if num_deaths == _MOST_DEATHS:
                    said = f"{num_deaths} workers died one after another ({str(error).strip().splitlines()[0]})"
                    raise WorkersLostError(f"{said}; give smaller batches, or a machine with more memory") from error
                running[start(left)] = left
                continue
            running[ready], num_deaths = left, 0
            for number in record.rows:
                del left[number]
            yield record
    finally:
        for each in running:  # tasks that still run where one has failed
            ray.cancel(each)
