"""Outputs beside logits are a bypass: some models compute otherwise with them, as Falcon with sdpa."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore, UnsupportedModelError

from ..conformance import zoo
from ..reference import assert_near, assert_right, assert_same, batch, is_same, row, run

PROMPT = row((1, 45))
PARTS = [(0, 24), (24, 32), (32, 33), (33, 40), (40, 45)]


@pytest.fixture(name="falcon")
def fixture_falcon() -> PreTrainedModel:
    return zoo.build("falcon")


def store_of(model: PreTrainedModel) -> PrefixStore:
    return PrefixStore(model, block_size=8, num_blocks=128)


@pytest.mark.parametrize("is_used", [False, True], ids=["empty", "used"])
@pytest.mark.parametrize("asks", [(1, 0, 0, 0, 0), (0, 0, 1, 0, 1), (1, 1, 1, 1, 1)])
def test_plain_forwards_with_the_flag_and_without_go_on_from_each_other(
    falcon: PreTrainedModel, asks: tuple[int, ...], is_used: bool
) -> None:
    store, theirs = store_of(falcon), DynamicCache(config=falcon.config)
    cache = PagedPrefixCache(store)
    if is_used:
        run(falcon, PagedPrefixCache(store), **batch(PROMPT))
    for (start, stop), flag in zip(PARTS, asks, strict=True):
        given: dict[str, Any] = {
            "input_ids": torch.tensor([PROMPT[start:stop]]),
            "attention_mask": torch.ones((1, stop), dtype=torch.int64),
            "position_ids": torch.arange(start, stop)[None],
            "output_attentions": bool(flag),
        }
        with torch.no_grad():
            wanted = falcon(**given, past_key_values=theirs).logits
            got = falcon(**given, past_key_values=cache).logits
        assert_near(got, wanted)
        cache.check()
    for kept in (cache, PagedPrefixCache(store)):
        assert_right(falcon, kept, **batch(PROMPT))
        assert_right(falcon, kept, **batch([*PROMPT, 7]))


@pytest.mark.parametrize("is_used", [False, True], ids=["empty", "used"])
def test_the_flag_sees_padding_so_rows_that_were_begun_from_blocks_have_it_from_their_first_forward_on_or_it_is_refused(
    falcon: PreTrainedModel, is_used: bool
) -> None:
    store = store_of(falcon)
    if is_used:
        run(falcon, PagedPrefixCache(store), **batch(PROMPT))
        run(falcon, PagedPrefixCache(store), **batch(row((2, 20))))
    cache, theirs, given = PagedPrefixCache(store), DynamicCache(config=falcon.config), batch(row((2, 20)), PROMPT)
    more = {
        "input_ids": torch.tensor([[5, 6], [7, 8]]),
        "attention_mask": torch.cat([given["attention_mask"], torch.ones((2, 2), dtype=torch.int64)], 1),
        "position_ids": torch.tensor([[20, 21], [45, 46]]),
        "output_attentions": True,
    }

    def are_alike() -> None:
        with torch.no_grad():
            wanted, got = (falcon(**more, past_key_values=each).logits for each in (theirs, cache))
        assert_near(got, wanted)

    for each in (theirs, cache):
        run(falcon, each, **given, max_new_tokens=1)
    num_columns = cache.get_seq_length()
    if not is_used:
        are_alike()
        return
    with torch.no_grad(), pytest.raises(CacheArgumentError, match="from the rows' first forward on"):
        falcon(**more, past_key_values=cache)
    assert cache.get_seq_length() == num_columns
    theirs = DynamicCache(config=falcon.config)
    for each in (theirs, cache):
        run(falcon, each, **given, max_new_tokens=1, output_attentions=True)
    are_alike()


@pytest.mark.parametrize("flag", ["output_attentions", "output_hidden_states"])
def test_a_generate_with_a_flag_says_why_it_reuses_and_keeps_nothing(falcon: PreTrainedModel, flag: str) -> None:
    cache = PagedPrefixCache(store_of(falcon))
    run(falcon, cache, **batch(PROMPT))
    reference = run(falcon, **batch(PROMPT), **{flag: True})
    assert_same(reference, run(falcon, cache, **batch(PROMPT), **{flag: True}))
    assert cache.last_call.rows[0].stopped == f"{flag} was asked for"
    if flag == "output_attentions":
        assert not is_same(reference, run(falcon, cache, **batch(PROMPT)))
    else:
        assert_right(falcon, cache, **batch(PROMPT))
    assert cache.last_call.reused_tokens == 40
    run(falcon, cache, **batch(row((2, 45))), **{flag: True})
    run(falcon, cache, **batch(row((2, 45), (3, 2))))
    assert cache.last_call.reused_tokens == 0


def test_nothing_is_prefilled_or_kept_while_the_config_asks_for_it(falcon: PreTrainedModel) -> None:
    cache = PagedPrefixCache(store_of(falcon))
    run(falcon, cache, **batch(PROMPT))
    falcon.config._output_attentions = True
    for _ in range(2):
        assert_right(falcon, cache, reused=0, **batch(PROMPT))
    with pytest.raises(UnsupportedModelError, match="the config asks for output_attentions"):
        cache.prefill(PROMPT)
    falcon.config._output_attentions = False
    assert_right(falcon, cache, reused=40, **batch(PROMPT))
