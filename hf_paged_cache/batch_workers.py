"""`generate_all_on_ray`: the batch job on many machines. Each worker, an actor of Ray, has a model and a store of its own.

Which worker runs what is `batch.placement`'s; a worker that has no more takes the last batch of the one that has most left, and
one that dies is replaced, with the batch that it was at. Plain actors and not Ray Data: its `map_batches` gives a block of rows to
any actor that is free, so what shares a prefix would not stay together. Journal, output and summary are those of the job on one machine.
"""

import os
import signal
import socket
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib.util import find_spec
from os import PathLike
from textwrap import shorten
from typing import Any, Literal, NamedTuple

from torch import nn

from .batch.journal import Record
from .batch.prompt_files import Row
from .batch_calls import BatchCalls
from .batch_job import Batch, BatchResult, How, Runner, given_options, run_job
from .batch_options import generation_config
from .blocks.arguments import int_of_at_least
from .cache import PagedPrefixCache
from .errors import CacheArgumentError, PagedCacheError, WorkersLostError
from .model.identity import sampled_digest
from .model.placeholders import Placeholders
from .model.support import unwrapped
from .wording import counted

_SECONDS_TO_ANSWER = 10.0
_MOST_DEATHS = 3  # of workers at one batch


class Described(NamedTuple):
    """What the driver must know of the workers' model."""

    tokenizer: Any
    config: Any
    placeholders: Placeholders
    generation_config: Any
    digest: str
    block_size: int


class Worker:
    """A model, a store and the batches that run on it: what Ray makes an actor of.

    Args:
        load: makes the model and its tokenizer, in the worker's process.
        sizes: options of its cache, and of the store under it.
        options: of `generate`.
        seed: of samples.
    """

    def __init__(
        self, load: Callable[[], tuple[Any, Any]], sizes: Mapping[str, Any], options: Mapping[str, Any], seed: int
    ) -> None:
        self._given = load, dict(sizes), dict(options), seed

    @cached_property
    def _ready(self) -> "_Ready":
        """Loaded at the first question: an error in an actor's making would arrive as its death."""
        load, sizes, options, seed = self._given
        loaded = load()
        if not isinstance(loaded, tuple | list) or len(loaded) != 2:
            raise CacheArgumentError(
                f"load returned {type(loaded).__name__}; it is to return a model and its tokenizer"
            )
        model, tokenizer = loaded
        config = generation_config(unwrapped(model), options)
        cache = PagedPrefixCache(model, **sizes)
        return _Ready(tokenizer, cache, config, BatchCalls(cache, tokenizer, config, options, seed))

    def describe(self) -> Described:
        """The model, as the driver must know it."""
        tokenizer, cache, config, _ = self._ready
        store = cache.store
        digest = sampled_digest(store.model)
        return Described(tokenizer, store.model.config, store.placeholders, config, digest, store.blocks.block_size)

    def try_out(self, prompts: list[list[int]]) -> None:
        """See `BatchCalls.try_out`."""
        self._ready.calls.try_out(prompts)

    def run(self, batch: Batch) -> list[Record]:
        """The completions of one batch."""
        return list(self._ready.calls.run(*batch))


class _Ready(NamedTuple):
    tokenizer: Any
    cache: PagedPrefixCache
    config: Any
    calls: BatchCalls


def generate_all_on_ray(
    load: Callable[[], tuple[Any, Any]],
    prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]",
    *,
    num_workers: int,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    out: "str | PathLike[str] | None" = None,
    column: str = "prompt",
    order: Literal["given", "done"] = "given",
    batch_size: int = 8,
    max_new_tokens: int = 128,
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
    """`generate_all` on workers of Ray: prompts that share a prefix go to one of them, and a worker that dies is replaced.

    With greedy search the completions are those of `generate_all`. Samples follow from `seed` and the batch, and batches from
    `num_workers`. `block_size` and the options that follow it are of each worker's cache, see `PagedPrefixCache`; a `disk_folder`
    that all reach gives a new worker the prefixes of the others.

    Args:
        load: makes the model and its tokenizer in each worker's process, such as `functools.partial(load_my_model, "name")`; it is
            pickled.
        num_workers: actors, each with a model and a store.
        address: of a Ray cluster, such as "auto"; None: the one this process is connected to, the one that `RAY_ADDRESS` names,
            or a new one on this machine.
        gpus_per_worker: of Ray's accounting; None: 1, or where there are fewer GPUs than workers an equal part of one.

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
        given = load, sizes, {"max_new_tokens": max_new_tokens, **generation}, seed
        actor: Any = ray.remote(Worker).options(num_gpus=gpus_per_worker)
        workers = WorkerPool(lambda: actor.remote(*given), num_workers)
        stack.callback(workers.shut_down)
        told = workers.ask_first("describe")
        runner = Runner(
            tokenizer=told.tokenizer,
            config=told.config,
            placeholders=told.placeholders,
            generation_config=told.generation_config,
            digest=lambda: told.digest,
            block_size=told.block_size,
            num_workers=num_workers,
            try_out=lambda beginnings: workers.ask_first("try_out", beginnings),
            run=workers.run,
        )
        return run_job(runner, prompts, how)


@contextmanager
def _handler_of_termination_kept() -> Iterator[None]:
    """Ray sets a handler of SIGTERM, and one that aborts below it; the process's own goes on, if it has one."""
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
    problem = (
        f"{counted(num_workers, 'worker')} with gpus_per_worker={gpus_per_worker:g} need {num_workers * gpus_per_worker:g} "
        f"GPUs, and Ray has {num_gpus:g}"
    )
    if not may_come:
        raise CacheArgumentError(f"{problem}: give fewer")
    warnings.warn(f"{problem} so far: those without one wait until the cluster has more", stacklevel=3)


class WorkerPool:
    """Workers, and what each of them is at.

    Args:
        start: starts one more.
    """

    def __init__(self, start: Callable[[], Any], num_workers: int) -> None:
        self._start = start
        self._workers = [start() for _ in range(num_workers)]

    def ask_first(self, question: str, *given: Any) -> Any:
        """What the first worker answers, before the first batch.

        Raises:
            WorkersLostError: three workers died of the question, such as of loading the model.
        """
        deaths = 0
        while True:
            try:
                return _answer(getattr(self._workers[0], question).remote(*given))
            except _deaths() as error:
                deaths += 1
                self._replace(0, deaths, "before the first batch", error)

    def run(self, queues: list[list[Batch]]) -> Iterator[Record]:
        """Run the batches of each worker, and yield what is done as it comes.

        Raises:
            WorkersLostError: three workers died at one batch.
        """
        import ray

        waiting = [deque(batches) for batches in queues]
        running: dict[Any, tuple[int, Batch]] = {}
        deaths: Counter[int] = Counter()  # first row of a batch -> workers that died at it

        def give(number: int) -> None:
            """The worker's next batch, or the last one of the worker that has most left."""
            most = max(waiting, key=len)
            batch = waiting[number].popleft() if waiting[number] else most.pop() if most else None
            if batch is not None:
                running[self._workers[number].run.remote(batch)] = number, batch

        for number in range(len(self._workers)):
            give(number)
        while running:
            (done,), _ = ray.wait([*running], num_returns=1)
            number, batch = running.pop(done)
            try:
                records = _answer(done)
            except _deaths() as error:
                first = batch.rows[0]
                deaths[first] += 1
                self._replace(number, deaths[first], f"at the batch of row {first}", error)
                waiting[number].appendleft(batch)
                give(number)
                continue
            give(number)
            yield from records

    def _replace(self, number: int, deaths: int, at: str, error: Exception) -> None:
        """Hire one for a worker that died; not for the third that died at the same."""
        if deaths >= _MOST_DEATHS:
            raise WorkersLostError(
                f"{deaths} workers died one after another {at} ({str(error).strip().splitlines()[0]}); "
                "give smaller batches, fewer workers, or a machine with more memory"
            ) from error
        self._workers[number] = self._start()

    def shut_down(self) -> None:
        """End all workers."""
        import ray

        for worker in self._workers:
            ray.kill(worker)


def _deaths() -> tuple[type[Exception], ...]:
    """What Ray raises where a worker died: by itself, for want of memory, or with its machine."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

    return RayActorError, OutOfMemoryError, NodeDiedError


def _answer(reference: Any) -> Any:
    """What a worker returns. Its own errors are raised here as they were there, those of ours without Ray's trace round them."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PagedCacheError):
            raise error.cause from None
        raise
