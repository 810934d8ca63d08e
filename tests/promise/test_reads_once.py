"""Rows that share a prefix read it once, and give what `DynamicCache` gives."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.rows.shared import CALL_LOOKS, LayerReads

from ..internals import make_forwards_cheap, note_served, split_everywhere
from ..reference import PROMPT, assert_near, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build, tiny

QUESTIONS = [row((1, 48), (seed, 3 + seed)) for seed in range(2, 10)]
CALLS: dict[str, dict[str, Any]] = {
    "8 rows": batch(*QUESTIONS),
    "beams": {**batch(PROMPT), "num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 20},
    "beams of two prompts": {**batch(PROMPT, row((4, 37))), "num_beams": 3, "max_new_tokens": 20},
    "samples": {**batch(PROMPT), "do_sample": True, "num_return_sequences": 5},
    "a tree": batch(row((1, 32), (2, 20), (3, 4)), row((1, 32), (2, 20)), row((1, 32), (5, 9))),
    "two trees": batch(*(row((seed, 32), (9 + number, 8)) for seed in (1, 2) for number in range(3))),
}
# gemma3 has windows, lfm2 states: of layers without, this is read
SERVED = ("llama", "gpt2", "gemma3", "mixtral", "lfm2")


@pytest.fixture(autouse=True)
def one_block_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    split_everywhere(monkeypatch)
    make_forwards_cheap(monkeypatch)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each attention that was asked of what rows share, whether it was served."""
    return note_served(monkeypatch, SimpleNamespace(_LayerReads=LayerReads))  # type: ignore[arg-type]


@pytest.mark.parametrize("what", [*CALLS])
@pytest.mark.parametrize("name", [*SERVED, "bloom"])
def test_rows_that_share_give_the_same_logits_cold_warm_and_from_blocks_alone(
    name: str, what: str, served: list[bool]
) -> None:
    model, call = tiny(name), CALLS[what]
    reference = run(model, **call)
    cache = PagedPrefixCache(model)
    for again in range(3):
        if again == 2:
            cache.reset()
        assert_same(reference, run(model, cache, **call))
        cache.check()
    assert all(served)
    assert bool(served) == (name in SERVED)
    cache.reset()
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, **call))


def test_plain_forwards_go_on_after_rows_were_cut_moved_copied_and_left_out(served: list[bool]) -> None:
    model = tiny("llama")
    ids = torch.tensor([row((1, 40), (seed, 6)) for seed in (2, 2, 3, 4)])
    ours, theirs = PagedPrefixCache(model, block_size=4), DynamicCache(config=model.config)
    copied: list[PagedPrefixCache] = []
    draw = torch.Generator().manual_seed(0)

    def forward(cache: Any, new: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(len(new), cache.get_seq_length() + new.shape[1], dtype=torch.int64)
        with torch.no_grad():
            return model(new, attention_mask=mask, past_key_values=cache).logits[:, -1]

    def both(new: torch.Tensor) -> None:
        wanted = forward(theirs, new)
        for cache in (ours, *copied):
            assert_near(forward(cache, new), wanted)

    both(ids)
    for change in range(6):
        both(torch.randint(1, 128, (ids.shape[0], 1 + change % 3), generator=draw))
        if change == 0:
            copied.append(copy.deepcopy(ours))
        elif change == 1:
            for cache in (ours, theirs, *copied):
                cache.reorder_cache(torch.tensor([2, 0, 0, 3]))
        elif change == 2:
            for cache in (ours, theirs, *copied):
                cache.crop(-3)
        elif change == 3:
            for cache in (ours, theirs, *copied):
                cache.crop(-8)  # into what is shared
        elif change == 4:
            for cache in (ours, theirs, *copied):
                cache.batch_select_indices(torch.tensor([0, 2, 3]))
            ids = ids[:3]
    both(torch.randint(1, 128, (3, 2), generator=draw))
    assert served
    assert all(served)


def used(model: PreTrainedModel, served: list[bool], **options: Any) -> PagedPrefixCache:
    """A cache whose blocks know the 8 rows, and that has none."""
    cache = PagedPrefixCache(model)
    run(model, cache, **CALLS["8 rows"], **options)
    cache.reset()
    served.clear()
    return cache


@pytest.mark.parametrize("what", ["eager", "output_attentions"])
def test_what_cannot_be_served_is_dense(what: str, served: list[bool]) -> None:
    model = build("llama", attn_implementation="eager")
    options = {"output_attentions": True} if what == "output_attentions" else {}
    cache = used(model, served, **options)
    reference = run(model, **CALLS["8 rows"], **options)
    assert_same(reference, run(model, cache, **CALLS["8 rows"], **options))
    assert not any(served)


def test_with_dropout_on_what_rows_share_is_dense(served: list[bool]) -> None:
    model, outputs = build("llama"), []
    cache, mask = used(model, served), torch.ones(8, 49, dtype=torch.int64)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    for each in (cache, DynamicCache(config=model.config)):
        torch.manual_seed(1)
        with torch.no_grad():
            model.eval()(torch.tensor([row((1, 48))] * 8), attention_mask=mask[:, :48], past_key_values=each)
            outputs.append(model.train()(torch.arange(1, 9)[:, None], attention_mask=mask, past_key_values=each).logits)
    torch.testing.assert_close(*outputs)
    assert cache.last_call.dense == CALL_LOOKS
    assert not any(served)


def test_8_beams_hold_one_copy_of_their_prompt_beside_its_blocks() -> None:
    model = build("llama", max_position_embeddings=4096)
    ids = torch.randint(1, 128, (1, 2048), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "num_beams": 8, "max_new_tokens": 64}
    cache, theirs = PagedPrefixCache(model), DynamicCache(config=model.config)
    run(model, cache, **call)
    run(model, past_key_values=theirs, **call)
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers)
    assert cache.last_call.peak_kv_bytes <= 0.30 * whole
