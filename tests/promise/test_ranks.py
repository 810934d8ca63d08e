"""Two processes that share a model run the same forwards, or refuse them alike, whatever each has cached.

The model is split by transformers' own tensor parallelism, over gloo. Every scenario runs on both ranks.
"""

import faulthandler
import os
import queue
import random
import socket
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_paged_cache import (
    CacheArgumentError,
    OutOfBlocksError,
    PagedCacheError,
    PagedPrefixCache,
    PrefixStore,
    UnsupportedModelError,
)

from ..internals import make_forwards_cheap
from ..reference import Forwards, assert_near, assert_same, batch, row, run
from ..tiny_models import build

FEW_SHOT = row((1, 64))
QUESTIONS = [[*FEW_SHOT, *row((seed, 9))] for seed in (2, 3, 4)]
IDS = torch.tensor([[*FEW_SHOT, 5]])
WAITS_S = 60  # a collective that waits longer fails: then a rank has left the other


class Ranks:
    """Two processes with one rank each, which run scenarios: functions that are called with the split model.

    Args:
        prepare: makes a rank's model of a folder.
    """

    def __init__(self, prepare: Callable[[Path], PreTrainedModel], folder: Path) -> None:
        self._prepare, self._folder, self._processes = prepare, folder, list[Any]()
        build("llama").save_pretrained(folder)

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = torch.multiprocessing.get_context("fork")  # which has imported everything
        self._tasks, self._results = [context.Queue() for _ in range(2)], context.Queue()
        for rank, tasks in enumerate(self._tasks):
            arguments = (rank, port, self._folder, self._prepare, tasks, self._results)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._processes[-1].start()

    def __call__(self, scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the scenario returns on each rank; an AssertionError with tracebacks ends the processes."""
        if not self._processes:
            self._start()
        for tasks in self._tasks:
            tasks.put((scenario, arguments))
        said: dict[int, tuple[bool, Any]] = {}
        waited_until = time.monotonic() + 300
        try:
            while len(said) < 2:
                with suppress(queue.Empty):
                    rank, *result = self._results.get(timeout=1)
                    said[rank] = (result[0], result[1])
                assert all(process.is_alive() for process in self._processes), "a process has died; gloo says why"
                assert time.monotonic() < waited_until, "no answer in 300 s"
            assert all(is_right for is_right, _ in said.values()), "\n".join(map(str, said.values()))
        except BaseException:
            self.close()
            raise
        return [said[rank][1] for rank in range(2)]

    def close(self) -> None:
        for process, tasks in zip(self._processes, getattr(self, "_tasks", ()), strict=False):
            tasks.put(None)
            process.join(timeout=10)
            process.kill()
        self._processes.clear()


def _serve(rank: int, port: int, folder: Path, prepare: Callable[..., Any], tasks: Any, results: Any) -> None:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
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
        except BaseException:  # noqa: BLE001  # whatever it was, the other process continues
            results.put((rank, False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def tensor_parallel(folder: Path) -> PreTrainedModel:
    """The model of a folder, split over both ranks: each has some of the heads."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert model.tp_size == dist.get_world_size()
    assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 64 // dist.get_world_size()
    return model


def sharded(folder: Path) -> PreTrainedModel:
    """FSDP: each rank has a part of every weight, and inputs of its own."""
    model = build("llama")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tensor_parallel, tmp_path_factory.mktemp("model"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def on_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(sharded, tmp_path_factory.mktemp("model"))
    yield ranks
    ranks.close()


def is_first() -> bool:
    return bool(dist.get_rank() == 0)


def shapes_of(model: PreTrainedModel, call: Callable[[], Any]) -> list[tuple[int, int]]:
    with Forwards(model) as shapes:
        call()
    return shapes


def refusal(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def said_by_all(value: Any) -> list[Any]:
    """What each rank gives here."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


WAYS: list[dict[str, Any]] = [
    *[{}] * 2,
    {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
    {"prefill_chunk_size": 9},
    {"output_hidden_states": True},
]


class Users:
    """Some caches of one store on each rank, which ask the same; what is forgotten, and when, is each rank's own."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.together, self.alone = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
        self.counts: Counter[str] = Counter()
        self.store = PrefixStore(model, block_size=4, num_blocks=self.alone.choice([40, 60, 90]))
        self.caches = [PagedPrefixCache(self.store) for _ in range(3)]
        self.seen: list[list[int]] = [[]]

    def step(self) -> None:
        cache = self.together.choice(self.caches)
        if self.alone.random() < 0.25:
            self.forget(cache)
        self.score(cache) if self.together.random() < 0.15 else self.generate(cache)
        cache.check()

    def forget(self, cache: PagedPrefixCache) -> None:
        """On this rank alone."""
        how = self.alone.choice(["rows", "all", "pin", "unpin"])
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
        """Something like what was asked before, of few tokens; the same on both ranks."""
        rng = self.together
        known = rng.choice(self.seen)
        known = known[: rng.randint(0, len(known))] if rng.random() < 0.6 else known
        tokens = (known + rng.choices((1, 2, 3), k=rng.choice([0, 1, 2, 3, 5, 8, 17])))[:40] or [1]
        self.seen.append(tokens)
        return tokens

    def generate(self, cache: PagedPrefixCache) -> None:
        rng = self.together
        way, prompts = rng.choice(WAYS), [self.prompt() for _ in range(rng.choice([1, 1, 2, 3, 4]))]
        if "prompt_lookup_num_tokens" in way:
            prompts = prompts[:1]
        given = {"max_new_tokens": rng.randint(1, 7), **way, **batch(*prompts), "seed": rng.randrange(1 << 30)}
        reference = run(self.model, **given)
        with Forwards(self.model) as shapes:
            assert_same(reference, run(self.model, cache, **given))
        one, other = said_by_all(shapes)
        assert one == other, way
        self.counts["reused tokens"] += cache.last_call.reused_tokens
        starts = said_by_all([of_row.matched_tokens for of_row in cache.last_call.rows])
        self.counts["calls before which ranks knew other tokens"] += starts[0] != starts[1]

    def score(self, cache: PagedPrefixCache) -> None:
        context, answers = self.prompt(), [self.prompt() for _ in range(3)]
        with Forwards(self.model) as shapes:
            scores = cache.score(context, answers)
        one, other = said_by_all(shapes)
        assert one == other
        for answer, score in zip(answers, scores, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
            wanted = logits.log_softmax(dim=-1)[range(len(answer)), answer]
            assert score.log_probs == pytest.approx(wanted.tolist(), abs=1e-3)


def _random_calls(model: PreTrainedModel, num_calls: int, seed: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        make_forwards_cheap(patch)
        users = Users(model, seed)
        for _ in range(num_calls):
            users.step()
        for cache in users.caches:
            cache.reset()
            cache.unpin()
        assert users.store.stats().num_blocks_in_use == 0
    return users.counts


def test_random_calls_run_alike_on_both_ranks(on_ranks: Ranks) -> None:
    counts = on_ranks(_random_calls, 25, 1)
    assert counts[0]["reused tokens"] > 20
    assert counts[0]["calls before which ranks knew other tokens"] > 0


def _knows_less(model: PreTrainedModel) -> Any:
    cache = PagedPrefixCache(model, block_size=8)
    reference = run(model, input_ids=IDS)
    run(model, cache, input_ids=IDS[:, :40], max_new_tokens=1)
    if is_first():
        cache.reset()
        cache.reset_prefix_cache()
    with Forwards(model) as shapes:
        output = run(model, cache, input_ids=IDS)
    assert_same(reference, output)
    cache.check()
    return shapes[0], cache.last_call.rows[0].stopped


def test_what_one_rank_has_lost_both_compute(on_ranks: Ranks) -> None:
    (one, _), (other, why) = on_ranks(_knows_less)
    assert one == other == (1, 65)
    assert "another rank's hit is shorter" in why


def _plain_forwards(model: PreTrainedModel) -> Any:
    cache = PagedPrefixCache(model, block_size=8)
    with torch.no_grad():
        wanted = model(IDS).logits[:, -1]
        model(IDS[:, :48], past_key_values=cache, logits_to_keep=1)
        cache.reset()
        if is_first():
            cache.reset_prefix_cache()
        with Forwards(model) as shapes:
            model(IDS[:, :48], past_key_values=cache, logits_to_keep=1)
            got = model(IDS[:, 48:], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        assert_near(got, wanted)
        if is_first():
            cache.reset()
        why = refusal(lambda: model(IDS[:, -1:], past_key_values=cache), CacheArgumentError)
    return shapes, why


def test_plain_forwards_start_alike_and_rows_lost_on_one_rank_are_an_error_on_both(on_ranks: Ranks) -> None:
    (one, why), (other, as_well) = on_ranks(_plain_forwards)
    assert one == other == [(1, 48), (1, 17)]
    assert "columns, padding or positions" in why
    assert why == as_well


def _bad_argument_on_one(model: PreTrainedModel) -> Any:
    cache = PagedPrefixCache(model)
    mask = torch.ones((1, 65), dtype=torch.int64)
    call = {"input_ids": IDS, "attention_mask": mask, "max_new_tokens": 3}
    given = call | {"cache_implementation": "static"} if is_first() else call
    at_the_bracket = refusal(lambda: run(model, cache, **given), CacheArgumentError)
    wrong = {"attention_mask": mask[:, :60]} if is_first() else {}
    with torch.no_grad():
        before_a_forward = refusal(
            lambda: model(**{"input_ids": IDS, "attention_mask": mask, "past_key_values": cache} | wrong),
            CacheArgumentError,
        )
    assert_same(run(model, **call), run(model, cache, **call))
    return at_the_bracket, before_a_forward


def test_an_argument_that_one_rank_refuses_both_refuse(on_ranks: Ranks) -> None:
    one, other = on_ranks(_bad_argument_on_one)
    assert "asks transformers for a cache of its own" in one[0]
    assert "the attention mask is" in one[1]
    assert all(why.startswith("rank 0 has refused") for why in other)


def _fails_before_its_forward(model: PreTrainedModel) -> Any:
    cache = PagedPrefixCache(model)
    wrong = {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 3} if is_first() else {}
    with pytest.raises((ValueError, PagedCacheError)) as raised:
        run(model, cache, input_ids=IDS, **wrong)
    assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS))
    return type(raised.value).__name__


def test_where_generate_itself_fails_on_one_rank_the_other_does_not_wait(on_ranks: Ranks) -> None:
    assert on_ranks(_fails_before_its_forward) == ["ValueError", "PagedCacheError"]


MISTAKES = {
    "the token ids": "other tokens",
    "the columns, padding or positions": "another length",
    "the arguments of generate": "more new tokens",
    "what is asked of the forward": "hidden states",
    "block_size (4 on one, 16 on another)": "block size",
}


def _mistake(model: PreTrainedModel, mistake: str) -> Any:
    wrong = is_first()
    cache = PagedPrefixCache(model, block_size=4 if wrong and mistake == "block size" else 16)
    arguments = {"input_ids": IDS, "max_new_tokens": 3}
    if wrong and mistake == "other tokens":
        arguments["input_ids"] = IDS + (IDS == 5).long()
    if wrong and mistake == "another length":
        arguments["input_ids"] = IDS[:, :50]
    if wrong and mistake == "more new tokens":
        arguments["max_new_tokens"] = 4
    if wrong and mistake == "hidden states":
        arguments["output_hidden_states"] = True
    why = refusal(lambda: run(model, cache, **arguments), CacheArgumentError)
    cache.check()
    right = PagedPrefixCache(model)
    assert_same(run(model, input_ids=IDS), run(model, right, input_ids=IDS))
    return why


@pytest.mark.parametrize("named", MISTAKES)
def test_what_must_be_the_same_and_is_not_is_an_error_on_both_ranks(named: str, on_ranks: Ranks) -> None:
    one, other = on_ranks(_mistake, MISTAKES[named])
    assert one == other
    assert named in one


def _shared_prefixes(model: PreTrainedModel) -> Any:
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        make_forwards_cheap(patch)
        reference = run(model, **batch(*QUESTIONS))
        store = PrefixStore(model, num_blocks=80)
        for forget in (lambda: None, lambda: is_first() and store.reset_prefix_cache()):
            cache = PagedPrefixCache(store)
            with Forwards(model) as shapes:
                assert_same(reference, run(model, cache, **batch(*QUESTIONS)))
            seen.append([shape for shape in shapes if shape[1] > 1])
            cache.reset()
            forget()
        cache = PagedPrefixCache(store)
        with Forwards(model) as shapes:
            assert_same(reference, run(model, cache, **batch(*QUESTIONS)))
        seen.append([shape for shape in shapes if shape[1] > 1])
        tight = PagedPrefixCache(model, num_blocks=10 if is_first() else 80)
        with Forwards(model) as shapes:
            assert_same(reference, run(model, tight, **batch(*QUESTIONS)))
        seen.append([shape for shape in shapes if shape[1] > 1])
    return seen


def test_what_rows_share_is_computed_once_on_both_ranks(on_ranks: Ranks) -> None:
    one, other = on_ranks(_shared_prefixes)
    assert one == other
    assert one == [[(1, 64), (3, 9)], [(3, 9)], [(1, 64), (3, 9)], [(1, 64), (3, 9)]]


def _looked_at(model: PreTrainedModel) -> bool:
    cache = PagedPrefixCache(model)
    with pytest.raises(UnsupportedModelError, match="so none was: other processes share this model"):
        cache.verify()
    return True


def test_where_processes_share_a_model_it_is_said_that_no_block_is_recomputed(on_ranks: Ranks) -> None:
    assert on_ranks(_looked_at) == [True, True]


def _prefill(model: PreTrainedModel) -> Any:
    cache, prompt = PagedPrefixCache(model, num_blocks=40 + 20 * dist.get_rank()), row((1, 100))
    run(model, cache, input_ids=IDS)
    cache.reset()
    if is_first():
        cache.reset_prefix_cache()
    shapes = shapes_of(model, lambda: cache.prefill(prompt, chunk_size=32))
    again = shapes_of(model, lambda: cache.prefill(prompt, chunk_size=32))
    assert cache.lookup(prompt).num_tokens == 96
    ids = torch.tensor([prompt])
    assert_same(run(model, input_ids=ids), run(model, cache, input_ids=ids))
    return shapes, again, cache.last_call.reused_tokens


def test_a_prefill_runs_the_same_forwards_on_both_ranks(on_ranks: Ranks) -> None:
    one, other = on_ranks(_prefill)
    assert one == other
    shapes, again, num_reused = one
    assert (len(shapes), len(again), num_reused) == (3, 3, 96)


def _own_inputs(model: PreTrainedModel) -> Any:
    cache = PagedPrefixCache(model, num_blocks=12 if is_first() else 100)
    ids = torch.tensor([row((1, 40), (2, 5 + 3 * dist.get_rank()))])
    with Forwards(model) as shapes:
        run(model, cache, input_ids=ids, synced_gpus=True)
    if is_first():
        cache.reset()
        cache.reset_prefix_cache()
    reference = run(model, input_ids=ids, synced_gpus=True)
    with Forwards(model) as again:
        assert_same(reference, run(model, cache, input_ids=ids, synced_gpus=True))
    long = torch.tensor([row((5, 300 + dist.get_rank()))])  # more than one of them can keep
    wanted = run(model, input_ids=long, synced_gpus=True)
    assert_same(wanted, run(model, cache, input_ids=long, synced_gpus=True))
    return shapes[0], again[0]


def test_ranks_with_prompts_of_their_own_settle_nothing(on_shards: Ranks) -> None:
    (cold, lost), (cold_there, kept) = on_shards(_own_inputs)
    assert (cold, cold_there) == ((1, 45), (1, 48))
    assert (lost, kept) == ((1, 45), (1, 1))
