"""`generate_all_on_ray`: the batch job on many machines. Each worker, an actor of Ray, has a model and a store of its own.

Which worker runs what is `order.partition`'s; a worker that has no more takes the last batch of the one that has most left. Ray
begins an actor that died anew, and gives it the batch that it was at. Plain actors and not Ray Data: its `map_batches` gives a block of
rows to any actor that is free, so what shares a prefix would not stay together. Journal, output and summary are those of the job on one
machine.
"""

import os
import signal
import socket
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cached_property
from importlib.util import find_spec
from os import PathLike
from textwrap import shorten
from typing import Any

from torch import nn

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError, PagedCacheError
from ..store_options import shows_store_options
from ..wording import counted
from .calls import BatchCalls
from .job import Batch, BatchResult, Crew, run_job
from .journal import Record
from .options import How
from .rows import Row

_SECONDS_TO_ANSWER = 10.0
_MOST_DEATHS = 3  # of workers at one batch


class WorkersLostError(PagedCacheError):
    """Raised when workers of a batch job die again and again at one batch; what is done is kept.

    Examples:
        >>> try:
        ...     raise WorkersLostError("3 workers died one after another at the batch of row 8")
        ... except PagedCacheError as error:
        ...     print(error)  # the same job, started again, resumes after the last batch that was done
        3 workers died one after another at the batch of row 8
    """


class Worker:
    """A model, a store and the batches that run on it: what Ray makes an actor of.

    Args:
        load: makes the model and its tokenizer, in the worker's process.
    """

    def __init__(self, load: Callable[[], tuple[Any, Any]], how: How) -> None:
        self._load, self._how = load, how

    @cached_property
    def calls(self) -> BatchCalls:
        """Loaded at the first question: an error in an actor's making would arrive as its death."""
        loaded = self._load()
        if not isinstance(loaded, tuple | list) or len(loaded) != 2:
            kind = type(loaded).__name__
            raise CacheArgumentError(f"load returned {kind}; it is to return a model and its tokenizer")
        return BatchCalls(*loaded, self._how)

    def ask(self, question: str, *given: Any) -> Any:
        """What the method `question` of `BatchCalls` answers; as a list, if it yields."""
        answer = getattr(self.calls, question)(*given)
        return list(answer) if isinstance(answer, Iterator) else answer


@shows_store_options
def generate_all_on_ray(
    load: Callable[[], tuple[Any, Any]],
    prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]",
    *,
    num_workers: int,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    **options: Any,
) -> BatchResult:
    """`generate_all` on workers of Ray: prompts that share a prefix go to one of them, and a worker that dies is replaced.

    With greedy search the completions are those of `generate_all`. Samples follow from `seed` and the batch, and batches from
    `num_workers`.

    Args:
        load: makes the model and its tokenizer in each worker's process, such as `functools.partial(load_my_model, "name")`; it is
            pickled.
        num_workers: actors, each with a model and a store.
        address: of a Ray cluster, such as "auto"; None: the one this process is connected to, the one that `RAY_ADDRESS` names,
            or a new one on this machine.
        gpus_per_worker: of Ray's accounting; None: 1, or where there are fewer GPUs than workers an equal part of one.
        options: all others of `generate_all` but `cache`, by name. `block_size`, `num_blocks` and the like are of each worker's
            cache; a `disk_folder` that all reach gives a new worker the prefixes of the others.

    Raises:
        CacheArgumentError: see `generate_all`; or Ray is not installed.
        WorkersLostError: three workers died at one batch, or before the first one. What is done is in the journal of `out`.
        UnsupportedModelError: see `PagedPrefixCache`.

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
    if gpus_per_worker is not None and not (0 <= gpus_per_worker <= 1 or gpus_per_worker in range(1, 1000)):
        raise CacheArgumentError(f"gpus_per_worker is {gpus_per_worker!r}; give 0 or more, and above 1 a whole number")
    own = {each.name: options.pop(each.name) for each in fields(How) if each.name in options}
    how = How(**own, options=options)
    if not callable(load) or isinstance(load, nn.Module):
        raise CacheArgumentError(
            f"load is of type {type(load).__name__}; give a function that returns a model and its tokenizer, such as "
            "functools.partial(load_my_model, 'name'): each worker calls it"
        )
    if find_spec("ray") is None:
        raise CacheArgumentError("workers need Ray: pip install ray, or '.[ray]'")
    import ray

    if address is not None and ray.is_initialized():
        raise CacheArgumentError(
            f"address is {address!r}, and this process is connected to a cluster of Ray: leave it out"
        )
    with ExitStack() as stack:
        is_own = not ray.is_initialized() and address is None and not os.environ.get("RAY_ADDRESS")
        if not ray.is_initialized():
            with _handler_of_termination_kept(), _answering(address):
                ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=False)
            stack.callback(ray.shutdown)
        num_gpus: float = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
        if gpus_per_worker is None:
            gpus_per_worker = min(1.0, num_gpus / num_workers // 0.01 / 100)
        _require_gpus(num_workers, gpus_per_worker, num_gpus, may_come=not is_own)
        actor: Any = ray.remote(Worker).options(
            num_gpus=gpus_per_worker, max_restarts=-1, max_task_retries=_MOST_DEATHS - 1
        )
        workers = WorkerPool([actor.remote(load, how) for _ in range(num_workers)])
        stack.callback(workers.shut_down)
        return run_job(workers, prompts, how)


@contextmanager
def _handler_of_termination_kept() -> Iterator[None]:
    """Ray sets a handler of SIGTERM, and one that aborts below it; the process's own stays, if it has one."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _answering(address: str | None) -> Iterator[None]:
    """Refuse a cluster that nobody answers for: Ray itself would wait for minutes.

    Raises:
        CacheArgumentError: there is none at this address.
    """
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    try:
        if host and port.isdecimal():
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
        yield
    except OSError as error:  # Ray's ConnectionError, too
        said = shorten(str(error), 100, placeholder=" ...")
        raise CacheArgumentError(
            f"no cluster of Ray answers at {address} ({said}); without an address there is a new one on this machine"
        ) from error


def _require_gpus(num_workers: int, gpus_per_worker: float, num_gpus: float, *, may_come: bool) -> None:
    """Refuse workers that would wait for GPUs for ever; a cluster may get more of them."""
    if num_workers * gpus_per_worker <= num_gpus:
        return
    needed = f"{counted(num_workers, 'worker')} with {gpus_per_worker=:g} need {num_workers * gpus_per_worker:g} GPUs"
    problem = f"{needed}, and Ray has {num_gpus:g}"
    if not may_come:
        raise CacheArgumentError(f"{problem}: give fewer")
    warnings.warn(f"{problem} so far: those without one wait until the cluster has more", stacklevel=3)


class WorkerPool(Crew):
    """Workers that run the batches of a job.

    Args:
        workers: actors of `Worker`.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers, self.num_workers = workers, len(workers)

    def ask(self, question: str, *given: Any) -> Any:
        """What the first worker answers, before the first batch.

        Raises:
            WorkersLostError: three workers died of the question, such as of loading the model.
        """
        return _answer(self._workers[0].ask.remote(question, *given), "before the first batch")

    def run(self, queues: list[list[Batch]]) -> Iterator[Record]:
        """Run the batches of each worker, and yield what is done as it comes.

        Raises:
            WorkersLostError: three workers died at one batch.
        """
        import ray

        waiting = [deque(batches) for batches in queues]
        running: dict[Any, tuple[int, Batch]] = {}

        def give(number: int) -> None:
            """The worker's next batch, or the last one of the worker that has most left."""
            most = max(waiting, key=len)
            batch = waiting[number].popleft() if waiting[number] else most.pop() if most else None
            if batch is not None:
                running[self._workers[number].ask.remote("run", *batch)] = number, batch

        for number in range(self.num_workers):
            give(number)
        while running:
            (done,), _ = ray.wait([*running], num_returns=1)
            number, batch = running.pop(done)
            records = _answer(done, f"at the batch of row {batch.rows[0]}")
            give(number)
            yield from records

    def shut_down(self) -> None:
        """End all workers."""
        import ray

        for worker in self._workers:
            ray.kill(worker)


def _answer(reference: Any, at: str) -> Any:
    """What a worker returns. Its own errors are raised here as they were there, those of ours without Ray's trace round them.

    Raises:
        WorkersLostError: as many have died of it as Ray was to begin anew: by themselves, for want of memory, or with their machine.
    """
    import ray
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, PagedCacheError):
            raise error.cause from None
        raise
    except (RayActorError, OutOfMemoryError, NodeDiedError) as error:
        raise WorkersLostError(
            f"{_MOST_DEATHS} workers died one after another {at} ({str(error).strip().splitlines()[0]}); "
            "give smaller batches, fewer workers, or a machine with more memory"
        ) from error
