"""The host tier, on a device: 8 chats in turns over a pool for 3 give what they give with `DynamicCache`, and blocks move in few copies.

Nobody waits for a block that goes down or comes up, and a decode step transfers nothing for either.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from tests.internals import zero_tiers
from tests.reference import assert_same, is_same, run
from tests.tiny_models import build

from .counts import split_model
from .log import Log, recorded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_CHATS, NUM_TOKENS, BLOCKS_OF_A_CHAT = 8, 100, 7  # of 16 tokens
OURS = "hf_paged_cache/"


@pytest.fixture(autouse=True)
def _a_chat_is_not_a_lone_turn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PagedPrefixCache: this prompt")
        yield


def chats(number: int = NUM_CHATS) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    return [torch.randint(3, 120, (1, NUM_TOKENS), generator=made) for _ in range(number)]


def model_of(kind: str) -> PreTrainedModel:
    return split_model() if kind == "on two devices" else build(kind).to(device="sim")


def call(model: PreTrainedModel, ids: torch.Tensor, cache: PagedPrefixCache | None = None, **given: Any) -> Any:
    return run(model, cache, input_ids=ids, **{"max_new_tokens": 4, **given})


def cache_of(model: PreTrainedModel, num_chats: float = 3, **tiers: Any) -> PagedPrefixCache:
    sizes = {"host_bytes": 2**24, **tiers}
    return PagedPrefixCache(model, num_blocks=int(num_chats * (BLOCKS_OF_A_CHAT + 1)) + 1, **sizes)


def ours(log: Log, kind: str) -> Log:
    ids = "hf_paged_cache/rows/ids"  # what ran is read once a call, to name what is kept
    return Log([entry for entry in log.of(kind) if entry.where.startswith(OURS) and not entry.where.startswith(ids)])


@pytest.mark.parametrize("kind", ["llama", "on two devices", "gemma3", "mistral", "lfm2"])
def test_chats_in_turns_are_right_and_move_in_few_copies(kind: str) -> None:
    model, prompts = model_of(kind), chats()
    references = [call(model, ids) for ids in prompts]
    cache = cache_of(model)
    num_layers = model.config.num_hidden_layers
    for turn in range(3 if kind == "llama" else 2):
        for ids, reference in zip(prompts, references, strict=True):
            down, up = (0, 0) if not cache.stats().num_calls else moved(cache)
            with recorded() as log:
                assert_same(reference, call(model, ids, cache))
            cache.check()
            transfers = [e for e in log.transfers if e.where.startswith("hf_paged_cache/kv/contents")]
            assert len(transfers) <= 4 * num_layers, log.lines("transfer")
            assert not any(entry.is_blocking for entry in ours(log, "transfer").entries), log.lines("transfer")
            if turn:
                (of_row,) = cache.last_call.rows
                assert of_row.host_tokens > 0
                assert of_row.matched_tokens >= 80
                if kind in ("llama", "on two devices"):
                    assert moved(cache)[1] - up == 6, "a block comes up once a return"
    down, _ = moved(cache)
    if kind in ("llama", "on two devices"):
        assert down <= NUM_CHATS * BLOCKS_OF_A_CHAT, "a block goes down once"
    assert cache.stats().tiers[0].num_dropped == 0


def moved(cache: PagedPrefixCache) -> tuple[int, int]:
    (tier,) = cache.stats().tiers
    assert tier.num_down is not None
    assert tier.num_up is not None
    return tier.num_down, tier.num_up


@pytest.mark.parametrize("kind", ["llama", "on two devices", "gemma3", "lfm2"])
def test_zeros_in_place_of_what_the_tier_has_are_seen(kind: str) -> None:
    model, prompts = model_of(kind), chats(5)
    cache = cache_of(model)
    for ids in prompts:
        call(model, ids, cache)
    torch.sim.synchronize()  # type: ignore[attr-defined]
    zero_tiers(cache)
    assert not is_same(call(model, prompts[0]), call(model, prompts[0], cache))
    assert cache.last_call.rows[0].host_tokens > 0


def waits_of(cache: PagedPrefixCache, model: PreTrainedModel, ids: torch.Tensor, **given: Any) -> tuple[int, Log]:
    with recorded() as log:
        call(model, ids, cache, **given)
    return len(log.waits), log


def test_nobody_waits_for_what_moves() -> None:
    model, prompts = model_of("llama"), chats()
    cache = cache_of(model)
    for ids in prompts + prompts[:3]:
        call(model, ids, cache)
    num_waits, log = waits_of(cache, model, prompts[3])  # evicts one chat, and brings one up
    assert cache.last_call.rows[0].host_tokens > 0
    without = PagedPrefixCache(model)
    call(model, prompts[3], without)
    without.reset()
    assert num_waits <= 1 + waits_of(without, model, prompts[3])[0], log.lines(
        "wait"
    )  # what ran is read to name what is kept


def test_a_decode_step_that_evicts_waits_for_nothing_and_sends_no_content() -> None:
    model, prompts = model_of("llama"), chats()
    cache = cache_of(model, 2)
    for ids in prompts[:4]:
        call(model, ids, cache)
    before, _ = moved(cache)
    num_waits, log = waits_of(cache, model, prompts[5], max_new_tokens=40)
    assert moved(cache)[0] - before > BLOCKS_OF_A_CHAT, "steps evict blocks, too"
    plain, _ = waits_of(PagedPrefixCache(model), model, prompts[5], max_new_tokens=40)
    assert num_waits <= plain + 1, log.lines("wait")
    assert not any(entry.is_blocking for entry in ours(log, "transfer").entries), log.lines("transfer")


def test_what_host_memory_does_not_keep_goes_to_the_disk(tmp_path: Path) -> None:
    model, prompts = model_of("llama"), chats()
    references = [call(model, ids) for ids in prompts]
    cache = cache_of(model, host_bytes=16 * 2**14, disk_folder=tmp_path)  # 16 blocks of 16 KiB
    for turn in range(3):
        for ids, reference in zip(prompts, references, strict=True):
            assert_same(reference, call(model, ids, cache))
            cache.check()
            (of_row,) = cache.last_call.rows
            if turn:
                assert of_row.host_tokens + of_row.disk_tokens >= 80
    host, disk = cache.stats().tiers
    assert (host.name, disk.name) == ("host", "disk")
    assert disk.num_up
    assert host.num_bytes is not None
    assert host.num_bytes <= 16 * 2**14


def test_where_no_memory_can_be_pinned_there_is_no_tier_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hf_paged_cache.tiers import host

    def refused(*_: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host, "new_rows", refused)
    model, prompts = model_of("llama"), chats(5)
    cache = cache_of(model)
    for ids in prompts + prompts:
        assert_same(call(model, ids), call(model, ids, cache))
    cache.check()
    assert cache.last_call.rows[0].host_tokens == 0
    assert sum("no more host memory can be pinned" in record.message for record in caplog.records) == 1
    (tier,) = cache.stats().tiers
    assert (tier.num_blocks, tier.num_bytes) == (0, 0)
