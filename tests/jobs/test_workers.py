"""The batch job on a real local Ray: the same results as on one machine, also where a worker is killed, each prompt once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged_cache import (
    CacheArgumentError,
    PagedPrefixCache,
    WorkersLostError,
    generate_all,
    generate_all_on_ray,
)
from hf_paged_cache.jobs import workers as module
from hf_paged_cache.jobs.job import Batch
from hf_paged_cache.jobs.journal import Record, journal_of
from hf_paged_cache.jobs.options import How
from hf_paged_cache.jobs.workers import Worker, WorkerPool

ray = pytest.importorskip("ray")

SHARED = ["Question: What is one and one?\nAnswer: Two.\n" * 2, "Write a word that rhymes with light: " * 3]
PROMPTS = [f"{SHARED[number % 2]}{number} and {number}" for number in range(12)]


def load(folder: str, deadly: str | None = None, times: int = 1) -> tuple[Any, Any]:
    """Runs in a worker, which has no access to the tests; with `deadly`, its third forward kills it until that file notes so many deaths."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    seen = []

    def die(*_: Any) -> None:
        seen.append(1)
        with open(str(deadly), "a+b") as deaths:
            if len(seen) == 3 and deaths.tell() < times:
                deaths.write(b"x")
                deaths.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    if deadly is not None:
        model.register_forward_pre_hook(die)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["load"]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("local_ray")
def test_workers_give_the_same_results_also_where_one_is_killed(model_folder: str, tmp_path: Path) -> None:
    alone = generate_all(*load(model_folder), PROMPTS, max_new_tokens=4, batch_size=2).completions
    out, deadly = tmp_path / "out.jsonl", tmp_path / "dead"
    result = generate_all_on_ray(
        partial(load, model_folder, str(deadly)), PROMPTS, num_workers=2, out=out, max_new_tokens=4, batch_size=2, block_size=8, max_bytes="2 MB", disk_folder=tmp_path / "blocks", disk_bytes="1MB", trust_hooks=True
    )  # fmt: skip
    assert deadly.read_bytes()  # one was killed
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["completion"] for row in rows] == alone
    assert result.summary.num_prompts == len(PROMPTS)
    assert result.summary.reused_tokens > result.summary.prompt_tokens / 4
    assert (tmp_path / "blocks").is_dir()


def load_and_die(deadly: str) -> tuple[Any, Any]:
    """Runs in a worker."""
    with open(deadly, "ab") as deaths:
        deaths.write(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(("at", "times"), [(r"at the batch of row \d+", 3), ("before the first batch", 1)])
def test_what_kills_one_worker_after_another_ends_the_job_and_what_is_done_is_kept(
    at: str, times: int, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module._MOST_DEATHS == 3
    monkeypatch.setattr(module, "_MOST_DEATHS", times)  # each worker's process takes seconds to begin
    out, deadly = tmp_path / "out.jsonl", str(tmp_path / "dead")
    loads = partial(load_and_die, deadly) if "before" in at else partial(load, model_folder, deadly, 9)
    with pytest.raises(WorkersLostError, match=rf"^{times} workers died one after another {at} \(") as raised:
        generate_all_on_ray(loads, PROMPTS, num_workers=1, out=out, max_new_tokens=4, batch_size=8)
    assert "\n" not in str(raised.value)
    assert Path(deadly).read_bytes() == b"x" * times
    assert journal_of(out).exists() is ("before" not in at)


@pytest.mark.usefixtures("local_ray")
def test_what_a_worker_refuses_is_said_as_it_is_on_one_machine(model_folder: str) -> None:
    with pytest.raises(CacheArgumentError, match=r"^no_such_option is no option of generate"):
        generate_all_on_ray(partial(load, model_folder), PROMPTS, num_workers=1, no_such_option=1)


@pytest.mark.parametrize("load", ["name", torch.nn.Linear(1, 1)])
def test_what_cannot_be_called_for_a_model_is_refused_before_ray_begins(load: Any) -> None:
    with pytest.raises(
        CacheArgumentError, match=r"^load is of type (str|Linear); give a function that returns a model"
    ):
        generate_all_on_ray(load, PROMPTS, num_workers=1)


def test_a_worker_says_what_its_function_returned() -> None:
    with pytest.raises(CacheArgumentError, match=r"^load returned int; it is to return a model and its tokenizer$"):
        Worker(lambda: 1, How()).ask("describe")  # type: ignore[arg-type, return-value]


def test_a_worker_has_a_cache_of_the_sizes_that_are_given(model_folder: str) -> None:
    how = How(options={"block_size": 8, "max_bytes": "1MB"})
    worker = Worker(partial(load, model_folder), how)
    assert worker.ask("describe").block_size == 8
    cache = worker.calls.cache
    assert (
        cache.stats().num_blocks
        == PagedPrefixCache(cache.store.model, block_size=8, max_bytes=10**6).stats().num_blocks
    )


@pytest.mark.parametrize("sizes", [{"max_bytes": "much"}, {"disk_bytes": "1GB"}])
def test_sizes_that_are_none_are_refused_before_ray_begins(sizes: Any) -> None:
    with pytest.raises(CacheArgumentError, match=f"^{next(iter(sizes))} is "):
        generate_all_on_ray(lambda: pytest.fail("it was loaded"), PROMPTS, num_workers=1, **sizes)


@pytest.mark.parametrize("share", [-1, 1.5])
def test_a_share_of_a_gpu_that_ray_does_not_know_is_refused(share: float) -> None:
    with pytest.raises(CacheArgumentError, match=f"gpus_per_worker is {share}; give 0 or more, and above 1 a whole"):
        generate_all_on_ray(lambda: (None, None), PROMPTS, num_workers=1, gpus_per_worker=share)


@pytest.mark.parametrize("num_gpus", [0, 3])
def test_workers_that_would_wait_for_gpus_for_ever_are_refused(num_gpus: int) -> None:
    require = module._require_gpus
    with pytest.raises(
        CacheArgumentError, match=f"2 workers with gpus_per_worker=2 need 4 GPUs, and Ray has {num_gpus}: "
    ):
        require(2, 2, num_gpus, may_come=False)
    with pytest.warns(UserWarning, match="wait until the cluster has more"):
        require(2, 2, num_gpus, may_come=True)
    require(3, 1.0, 3, may_come=False)


def test_a_handler_of_sigterm_stays_where_ray_sets_its_own() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with module._handler_of_termination_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CacheArgumentError, match=r"^workers need Ray: pip install ray, or '\.\[ray\]'$"):
        generate_all_on_ray(lambda: (None, None), PROMPTS, num_workers=1)


# Who runs what, without Ray


class _Later:
    """A call of a fake worker: what it will return or raise."""

    def __init__(self, outcome: Callable[[], Any]) -> None:
        self.outcome = outcome


class _Method:
    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def remote(self, *arguments: Any) -> _Later:
        return _Later(partial(self._run, *arguments))


class _FakeWorker:
    def __init__(self, name: int, log: list[tuple[int, int]]) -> None:
        self._name, self._log = name, log
        self.ask = _Method(self._answer)

    def _answer(self, question: str, rows: list[int], prompts: list[Any], done: frozenset[int]) -> list[Record]:
        self._log.append((self._name, rows[0]))
        return [Record(rows, ["" for _ in rows], {})]


def queues(*lengths: int) -> list[list[Batch]]:
    numbers = iter(range(1000))
    return [[Batch([next(numbers)], []) for _ in range(length)] for length in lengths]


def test_a_worker_without_batches_takes_the_last_of_the_one_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda later: later.outcome())
    monkeypatch.setattr(ray, "wait", lambda waiting, num_returns: (waiting[:1], waiting[1:]))
    log: list[tuple[int, int]] = []
    records = list(WorkerPool([_FakeWorker(name, log) for name in range(3)]).run(queues(6, 1, 0)))
    assert sorted(record.rows[0] for record in records) == [*range(7)]
    assert next(row for name, row in log if name == 2) == 5
    assert max(Counter(name for name, _ in log).values()) <= 3
