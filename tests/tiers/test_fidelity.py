"""A store with a disk tier gives what `DynamicCache` gives, and what it reads back is what made the difference.

Chats take turns on a pool that holds fewer of them, so that each is evicted before its turn comes. Every check is shown
to fail with zeros in place of what the tier has.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.errors import CacheArgumentError
from hf_paged_cache.model.fingerprint import Fingerprint

from ..conformance import zoo
from ..internals import fail_to_bring_up, num_waiting, tiers_of, zero_tiers
from ..reference import assert_same, at_once, exit_code, forked, is_same, run
from ..tiny_models import tiny

NUM_CHATS, NUM_TOKENS, NUM_NEW = 5, 70, 4
BLOCKS_OF_A_CHAT = 19  # of 4 tokens, with what is generated
KINDS = ("llama", "gemma3", "mistral", "qwen3_next", "lfm2")


@pytest.fixture(autouse=True)
def _a_chat_is_not_a_lone_turn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PagedPrefixCache: this prompt")
        yield


def chats(number: int = NUM_CHATS, num_tokens: int = NUM_TOKENS, num_rows: int = 1) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    return [torch.randint(3, 120, (num_rows, num_tokens), generator=made) for _ in range(number)]


def cache_on_disk(model: PreTrainedModel, folder: Path, num_chats: float = 2, **sizes: Any) -> PagedPrefixCache:
    num_blocks = int(num_chats * BLOCKS_OF_A_CHAT) + 1
    return PagedPrefixCache(model, **{"block_size": 4, "num_blocks": num_blocks, "disk_folder": folder, **sizes})


def call(model: PreTrainedModel, ids: torch.Tensor, cache: PagedPrefixCache | None = None, **given: Any) -> Any:
    return run(model, cache, input_ids=ids, **{"max_new_tokens": NUM_NEW, **given})


def fill(model: PreTrainedModel, cache: PagedPrefixCache, prompts: list[torch.Tensor], **given: Any) -> None:
    for ids in prompts:
        call(model, ids, cache, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_chats_in_turns_on_a_pool_for_two_are_the_same_and_come_back(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny(kind), chats()
    references = [call(model, ids) for ids in prompts]
    cache = cache_on_disk(model, tmp_path)
    for turn in range(3):
        for ids, reference in zip(prompts, references, strict=True):
            assert_same(reference, call(model, ids, cache))
            cache.check()
            (of_row,) = cache.last_call.rows
            if turn:
                assert of_row.disk_tokens > 0
                assert of_row.matched_tokens >= NUM_TOKENS - 16
    (tier,) = cache.stats().tiers
    assert (tier.name, tier.num_dropped, tier.num_refused) == ("disk", 0, 0)
    assert str(tier).startswith(f"disk tier: {tier.num_blocks:,} blocks, ")
    assert num_waiting(cache) == 0


@pytest.mark.parametrize("kind", [*KINDS, "glm_moe_dsa"])
def test_what_comes_back_is_bit_for_bit_what_was_in_the_pool(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny(kind) if kind in KINDS else zoo.build(kind), chats(num_tokens=73)
    with_tier, ample = cache_on_disk(model, tmp_path), PagedPrefixCache(model, block_size=4)
    by_hand = PagedPrefixCache(model, block_size=4)
    for turn in range(2):
        for ids in prompts:
            logits, matched = [], []
            for cache in (ample, with_tier):
                logits.append(torch.stack(call(model, ids, cache).logits))
                matched.append(cache.last_call.rows[0].matched_tokens)
                cache.reset()
            if turn:
                assert matched == [matched[0]] * 2
                assert matched[0] >= 56
                assert with_tier.last_call.rows[0].disk_tokens > 0
                assert logits[0].equal(logits[1])
    ample.store.save(tmp_path / "saved")
    by_hand.store.load(tmp_path / "saved")
    for ids in prompts:
        loaded, kept = (torch.stack(call(model, ids, cache).logits) for cache in (by_hand, ample))
        by_hand.reset()
        assert loaded.equal(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_says_what_a_call_then_loads_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny(kind), chats()
    cache = cache_on_disk(model, tmp_path)
    fill(model, cache, prompts)
    for ids in [*prompts, prompts[0][:, :50]]:
        before = cache.stats()
        look = cache.lookup(ids[0].tolist())
        assert cache.stats() == before
        call(model, ids, cache)
        (of_row,) = cache.last_call.rows
        assert (look.num_tokens, look.stopped) == (of_row.matched_tokens, of_row.stopped)
        assert look.tier == ("disk" if of_row.disk_tokens else "device" if of_row.matched_tokens else None)
        assert of_row.disk_tokens or ids.shape[1] < NUM_TOKENS
    assert cache.lookup(chats(6)[5][0].tolist())[::3] == (0, None)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_in_place_of_what_the_tier_has_are_seen(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny(kind), chats()
    cache = cache_on_disk(model, tmp_path)
    fill(model, cache, prompts)
    zero_tiers(cache)
    assert not is_same(call(model, prompts[0]), call(model, prompts[0], cache))
    assert cache.last_call.rows[0].disk_tokens > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_what_did_not_come_back_whole_is_not_found(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = tiny("gemma3"), chats()
    cache, reference = cache_on_disk(model, tmp_path), call(model, prompts[0])
    fill(model, cache, prompts)
    with monkeypatch.context() as patch:
        fail_to_bring_up(patch, error)
        with contextlib.suppress(KeyboardInterrupt):
            assert_same(reference, call(model, prompts[0], cache))
            assert cache.last_call.rows[0].matched_tokens == 0
    assert_same(reference, call(model, prompts[0], cache))
    assert cache.last_call.rows[0].matched_tokens >= NUM_TOKENS - 16
    cache.check()


def test_rows_of_a_batch_with_one_prefix_bring_it_up_once(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), chats(4)
    shared = chats(1, 48)[0]
    batch = torch.cat(
        [shared.repeat(3, 1), torch.randint(3, 120, (3, 5), generator=torch.Generator().manual_seed(1))], dim=1
    )
    cache = cache_on_disk(model, tmp_path, 4)
    call(model, batch, cache)
    cache.reset()
    fill(model, cache, [*prompts, *chats(6, 71)[1:]])
    before = cache.stats().tiers[0].num_up
    assert_same(call(model, batch), call(model, batch, cache))
    cache.check()
    assert [of_row.disk_tokens for of_row in cache.last_call.rows] == [52, 52, 52]
    assert cache.stats().tiers[0].num_up - before == 12 + 3  # the prefix, and the block in which each row parts


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_chunked_prompt_finds_each_chunk(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny(kind), chats()
    cache = cache_on_disk(model, tmp_path, 2.5)
    given = {"prefill_chunk_size": 24}
    fill(model, cache, prompts, **given)
    assert_same(call(model, prompts[0], **given), call(model, prompts[0], cache, **given))
    cache.check()
    assert cache.last_call.rows[0].disk_tokens >= 48


@pytest.mark.parametrize("has_tier", [True, False], ids=["with a tier", "without"])
def test_window_blocks_that_made_room_come_back_to_blocks_that_stayed(has_tier: bool, tmp_path: Path) -> None:
    model, prompts = tiny("gemma3"), chats(8, 30)
    # blocks for all prompts, window blocks for the ends of half of them
    sizes = {"block_size": 4, "max_bytes": 72 * 2048}
    cache = PagedPrefixCache(model, **sizes, disk_folder=tmp_path if has_tier else None)
    fill(model, cache, prompts)
    for ids in prompts[:2]:
        assert_same(call(model, ids), call(model, ids, cache))
        cache.check()
        (of_row,) = cache.last_call.rows
        assert (of_row.matched_tokens == 28) == has_tier
        assert of_row.disk_tokens == 0  # all blocks are in the pool
    if has_tier:
        assert cache.stats().num_evictions == 0
        zero_tiers(cache)
        assert not is_same(call(model, prompts[2]), call(model, prompts[2], cache))


def test_calls_at_once_in_two_threads_are_right(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), chats()
    references = [call(model, ids) for ids in prompts]
    store = PrefixStore(model, block_size=4, num_blocks=3 * BLOCKS_OF_A_CHAT + 1, disk_folder=tmp_path)

    def turns(first: int) -> None:
        cache = PagedPrefixCache(store)
        for number in range(first, first + 10):
            which = number % NUM_CHATS
            assert_same(references[which], call(model, prompts[which], cache))
            cache.reset()

    at_once(lambda: turns(0), lambda: turns(2))
    store.check()
    assert store.stats().tiers[0].num_up > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are POSIX's")
def test_a_forked_child_begins_with_no_files_and_leaves_its_parents(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), chats()
    cache = cache_on_disk(model, tmp_path)
    tiers = tiers_of(cache)
    tiers.run_bytes = 2**12
    fill(model, cache, prompts)
    tiers.writer.submit(int).result()
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
    assert files
    references = [call(model, ids) for ids in prompts]

    def begin() -> None:
        for ids, reference in zip(prompts + prompts, references + references, strict=True):
            assert_same(reference, call(model, ids, cache))
        cache.check()
        assert cache.last_call.rows[0].disk_tokens > 0
        cache.reset()
        cache.store.reset_prefix_cache()  # removes its files

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert exit_code(forked(begin)) == 0
    assert {file: file.read_bytes() for file in files} == files, "the child has changed its parent's files"
    for ids, reference in zip(prompts, references, strict=True):
        assert_same(reference, call(model, ids, cache))
    assert cache.last_call.rows[0].disk_tokens > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host_bytes": 2**20}, "the model is on a CPU, so its blocks lie in host memory already"),
        ({"host_bytes": -1}, "host_bytes"),
        ({"disk_bytes": 2**20}, "disk_bytes is 1048576 without disk_folder"),
        ({"disk_folder": "/proc/nowhere"}, "cannot be written"),
        ({"disk_folder": ".", "disk_bytes": 0}, "disk_bytes"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CacheArgumentError, match=said):
        PagedPrefixCache(tiny("llama"), **given)
    with pytest.raises(CacheArgumentError, match="of the store, which is there already; give"):
        PagedPrefixCache(PrefixStore(tiny("llama")), **given)


def test_tiers_are_refused_where_other_processes_share_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Fingerprint.__module__}.rank_groups", lambda model: (object(),))
    with pytest.raises(CacheArgumentError, match="other processes share this model"):
        PrefixStore(tiny("llama"), disk_folder=tmp_path)
    PrefixStore(tiny("llama"))
