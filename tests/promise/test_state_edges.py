"""Models whose layers carry states, where forwards are short, padded, cut back, refused, or give all logits."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache

from ..conformance import zoo
from ..internals import SNAPSHOT_COPIES, blocks_of_the_last_row, lose_window_blocks, make_forwards_cheap
from ..reference import FROM_5_23, assert_near, assert_same, batch, row, run
from .test_states import play

pytestmark = FROM_5_23

# A gated delta net beside attention; convolutions alone; Mamba and attention in one layer; beside each other.
NAMES = pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "bamba"])


def plain(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of a forward by hand of the last columns of `mask`."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        logits: torch.Tensor = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **options
        ).logits
    return logits


@NAMES
def test_no_row_is_in_its_padding_in_a_forward_of_one_column(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models take such a forward for the step of a token, and do not look at its mask."""
    make_forwards_cheap(monkeypatch)
    model = zoo.build(name)
    for lengths in ((43, 8, 6), (69, 33), (42, 7, 5, 1)):
        rows = batch(*(row((number, length)) for number, length in enumerate(lengths, 1)))
        cache = PagedPrefixCache(model)
        for _ in range(2):
            play(model, cache, **rows)


@NAMES
def test_a_prefill_in_chunks_of_one_column_is_as_wrong_about_padding_as_everybody_else_and_leaves_nothing(
    name: str,
) -> None:
    model = zoo.build(name)
    cache = PagedPrefixCache(model, block_size=4)
    rows = batch(row((1, 40)), row((2, 30)))
    play(model, cache, **rows, prefill_chunk_size=1)
    assert cache.stats().num_snapshots == 0
    for _ in range(2):
        play(model, cache, **rows)
        play(model, cache, **batch(row((2, 30))))


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("name", ["granitemoehybrid", "falcon_h1", "qwen3_next"])
def test_a_column_of_padding_that_comes_alone_is_refused_after_padding_that_is_not_kept(
    name: str, is_used: bool
) -> None:
    """Layers with a state take it for a token, and eager attention shows it the padding."""
    model = zoo.build(name)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[0] * 15 + row((1, 3)), [0] * 2 + row((2, 16))])
    mask = torch.tensor([[0] * 15 + [1] * 3, [0] * 2 + [1] * 16])
    cache, reference = PagedPrefixCache(model), DynamicCache(config=model.config)
    if is_used:
        play(model, cache, input_ids=ids, attention_mask=mask, max_new_tokens=3)
        cache.reset()
    is_token = mask[:, :10].bool()
    wanted = plain(model, reference, ids[:, :10], mask[:, :10])
    assert_near(plain(model, cache, ids[:, :10], mask[:, :10])[is_token], wanted[is_token])
    with pytest.raises(CacheArgumentError, match="column 10 is padding of a row and comes alone"):
        plain(model, cache, ids[:, 10:11], mask[:, :11])
    whole = plain(model, DynamicCache(config=model.config), ids, mask)
    assert_near(plain(model, cache, ids[:, 10:], mask)[:, -3:], whole[:, 15:])


@pytest.mark.parametrize("is_used", [False, True])
def test_a_cache_under_a_name_that_the_model_does_not_read_is_refused(is_used: bool) -> None:
    """Mamba 2 calls it `cache_params`; what it runs without its states is not what was computed ahead."""
    model = zoo.build("mamba2")
    ids = torch.tensor([row((1, 40))])
    cache = PagedPrefixCache(model, block_size=8)
    if is_used:
        play(model, cache, input_ids=ids, max_new_tokens=3)
        cache.reset()
    with torch.no_grad():
        wanted = model(ids).logits
        with pytest.raises(CacheArgumentError, match="pass it as cache_params"):
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        assert cache.get_seq_length() == 0
        assert_near(model(ids, cache_params=cache, use_cache=True).logits, wanted)
    cache.check()


@NAMES
def test_rows_that_would_be_cut_back_are_refused_and_go_on(name: str) -> None:
    model = zoo.build(name)
    cache = PagedPrefixCache(model)
    whole = run(model, cache, **batch(row((1, 70))), max_new_tokens=5).sequences
    with pytest.raises(CacheArgumentError, match="cannot take back 3 tokens: layers with a window or a state"):
        cache.crop(-3)
    new, mask = torch.tensor([row((2, 3))]), torch.ones(1, 77, dtype=torch.long)
    output = run(model, cache, input_ids=new, attention_mask=mask)
    assert_same(run(model, input_ids=torch.cat((whole[:, :-1], new), 1)), output)
    cache.check()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "zaya"])
def test_snapshots_and_blocks_together_keep_to_a_small_budget(name: str) -> None:
    """Also where the budget holds less than 8 snapshots, and where some layers have a window."""
    model = zoo.build(name)
    for budget in (200_000, 800_000):
        cache = PagedPrefixCache(model, max_bytes=budget)
        blocks = cache.store.blocks
        for number in range(12):
            run(model, cache, **batch(row((number, 70))), max_new_tokens=2)
            stats = cache.store.stats()
            assert stats.pool_bytes is not None
            assert stats.snapshot_bytes + stats.pool_bytes <= budget
        most = blocks.snapshots.most * blocks.rules.num_bytes
        held = sum(num_bytes for num_bytes in blocks.pool.all.bytes_per_block_on.values()) * (
            blocks.budget.num_blocks or 0
        )
        assert most + held <= budget


def partly_lost(name: str, lengths: tuple[int, ...], lost: range) -> PagedPrefixCache:
    """Knows a prompt of 60 tokens; states behind all but these lengths are dropped, and those blocks' windows lost."""
    cache = PagedPrefixCache(zoo.build(name), block_size=1, num_blocks=1000)
    for length in (*lengths, 60):
        play(cache.store.model, cache, **batch(row((1, 60))[:length]), max_new_tokens=1)
    block_ids, blocks = blocks_of_the_last_row(cache), cache.store.blocks
    for num_tokens in {*range(5, 61)} - {*lengths[1:]}:
        blocks.snapshots._contents.pop(blocks.allocator.digest_of(block_ids[num_tokens - 1]), None)
    cache.reset()
    lose_window_blocks(cache, block_ids[lost.start : lost.stop])
    return cache


@pytest.mark.parametrize("name", ["inkling_text", "zaya"])
def test_windows_see_what_is_before_a_state_that_is_known_less_far_than_keys_and_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks after the state, those that a window has passed have no keys and values of its layers any more."""
    make_forwards_cheap(monkeypatch)
    cache = partly_lost(name, (4,), range(5, 15))
    play(cache.store.model, cache, **batch(row((1, 60))[:42], row((2, 8))), max_new_tokens=2)


@pytest.mark.parametrize("name", ["inkling_text", "zaya"])
def test_a_snapshot_before_which_windows_hold_nothing_is_not_gone_on_from(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows have 24 tokens: what is known of the prompt ends at token 50, before which they hold all they show."""
    make_forwards_cheap(monkeypatch)
    cache = partly_lost(name, (4, 20), range(15, 20))
    play(cache.store.model, cache, **batch(row((1, 60))[:50] + row((2, 8))), max_new_tokens=2)
    assert cache.last_call.rows[0].stopped.startswith("blocks are cached up to token 50, but no state after token 4")


@NAMES
@pytest.mark.parametrize("length", [70, 128])
def test_a_prompt_of_which_all_is_known_computes_its_last_token(name: str, length: int) -> None:
    """The last call's row has the states after it, or a snapshot stands there; its logits are nowhere.

    It resumes from before.
    """
    model = zoo.build(name)
    cache, prompt = PagedPrefixCache(model), batch(row((1, length)))
    for number in range(4):
        play(model, cache, **prompt, max_new_tokens=1)
        assert bool(cache.last_call.reused_tokens) == bool(number)
        if number == 1:
            cache.reset()


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_a_snapshot_that_there_is_no_memory_for_is_not_kept_and_the_call_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been generated is not lost for want of it."""
    model, given = zoo.build(name), batch(row((1, 70)))
    cache, reference = PagedPrefixCache(model, block_size=4), run(model, **given)

    def lacking(*_: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    for is_used in (False, True):
        with monkeypatch.context() as patch:
            for place in SNAPSHOT_COPIES:
                patch.setattr(*place, lacking)
            assert_same(reference, run(model, cache, **given))
        assert cache.last_call.reused_tokens == 0
        assert cache.stats().num_snapshots == 0, is_used
        cache.check()
    for reused in (0, 64):
        assert_same(reference, run(model, cache, **given))
        assert cache.last_call.reused_tokens >= reused
