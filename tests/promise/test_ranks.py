"""Two processes that share a model run the same forwards, or refuse them alike, whatever each has cached.

The model is split by transformers' own tensor parallelism, over gloo. Every scenario runs on both ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedCacheError, PagedPrefixCache, PrefixStore, UnsupportedModelError

from ..internals import make_forwards_cheap
from ..ranks import RankPool, random_calls, tensor_parallel, two_ranks
from ..reference import Forwards, assert_same, batch, row, run
from ..tiny_models import build

FEW_SHOT = row((1, 64))
QUESTIONS = [[*FEW_SHOT, *row((seed, 9))] for seed in (2, 3, 4)]
IDS = torch.tensor([[*FEW_SHOT, 5]])


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


class Starter:
    """A pool of ranks for the tests of this file; another one after a failure, when ranks may wait for each other."""

    def __init__(self, prepare: Callable[[Path], PreTrainedModel]) -> None:
        self._prepare = prepare
        self._running: Any = None
        self._pool: RankPool | None = None

    def __call__(self, scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
        if self._pool is None:
            self._running = two_ranks(self._prepare)
            self._pool = self._running.__enter__()
        try:
            return self._pool.run(scenario, *arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool = None
            self._running.__exit__(None, None, None)


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Starter]:
    starter = Starter(tensor_parallel)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def on_shards() -> Iterator[Starter]:
    starter = Starter(sharded)
    yield starter
    starter.close()


def sharded(folder: Path) -> PreTrainedModel:
    """FSDP: each rank has a part of every weight, and inputs of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build("llama")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# The random program; its long run is a command.


def test_random_calls_run_alike_on_both_ranks(on_ranks: Starter) -> None:
    counts = on_ranks(random_calls, 25, 1)
    assert counts[0]["reused tokens"] > 20
    assert counts[0]["calls before which ranks knew other tokens"] > 0


# Where a forward starts.


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


def test_what_one_rank_has_lost_both_compute(on_ranks: Starter) -> None:
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
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
        if is_first():
            cache.reset()
        why = refusal(lambda: model(IDS[:, -1:], past_key_values=cache), CacheArgumentError)
    return shapes, why


def test_plain_forwards_start_alike_and_rows_lost_on_one_rank_are_an_error_on_both(on_ranks: Starter) -> None:
    (one, why), (other, as_well) = on_ranks(_plain_forwards)
    assert one == other == [(1, 48), (1, 17)]
    assert "columns, padding or positions" in why
    assert why == as_well


# What it costs.


# Refusals.


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


def test_an_argument_that_one_rank_refuses_both_refuse(on_ranks: Starter) -> None:
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


def test_where_generate_itself_fails_on_one_rank_the_other_does_not_wait(on_ranks: Starter) -> None:
    assert on_ranks(_fails_before_its_forward) == ["ValueError", "PagedCacheError"]


# What must be the same.

MISTAKES = {
    "the token ids": "other tokens",
    "the columns, padding or positions": "another length",
    "the arguments of generate": "more new tokens",
    "what is asked of the forward": "hidden states",
    "block_size (4 on one, 16 on another)": "block size",
}


def _mistake(model: PreTrainedModel, mistake: str) -> Any:
    wrong = is_first()
    cache = PagedPrefixCache(
        model,
        block_size=4 if wrong and mistake == "block size" else 16,
    )
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
def test_what_must_be_the_same_and_is_not_is_an_error_on_both_ranks(named: str, on_ranks: Starter) -> None:
    one, other = on_ranks(_mistake, MISTAKES[named])
    assert one == other
    assert named in one


# Budgets, shared prefixes, verification, scores.


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


def test_what_rows_share_is_computed_once_on_both_ranks(on_ranks: Starter) -> None:
    one, other = on_ranks(_shared_prefixes)
    assert one == other
    assert one == [[(1, 64), (3, 9)], [(3, 9)], [(1, 64), (3, 9)], [(1, 64), (3, 9)]]


def _looked_at(model: PreTrainedModel) -> bool:
    cache = PagedPrefixCache(model)
    with pytest.raises(UnsupportedModelError, match="so none was: other processes share this model"):
        cache.verify()
    return True


def test_where_processes_share_a_model_it_is_said_that_no_block_is_recomputed(on_ranks: Starter) -> None:
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


def test_a_prefill_runs_the_same_forwards_on_both_ranks(on_ranks: Starter) -> None:
    one, other = on_ranks(_prefill)
    assert one == other
    shapes, again, num_reused = one
    assert (len(shapes), len(again), num_reused) == (3, 3, 96)


# Ranks with inputs of their own.


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


def test_ranks_with_prompts_of_their_own_settle_nothing(on_shards: Starter) -> None:
    (cold, lost), (cold_there, kept) = on_shards(_own_inputs)
    assert (cold, cold_there) == ((1, 45), (1, 48))
    assert (lost, kept) == ((1, 45), (1, 1))
