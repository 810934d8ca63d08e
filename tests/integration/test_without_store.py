"""Rows of a bypassed call: how they come into layers of their own, what a forward that died leaves there, and how they go."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import (
    CacheArgumentError,
    CacheBusyError,
    ForwardMismatchError,
    OutOfBlocksError,
    PagedPrefixCache,
    PrefixStore,
)

from ..conformance.zoo import build as build_type
from ..internals import num_reserved_blocks
from ..model.test_support import FROM_5_23
from ..reference import IDS, TOLERANCE, AtStep, assert_same, batch, row, run
from ..tiny_models import build, tiny

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.way("pool")]  # rows need no blocks

FULL = {"num_blocks": 2, "on_full": "bypass"}  # one block of 16 tokens
PIECES = [(0, 20), (20, 30), (30, 31), (31, 45), (45, 46), (46, 50)]


def forward(model: PreTrainedModel, cache: Any, start: int, stop: int, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids[:, start:stop], past_key_values=cache).logits
    return logits


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))


# Rows that do not fit any longer.


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "bloom", "glm_moe_dsa", pytest.param("qwen4_exp", marks=FROM_5_23)]
)
@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5])
def test_rows_move_out_of_the_pool_where_they_stop_fitting(name: str, num_blocks: int) -> None:
    model = build_type(name) if name in ("glm_moe_dsa", "qwen4_exp") else tiny(name)
    ids = IDS % int(model.config.get_text_config().vocab_size)
    ours = PagedPrefixCache(model, num_blocks=num_blocks, on_full="bypass")
    theirs = DynamicCache(config=model.config)
    for start, stop in PIECES:
        assert_close(forward(model, ours, start, stop, ids), forward(model, theirs, start, stop, ids))
        assert ours.get_seq_length() == stop
        ours.check()
    assert ours.stats().num_bypassed_calls == (num_blocks < 5)
    if num_blocks < 5:
        assert ours.stats().num_blocks_in_use == 0
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert type(mine) is type(other)
            if getattr(mine, "keys", None) is not None:
                assert_close(mine.keys, other.keys)
                assert_close(mine.values, other.values)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_the_pool_holds_in_a_finer_dtype_move_out_in_their_own(name: str) -> None:
    model = copy.deepcopy(tiny(name))
    ours = PagedPrefixCache(model, num_blocks=4, on_full="bypass")
    forward(model.double(), ours, 0, 20)
    ours.reset()
    theirs = DynamicCache(config=model.float().config)
    for start, stop in PIECES:
        assert_close(forward(model, ours, start, stop), forward(model, theirs, start, stop))
    assert ours.layers[0].keys.dtype == torch.float32


@FROM_5_23
def test_padded_rows_take_the_positions_along_by_which_a_model_weighs_index_keys() -> None:
    """Two of them are equal, and ran once."""
    model = build_type("qwen4_exp")
    rows = batch(row((1, 40)), row((2, 33)), row((1, 40)))
    mask = rows["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours = PagedPrefixCache(model, block_size=4, num_blocks=18, on_full="bypass")
    theirs = DynamicCache(config=model.config)
    for start, stop in ((0, 20), (20, 38), (38, 40)):
        with torch.no_grad():
            got, wanted = (
                model(
                    rows["input_ids"][:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
                for cache in (ours, theirs)
            )
        is_token = mask[:, start:stop].bool()
        assert_close(got[is_token], wanted[is_token])
    assert ours.stats().num_bypassed_calls == 1


def test_equal_rows_part_when_they_leave_the_pool(model: PreTrainedModel) -> None:
    ours, theirs = PagedPrefixCache(model, num_blocks=3, on_full="bypass"), DynamicCache(config=model.config)
    same, other = IDS[:, :30].repeat(2, 1), torch.tensor([row((2, 9)), row((3, 9))])
    for ids in (same, other, other[:, :1]):
        assert_close(forward(model, ours, 0, 99, ids), forward(model, theirs, 0, 99, ids))
    assert ours.stats().num_bypassed_calls == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("num_blocks", "how"), [(2, {}), (4, {"num_beams": 3})])
def test_a_generate_without_known_limits_leaves_the_pool_on_its_way(
    name: str, num_blocks: int, how: dict[str, Any]
) -> None:
    """Without a prompt, `generate` begins with one token, and nothing says how many follow."""
    model = tiny(name)
    given = {"bos_token_id": 1, "max_new_tokens": 30, **how}
    cache = PagedPrefixCache(model, num_blocks=num_blocks, on_full="bypass")
    assert_same(run(model, **given), run(model, cache, **given))
    (said,) = {of_row.stopped for of_row in cache.last_call.rows}
    assert "; then the pool is full: this forward (" in said
    assert cache.stats().num_bypassed_calls == 1
    cache.check()


def test_a_step_that_finds_no_block_goes_on_without_the_store(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are reserved for it, so this does not happen; if it did, nothing would be lost."""
    cache = PagedPrefixCache(model, on_full="bypass")
    make_room, num_asked = cache.store.blocks.make_room, []

    def none_left(num_blocks: int) -> None:
        num_asked.append(num_blocks)
        if len(num_asked) > 1:
            raise OutOfBlocksError("need 1 block: 0 free")
        make_room(num_blocks)

    monkeypatch.setattr(cache.store.blocks, "make_room", none_left)
    given = {**batch(row((1, 40), (2, 5)), row((3, 12))), "max_new_tokens": 12}
    assert_same(run(model, **given), run(model, cache, **given))
    assert cache.stats().num_bypassed_calls == 1
    assert cache.last_call.prompt_tokens == 57
    assert num_reserved_blocks(cache) == 0


def test_only_new_tokens_that_do_not_fit_go_on_and_so_do_those_after_them(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, num_blocks=5, on_full="bypass")
    said = run(model, cache, input_ids=IDS).sequences  # 55 of 64 tokens
    assert cache.stats().num_bypassed_calls == 0
    whys = []
    for seed in (2, 3):
        whole = torch.cat([said, torch.tensor([row((seed, 7))])], 1)
        new = whole[:, cache.get_seq_length() :]
        output = run(model, cache, input_ids=new, attention_mask=torch.ones_like(whole))
        assert_same(run(model, input_ids=whole), output)
        assert (cache.last_call.prompt_tokens, cache.last_call.computed_tokens) == (8, 8)
        whys.append(cache.last_call.rows[0].stopped)
        said = torch.cat([whole, output.sequences[:, new.shape[1] :]], 1)
    assert whys[0].startswith("the last call's rows resumed; then the pool is full: this call (1 row of up to")
    assert whys[1] == "the last call's rows resumed; computed without the store"
    assert cache.stats().num_bypassed_calls == 2


COUNTED: dict[str, dict[str, Any]] = {
    "padded": batch(row((1, 40)), row((2, 25))),
    "chunks": {**batch(row((1, 40)), row((2, 25))), "prefill_chunk_size": 7},
    "beams": {**batch(row((1, 40))), "num_beams": 3},
    "lookup": {**batch(row((1, 20), (1, 20))), "prompt_lookup_num_tokens": 3},
    "embeddings": {"inputs_embeds": torch.ones(2, 30, 64), "attention_mask": torch.ones(2, 30, dtype=torch.int64)},
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_bypassed_call_counts_the_prompt_s_tokens_all_computed(name: str, model: PreTrainedModel) -> None:
    stored, bypassed = PagedPrefixCache(model), PagedPrefixCache(model, **FULL)
    for cache in (stored, bypassed):
        run(model, cache, **COUNTED[name])
    wanted = [of_row.prompt_tokens for of_row in stored.last_call.rows]
    assert [of_row.prompt_tokens for of_row in bypassed.last_call.rows] == wanted
    assert [of_row.computed_tokens for of_row in bypassed.last_call.rows] == wanted
    stats = bypassed.stats()
    assert (stats.prompt_tokens, stats.hit_rate, stats.num_calls) == (sum(wanted), 0.0, 1)


# What is done to rows.


def test_rows_are_reordered_cropped_multiplied_and_chosen_as_a_dynamic_cache_s_are(model: PreTrainedModel) -> None:
    ours, theirs = PagedPrefixCache(model, **FULL), DynamicCache(config=model.config)
    ids = torch.tensor([row((1, 60)), row((2, 60)), row((3, 60))])
    for cache in (ours, theirs):
        forward(model, cache, 0, 30, ids)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 4]))
    assert ours.get_seq_length() == 27
    assert ours.is_initialized
    assert repr(ours).startswith("PagedPrefixCache(3 rows of 27 tokens without the store, PrefixStore(")
    assert_close(forward(model, ours, 27, 40, ids), forward(model, theirs, 27, 40, ids))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_deep_copy_goes_on_by_itself(name: str) -> None:
    model = tiny(name)
    ours, theirs = PagedPrefixCache(model, **FULL), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        forward(model, cache, 0, 30)
    twin, reference = copy.deepcopy(ours), copy.deepcopy(theirs)
    assert twin.on_full == "bypass"
    assert_close(forward(model, twin, 40, 45), forward(model, reference, 40, 45))
    assert_close(forward(model, ours, 30, 40), forward(model, theirs, 30, 40))


def test_memory_of_the_layers_counts_and_is_given_back(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, **FULL)
    forward(model, cache, 0, 30)
    held = 2 * 2 * 30 * 2 * 16 * 4  # layers, keys and values, tokens, heads, dimensions, bytes
    assert cache.stats().kv_bytes == held
    assert cache.last_call.peak_kv_bytes == held
    layer = weakref.ref(cache.layers[0])
    cache.reset()
    assert (cache.stats().kv_bytes, layer()) == (0, None)
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized


def test_a_cache_that_is_collected_takes_its_layers_along_at_once(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, **FULL)
    forward(model, cache, 0, 30)
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()


# Other caches of the store.


def test_a_busy_cache_s_stand_in_bypasses_as_it_does(model: PreTrainedModel) -> None:
    inner_ids = torch.tensor([row((2, 40))])
    wanted, inner_wanted = run(model, input_ids=IDS), run(model, input_ids=inner_ids)
    inner: list[Any] = []
    cache = PagedPrefixCache(model, **FULL)
    with cache:
        nested = AtStep(2, lambda: inner.append(run(model, input_ids=inner_ids)))
        assert_same(wanted, run(model, input_ids=IDS, logits_processor=[nested]))
    assert_same(inner_wanted, inner[0])
    stand_in = inner[0].past_key_values
    assert stand_in is not cache
    assert stand_in.stats().num_bypassed_calls == cache.stats().num_bypassed_calls == 1


def test_a_call_is_bypassed_while_another_holds_the_blocks_and_takes_none_of_them(model: PreTrainedModel) -> None:
    store = PrefixStore(model, num_blocks=5)
    first, second = PagedPrefixCache(store), PagedPrefixCache(store, on_full="bypass")
    others: list[Any] = []
    ids = torch.tensor([row((2, 40))])
    wanted, others_wanted = run(model, input_ids=IDS), run(model, input_ids=ids)
    beside = AtStep(2, lambda: others.append(run(model, second, input_ids=ids)))
    assert_same(wanted, run(model, first, input_ids=IDS, logits_processor=[beside]))
    assert_same(others_wanted, others[0])
    assert second.stats().num_bypassed_calls == 1
    first.reset()
    assert_same(others_wanted, run(model, second, input_ids=ids))
    assert second.stats().num_bypassed_calls == 1


def test_an_assistant_drafts_for_a_bypassed_call(model: PreTrainedModel) -> None:
    assistant = build("llama", seed=1)
    given = {"input_ids": IDS, "assistant_model": assistant, "max_new_tokens": 12}
    cache = PagedPrefixCache(model, **FULL)
    assert_same(run(model, **given), run(model, cache, **given))
    assert cache.stats().num_bypassed_calls == 1


# When it ends.


@pytest.mark.parametrize("ends", ["generate", "reset"])
def test_the_next_call_uses_the_store_again_if_it_fits(ends: str, model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, num_blocks=4, on_full="bypass")
    small = IDS[:, :40]
    run(model, cache, input_ids=small)
    run(model, cache, input_ids=IDS)
    assert "the pool is full" in cache.last_call.rows[0].stopped
    if ends == "reset":
        cache.reset()
        assert_close(forward(model, cache, 0, 40), forward(model, DynamicCache(config=model.config), 0, 40))
        assert cache.last_call.rows[0].matched_tokens == 32
    else:
        assert_same(run(model, input_ids=small), run(model, cache, input_ids=small))
        assert cache.last_call.reused_tokens == 32
    assert cache.stats().num_bypassed_calls == 1
    cache.check()


def test_rows_of_the_call_before_give_their_blocks_back_when_a_call_is_bypassed(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, num_blocks=4, on_full="bypass")
    run(model, cache, input_ids=IDS[:, :40])
    assert cache.stats().num_blocks_in_use == 3
    run(model, cache, input_ids=IDS)
    assert cache.stats().num_blocks_in_use == 0
    assert cache.stats().num_cached_blocks == 2  # the full ones


# Errors.


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("num_known", [0, 20, 30])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_a_forward_that_dies_is_taken_back(layer_idx: int, num_known: int, name: str) -> None:
    """Also where it has pushed columns out of a window: it is 24 tokens wide."""
    model = build(name)
    ours, theirs = PagedPrefixCache(model, **FULL), DynamicCache(config=model.config)
    if num_known:
        for cache in (ours, theirs):
            forward(model, cache, 0, num_known)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.model.layers[layer_idx].self_attn.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        forward(model, ours, num_known, 40)
    handle.remove()
    assert_close(forward(model, ours, num_known, 45), forward(model, theirs, num_known, 45))
    assert_close(forward(model, ours, 45, 46), forward(model, theirs, 45, 46))
    assert ours.stats().num_bypassed_calls == 1


def test_layers_write_only_inside_a_forward_of_the_model(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, **FULL)
    forward(model, cache, 0, 30)
    with pytest.raises(ForwardMismatchError, match=r"not model\.model"):
        model.model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 30


def test_a_forward_in_another_thread_makes_the_cache_busy(model: PreTrainedModel) -> None:
    cache, entered, may_go = PagedPrefixCache(model, **FULL), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        may_go.wait(30)

    handle = model.model.layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=forward, args=(model, cache, 0, 30))
    thread.start()
    assert entered.wait(30)
    handle.remove()
    try:
        for act in (
            lambda: forward(model, cache, 0, 30),
            lambda: run(model, cache, input_ids=IDS),
            lambda: cache.crop(-1),
            cache.reset,
        ):
            with pytest.raises(CacheBusyError, match="another thread"):
                act()
    finally:
        may_go.set()
        thread.join()
    theirs = DynamicCache(config=model.config)
    forward(model, theirs, 0, 30)
    assert_close(forward(model, cache, 30, 40), forward(model, theirs, 30, 40))


def test_a_generate_inside_a_bypassed_one_on_the_same_cache_is_refused(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, **FULL)

    def again() -> None:
        with pytest.raises(CacheBusyError, match="a generate call is running on this cache"):
            run(model, cache, input_ids=IDS[:, :5])

    wanted = run(model, input_ids=IDS)
    assert_same(wanted, run(model, cache, input_ids=IDS, logits_processor=[AtStep(1, again)]))


def test_a_call_that_is_refused_for_anything_else_is_refused(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, **FULL)
    run(model, cache, input_ids=IDS)
    with pytest.raises(CacheArgumentError, match="the cache 55 and the ids 50"):
        run(model, cache, input_ids=IDS, attention_mask=torch.ones(1, 90, dtype=torch.int64))
    with pytest.raises(CacheArgumentError, match="as a negative number"):
        cache.crop(3)
    assert cache.get_seq_length() == 55


def test_the_log_says_that_a_call_runs_without_the_store(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PagedPrefixCache(model, **FULL)
    with caplog.at_level(logging.INFO, logger="hf_paged_cache"):
        run(model, cache, input_ids=IDS)
    first, last = caplog.messages
    assert first.startswith(
        "this call runs without the store: this call (1 row of up to 55 tokens) may need 4 more blocks"
    )
    assert last.startswith("reused 0 of 50 prompt tokens, computed 50: row 0: the pool is full: ")
