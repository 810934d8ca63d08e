"""Processes that a model is split over by transformers' tensor parallelism, and random calls that they make together.

Run it with `python -m tests.ranks --calls 500 --seed 0`. Which call comes next is one choice for all ranks; how large a
rank's pool is, what it forgets and when, is each rank's own. After every call the ranks compare what they ran.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import queue
import random
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_paged_cache import CacheArgumentError, OutOfBlocksError, PagedCacheError, PagedPrefixCache, PrefixStore

from .internals import make_forwards_cheap
from .reference import TOLERANCE, Forwards, assert_same, batch, run
from .tiny_models import build

ALPHABET = (1, 2, 3)  # few tokens, so that prompts share prefixes by chance
MAX_PROMPT = 40
CALLS_A_STORE = 50
WAITS_S = 60  # a collective that waits longer fails: then a rank has left the others
Scenario = Callable[..., Any]  # of the split model, and arguments


class RankPool:
    """Processes with one rank each, which run scenarios: functions of a module, called with the split model.

    Args:
        prepare: makes a rank's model of a folder.
    """

    def __init__(self, folder: Path, prepare: Callable[[Path], PreTrainedModel], num_ranks: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        build("llama").save_pretrained(folder)
        context = torch.multiprocessing.get_context("fork")  # which has imported everything
        self._tasks = [context.Queue() for _ in range(num_ranks)]
        self._results = context.Queue()
        self._processes = [
            context.Process(
                target=_serve, args=(rank, num_ranks, port, folder, prepare, tasks, self._results), daemon=True
            )
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def run(self, scenario: Scenario, *arguments: Any, timeout: float = 300) -> list[Any]:
        """What the scenario returns on each rank.

        Raises:
            AssertionError: it raised on some; with each rank's traceback. The processes are not to be used again.
        """
        for tasks in self._tasks:
            tasks.put((scenario, arguments))
        said: list[tuple[int, bool, Any]] = []
        waited_until = time.monotonic() + timeout
        while len(said) < len(self._tasks):
            try:
                said.append(self._results.get(timeout=1))
            except queue.Empty:
                assert all(process.is_alive() for process in self._processes), "a process has died; gloo says why"
                assert time.monotonic() < waited_until, f"no answer in {timeout} s"
        said.sort(key=lambda result: result[0])
        wrong = [f"rank {rank}:\n{result}" for rank, is_right, result in said if not is_right]
        assert not wrong, "\n".join(wrong)
        return [result for _, _, result in said]

    def close(self) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(
    rank: int, num_ranks: int, port: int, folder: Path, prepare: Callable[..., Any], tasks: Any, results: Any
) -> None:
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAITS_S))
    model = prepare(folder)
    while (task := tasks.get()) is not None:
        scenario, arguments = task
        faulthandler.dump_traceback_later(4 * WAITS_S, repeat=True)
        try:
            results.put((rank, True, scenario(model, *arguments)))
        except BaseException:  # noqa: BLE001  # whatever it was, the other processes continue
            results.put((rank, False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def tensor_parallel(folder: Path) -> PreTrainedModel:
    """The model of a folder, split over all ranks: each has some of the heads."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert model.tp_size == dist.get_world_size()
    assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 64 // dist.get_world_size()
    return model


def said_by_all(value: Any) -> list[Any]:
    """What each rank gives here."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def same_on_all(what: str, value: Any) -> None:
    """Every rank must give the same."""
    said = said_by_all(value)
    assert all(other == said[0] for other in said), f"{what}: {said}"


def kind_of_refusal(call: Callable[[], Any]) -> str:
    """The name of the error of ours that a call raises, "" for none; the same on all ranks."""
    try:
        call()
    except PagedCacheError as error:
        name = type(error).__name__
    else:
        name = ""
    same_on_all("refused", name)
    return name


class _Users:
    """Some caches of one store on each rank."""

    def __init__(self, model: PreTrainedModel, seed: str) -> None:
        self.model = model
        self.together, self.alone = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
        self.counts: Counter[str] = Counter()
        self.assistant = build("llama", seed=7)
        size = self.together.choice([2, 3, 4, 8])
        unlimited = self.together.random() < 0.2
        num_blocks = None if unlimited else self.alone.choice([20, 30, 45, 100]) * max(1, 8 // size)
        self.store = PrefixStore(model, block_size=size, num_blocks=num_blocks)
        self.caches: list[PagedPrefixCache] = []
        for _ in range(3):
            self.caches.append(PagedPrefixCache(self.store))
        self.seen: list[list[int]] = [[]]

    def step(self) -> None:
        cache = self.together.choice(self.caches)
        if self.alone.random() < 0.25:
            self.forget(cache)
        deeds = [self.generate] * 12 + [self.go_on] * 2 + [self.forwards] * 2 + [self.score] * 2
        deeds.append(self.change_weights)
        self.together.choice(deeds)(cache)
        cache.check()

    def forget(self, cache: PagedPrefixCache) -> None:
        """On this rank alone."""
        how = self.alone.choice(["rows", "all", "pin", "unpin"])
        self.counts[f"alone: {how}"] += 1
        if how == "rows":
            cache.reset()
        elif how == "all":
            self.store.reset_prefix_cache()
        elif how == "unpin":
            cache.unpin()
        elif tokens := self.alone.choice(self.seen):
            with suppress(OutOfBlocksError, CacheArgumentError):  # which says that nothing of them is cached
                cache.pin(tokens)

    def prompt(self) -> list[int]:
        """Something like what was asked before; the same on all ranks."""
        rng = self.together
        known = rng.choice(self.seen)
        known = known[: rng.randint(0, len(known))] if rng.random() < 0.6 else known
        tokens = (known + [rng.choice(ALPHABET) for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 17]))])[:MAX_PROMPT] or [1]
        self.seen.append(tokens)
        return tokens

    def generate(self, cache: PagedPrefixCache) -> None:
        rng = self.together
        prompts = [self.prompt() for _ in range(rng.choice([1, 1, 2, 3, 4]))]
        arguments: dict[str, Any] = {"max_new_tokens": rng.randint(1, 7)}
        how = rng.choice(["greedy", "greedy", "sample", "beams", "lookup", "assistant", "chunks", "hidden states"])
        if how == "sample":
            arguments |= {"do_sample": True, "num_return_sequences": rng.randint(1, 3), "top_k": 20}
        elif how == "beams":
            arguments |= {"num_beams": rng.randint(2, 3)}
        elif how == "lookup":
            arguments |= {"prompt_lookup_num_tokens": 3}
        elif how == "assistant":
            arguments |= {"assistant_model": self.assistant}
        elif how == "chunks":
            arguments |= {"prefill_chunk_size": rng.choice([5, 9, 16])}
        elif how == "hidden states":
            arguments |= {"output_hidden_states": True}
        if how in ("lookup", "assistant"):
            prompts = prompts[:1]
        self.compare(how, cache, {**arguments, **batch(*prompts)})

    def go_on(self, cache: PagedPrefixCache) -> None:
        """A prompt, and then only what follows it, which a rank that has dropped its rows meanwhile refuses."""
        prompt, more = self.prompt(), [self.together.choice(ALPHABET) for _ in range(self.together.randint(1, 9))]
        output = self.compare("begin", cache, {"max_new_tokens": 3, **batch(prompt)})
        if output is None:
            return
        if self.alone.random() < 0.1:
            cache.reset()
        whole = torch.cat((output.sequences[:, :-1], torch.tensor([more])), dim=1)
        reference = run(self.model, input_ids=whole, max_new_tokens=3)
        given = {"input_ids": whole[:, -len(more) :], "attention_mask": torch.ones_like(whole)}
        self.check("resume", cache, reference, lambda: run(self.model, cache, max_new_tokens=3, **given))

    def forwards(self, cache: PagedPrefixCache) -> None:
        """Plain forwards, of which the second resumes."""
        ids = torch.tensor([self.prompt() + self.prompt()])
        parts = ids.split(self.together.randint(1, ids.shape[1]), dim=1)
        cache.reset()
        with torch.no_grad():
            reference = self.model(ids).logits[:, -1]
            try:
                for number, part in enumerate(parts):
                    if number and self.together.random() < 0.04 and self.together.randrange(2) == dist.get_rank():
                        cache.reset()  # on one: where both drop their rows, both begin another prompt
                    logits: list[torch.Tensor] = []
                    with Forwards(self.model) as shapes:
                        refused = kind_of_refusal(
                            lambda part=part, logits=logits: logits.append(
                                self.model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
                            )
                        )
                    same_on_all("forwards", shapes)
                    self.counts[f"forward {refused}"] += 1
                    if refused:
                        return
                scale = float(reference.abs().max())
                torch.testing.assert_close(logits[0], reference, rtol=0, atol=TOLERANCE * scale)
            finally:
                cache.reset()

    def score(self, cache: PagedPrefixCache) -> None:
        context, answers = self.prompt(), [self.prompt() for _ in range(3)]
        scores: list[Any] = []
        with Forwards(self.model) as shapes:
            refused = kind_of_refusal(lambda: scores.extend(cache.score(context, answers)))
        same_on_all("forwards of a score", shapes)
        self.counts[f"score {refused}"] += 1
        for answer, score in zip(answers, scores, strict=False):
            with torch.no_grad():
                logits = self.model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
            wanted = logits.log_softmax(dim=-1)[range(len(answer)), answer]
            assert score.log_probs == pytest.approx(wanted.tolist(), abs=1e-3)

    def change_weights(self, cache: PagedPrefixCache) -> None:
        with torch.no_grad():
            self.model.model.norm.weight.mul_(1.001)
            self.model.model.layers[0].input_layernorm.weight.mul_(1.01)
        self.generate(cache)

    def compare(self, how: str, cache: PagedPrefixCache, arguments: dict[str, Any]) -> Any:
        seed = self.together.randrange(1 << 30)
        reference = run(self.model, seed=seed, **arguments)
        return self.check(how, cache, reference, lambda: run(self.model, cache, seed=seed, **arguments))

    def check(self, how: str, cache: PagedPrefixCache, reference: Any, call: Callable[[], Any]) -> Any:
        """The same forwards on all ranks, and the right result; None where all have refused."""
        outputs: list[Any] = []
        with Forwards(self.model) as shapes:
            refused = kind_of_refusal(lambda: outputs.append(call()))
        same_on_all(f"forwards of {how}", shapes)
        self.counts[f"{how} {refused}"] += 1
        if refused:
            assert how == "resume", f"{how}: {refused}"
            return None
        assert_same(reference, outputs[0])
        self.counts["reused tokens"] += cache.last_call.reused_tokens
        starts = said_by_all([row.matched_tokens for row in cache.last_call.rows])
        self.counts["calls before which ranks knew other tokens"] += any(start != starts[0] for start in starts)
        return outputs[0]


def random_calls(model: PreTrainedModel, num_calls: int, seed: int) -> Counter[str]:
    """Make that many random calls, on every rank.

    Returns:
        how many there were of each kind.
    """
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        make_forwards_cheap(patch)
        for first in range(0, num_calls, CALLS_A_STORE):
            users = _Users(model, f"{seed} {first}")
            for number in range(first, min(num_calls, first + CALLS_A_STORE)):
                try:
                    users.step()
                except BaseException as error:
                    error.add_note(f"call {number} of seed {seed}")
                    raise
            counts += users.counts
            counts["evictions"] += users.caches[0].stats().num_evictions
            for cache in users.caches:
                cache.reset()
                cache.unpin()
            assert users.caches[0].stats().num_blocks_in_use == 0
    return counts


@contextmanager
def two_ranks(prepare: Callable[[Path], PreTrainedModel] = tensor_parallel) -> Iterator[RankPool]:
    """Two processes that share a model."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, root])  # new processes find this file by its module's name
        pool = RankPool(Path(folder), prepare)
        try:
            yield pool
        finally:
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from tests import ranks  # by that name a new process finds it

    with ranks.two_ranks(ranks.tensor_parallel) as pool:
        start = time.perf_counter()
        said = pool.run(ranks.random_calls, given.calls, given.seed, timeout=3600)
        seconds = time.perf_counter() - start
    for kind, number in sorted(said[0].items()):
        print(f"{number:8}  {kind}")  # noqa: T201  # a command prints
    print(f"{given.calls} calls on {len(said)} ranks, 0 mismatches, {seconds:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
