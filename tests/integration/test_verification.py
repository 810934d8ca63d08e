"""The look at one cached block a call: which block, at what cost, and when it is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..internals import held_tensors
from ..reference import IDS, PROMPT, Forwards, assert_same, batch, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
LOOK = (1, BLOCK_SIZE)  # the forward that recomputes a block


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def forwards(model: PreTrainedModel, cache: PagedPrefixCache, **arguments: Any) -> list[tuple[int, int]]:
    """What one more call runs, whose output must be right."""
    reference = run(model, **arguments)
    with Forwards(model) as shapes:
        assert_same(reference, run(model, cache, **arguments))
    cache.check()
    return shapes


def test_a_call_that_hits_computes_one_block_more(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, verify=True)
    assert forwards(model, cache, input_ids=IDS) == [(1, 50), *[(1, 1)] * 5]
    for _ in range(3):
        assert forwards(model, cache, input_ids=IDS) == [LOOK, *[(1, 1)] * 6]
    assert (cache.stats().prompt_tokens, cache.stats().num_calls) == (200, 4)  # it is no call of a user's
    assert cache.stats().computed_tokens == 50 + 3


@pytest.mark.usefixtures("process_group")
def test_processes_in_step_run_no_forward_that_the_others_do_not(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, verify=True)
    plain = forwards(model, PagedPrefixCache(model), input_ids=IDS, synced_gpus=True)
    assert forwards(model, cache, input_ids=IDS, synced_gpus=True) == plain
    for _ in range(2):
        assert forwards(model, cache, input_ids=IDS, synced_gpus=True) == [(1, 1)] * len(plain)
    assert forwards(model, cache, input_ids=IDS)[0] == LOOK


def test_the_look_is_at_what_a_call_finds_and_not_at_what_goes_on(model: PreTrainedModel) -> None:
    """Tokens that go on may be those that another prompt begins with."""
    cache = PagedPrefixCache(model, verify=True)
    ids, other = torch.tensor([row((5, BLOCK_SIZE))]), torch.tensor([row((6, 3))])
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.reset()
        model(other, past_key_values=cache)
        with Forwards(model) as shapes:
            output = model(ids, past_key_values=cache)
        assert shapes == [(1, BLOCK_SIZE)]
        wanted = model(torch.cat((other, ids), dim=1)).logits[:, 3:]
    torch.testing.assert_close(output.logits, wanted)


def spoil_block(cache: PagedPrefixCache, number: int) -> None:
    """The block that the pool took as that one, from 0 on; block 0 of the pool is kept back."""
    for held in held_tensors(cache):
        held[1 + number] += 1


def test_a_block_that_holds_no_numbers_is_noticed(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, verify=True)
    forwards(model, cache, input_ids=IDS)
    for held in held_tensors(cache):
        held[1:] = torch.nan
    assert forwards(model, cache, input_ids=IDS)[:2] == [LOOK, (1, 50)]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_block_of_a_hit_has_its_turn(number: int, model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, verify=True)
    run(model, cache, input_ids=IDS)
    cache.reset()
    spoil_block(cache, number)
    reference = run(model, input_ids=IDS)
    reused = []
    for _ in range(4):
        output = run(model, cache, input_ids=IDS)
        reused.append(cache.last_call.rows[0].matched_tokens)
    assert_same(reference, output)
    assert reused.index(0) == number  # until then it was found, and used
    cache.check()


@pytest.mark.parametrize("num_tokens", [9, 20])
def test_the_look_is_at_the_first_row_that_hits(num_tokens: int, model: PreTrainedModel) -> None:
    inputs = batch(row((1, num_tokens)), row((2, 50)))
    store = PrefixStore(model)
    run(model, PagedPrefixCache(store), **inputs)
    cache = PagedPrefixCache(store, verify=True)
    spoil_block(cache, 0 if num_tokens == 20 else 1)  # a row takes its blocks after those of the row before it
    assert_same(run(model, **inputs), run(model, cache, **inputs))
    assert [counted.matched_tokens for counted in cache.last_call.rows] == [0, 0]


def test_where_columns_are_numbered_the_look_is_at_a_row_without_padding() -> None:
    """Alone, the other one would be computed at other columns."""
    model, inputs = build("bloom"), batch(row((1, 20)), row((2, 50)))
    store = PrefixStore(model)
    run(model, PagedPrefixCache(store), **inputs)
    cache = PagedPrefixCache(store, verify=True)
    spoil_block(cache, 0)  # of the padded row: not seen
    with Forwards(model) as shapes:
        run(model, cache, **inputs)
    assert shapes[0] == LOOK
    assert [counted.matched_tokens for counted in cache.last_call.rows] == [16, 48]


def test_frequencies_that_depend_on_length_are_not_looked_at() -> None:
    """A block alone would be computed with others."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=dynamic, max_position_embeddings=64)
    cache = PagedPrefixCache(model, verify=True)
    run(model, cache, input_ids=IDS)
    assert forwards(model, cache, input_ids=IDS) == [(1, 1)] * 6


def test_without_a_block_to_compute_into_a_call_goes_on(model: PreTrainedModel) -> None:
    """All but one of the pool's blocks hold the hit, and that one is another cache's."""
    store = PrefixStore(model, num_blocks=1 + 4 + 1)
    run(model, PagedPrefixCache(store), input_ids=IDS, max_new_tokens=1)
    other = PagedPrefixCache(store)
    run(model, other, input_ids=torch.tensor([row((3, 10))]), max_new_tokens=1)
    third = PagedPrefixCache(store)
    with torch.no_grad():
        model(torch.tensor([row((4, 10))]), past_key_values=third)
    cache = PagedPrefixCache(store, verify=True)
    assert store.blocks.num_obtainable_blocks(None) == 3  # the hit's own
    wanted = run(model, input_ids=torch.tensor([PROMPT[:48]]), max_new_tokens=1)
    with Forwards(model) as shapes:
        output = run(model, cache, input_ids=torch.tensor([PROMPT[:48]]), max_new_tokens=1)
    assert_same(wanted, output)
    assert LOOK not in shapes


def test_a_look_commits_nothing_and_leaves_no_row(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, verify=True)
    run(model, cache, input_ids=IDS)
    before = cache.stats()
    run(model, cache, input_ids=IDS)
    after = cache.stats()
    assert (after.num_blocks_in_use, after.num_cached_blocks) == (before.num_blocks_in_use, before.num_cached_blocks)
