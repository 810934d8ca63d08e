"""Rows of a call, as a cache of transformers: what they answer is what a `DynamicCache` answers."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, CacheBusyError, PagedPrefixCache
from hf_paged_cache.integration import opening
from hf_paged_cache.rows import memory
from hf_paged_cache.rows.memory import runs
from hf_paged_cache.rows.rows import Rows

from ..conformance import zoo
from ..internals import failing_forward, split_everywhere
from ..reference import TOLERANCE, AtStep, assert_same, batch, is_same, row, run, zero_blocks

pytestmark = [pytest.mark.usefixtures("one_thread")]

PROMPTS = batch(row((1, 40), (2, 9)), row((1, 40), (3, 9)))
MOVES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-5),
    "crop of nothing": lambda cache: cache.crop(0),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "the same row twice": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "multiply": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by a mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
}


@pytest.fixture(params=[False, True], ids=["each row by itself", "held once"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what the rows have in common is held once, whatever that costs."""
    if request.param:
        split_everywhere(monkeypatch)
    return bool(request.param)


def filled(model: PreTrainedModel, cache: Any) -> Any:
    """A cache that has run the prompts, one of ours twice, so that it has reused."""
    with torch.no_grad():
        for _ in range(2 if isinstance(cache, PagedPrefixCache) else 1):
            cache.reset()
            model(**PROMPTS, past_key_values=cache, logits_to_keep=1)
    return cache


def next_logits(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    num_rows = cache.layers[0].keys.shape[0]
    with torch.no_grad():
        return model(torch.full((num_rows, 1), 7), past_key_values=cache).logits


@pytest.mark.parametrize("name", [*MOVES])
def test_rows_that_were_moved_go_on_as_those_of_a_dynamic_cache(
    name: str, model: PreTrainedModel, splits: bool
) -> None:
    ours, theirs = filled(model, PagedPrefixCache(model)), filled(model, DynamicCache(config=model.config))
    assert ours.last_call.reused_tokens >= 90
    for cache in (ours, theirs):
        MOVES[name](cache)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, their in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, their.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(mine.values, their.values, rtol=0, atol=1e-4)
    wanted, found = next_logits(model, theirs), next_logits(model, ours)
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("name", [*MOVES])
def test_a_deep_copy_goes_on_by_itself(name: str, model: PreTrainedModel, splits: bool) -> None:
    cache = filled(model, PagedPrefixCache(model))
    copied = copy.deepcopy(cache)
    before = [layer.keys.clone() for layer in cache.layers]
    MOVES[name](copied)
    next_logits(model, copied)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    wanted, found = next_logits(model, filled(model, DynamicCache(config=model.config))), next_logits(model, cache)
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("number", [1, -50, -1000])
def test_more_than_there_is_is_not_taken_back(number: int, model: PreTrainedModel) -> None:
    cache = filled(model, PagedPrefixCache(model))
    with pytest.raises(CacheArgumentError):
        cache.crop(number)
    assert cache.get_seq_length() == 49


@pytest.mark.parametrize("index", [[2, 0], [-1, 0], []])
def test_rows_that_are_not_there_are_refused(index: list[int], model: PreTrainedModel) -> None:
    cache = filled(model, PagedPrefixCache(model))
    with pytest.raises(CacheArgumentError, match="there are 2 rows"):
        cache.reorder_cache(torch.tensor(index, dtype=torch.int64))


def test_what_a_call_returns_are_its_rows(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model)
    output = run(model, cache, **PROMPTS)
    assert type(output.past_key_values) is Rows
    assert output.past_key_values.get_seq_length() == cache.get_seq_length() == 49 + 5


def test_memory_of_the_call_before_is_taken_over_where_its_rows_go_on(model: PreTrainedModel) -> None:
    cache, prompt = PagedPrefixCache(model), {"input_ids": torch.tensor([row((1, 50))])}
    for _ in range(2):  # the second one knows how keys and values look
        run(model, cache, **prompt).past_key_values.reset()
        cache.reset()
    model.generate(**prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    before = cache.layers[0].held[0].untyped_storage().data_ptr()
    model.generate(**prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.layers[0].held[0].untyped_storage().data_ptr() == before
    assert cache.last_call.reused_tokens == 49


@pytest.mark.parametrize(
    ("block_ids", "wanted"), [([], []), ([3], [(3, 1)]), ([4, 5, 6, 2, 9, 10], [(4, 3), (2, 1), (9, 2)])]
)
def test_ids_that_follow_one_another_are_runs(block_ids: list[int], wanted: list[tuple[int, int]]) -> None:
    assert [*runs(block_ids)] == wanted


def test_blocks_are_whole_that_were_written_while_the_pool_grew(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, write_blocks, grown = PagedPrefixCache(model, block_size=4), memory.write_blocks, []
    run(model, cache, input_ids=torch.tensor([row((3, 9))]), max_new_tokens=1)
    blocks = cache.store.blocks

    def grow() -> None:
        with blocks.lock:
            grown.append(blocks.pool.all.ensure_capacity(4 * blocks.pool.all.capacity))

    def written(*given: Any) -> None:
        if not grown:
            other = Thread(target=grow)
            other.start()
            other.join(20)
            assert grown  # the other thread waits for no lock
        write_blocks(*given)

    monkeypatch.setattr(memory, "write_blocks", written)
    inputs = {"input_ids": torch.tensor([row((1, 24))])}
    assert_same(run(model, **inputs), run(model, cache, **inputs))
    assert grown
    assert cache.verify().differing == ()
    other = PagedPrefixCache(cache.store)
    assert_same(run(model, **inputs), run(model, other, **inputs))
    assert other.last_call.reused_tokens > 0
    zero_blocks(other)
    other.reset()
    assert not is_same(run(model, **inputs), run(model, other, **inputs))


def test_rows_whose_first_forward_died_begin_again(model: PreTrainedModel) -> None:
    """Equal rows, of which one was to run for both."""
    cache, prompts = PagedPrefixCache(model), batch(row((1, 20)), row((1, 20)))
    with torch.no_grad():
        wanted = model(**prompts, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), failing_forward(model, 1, ZeroDivisionError()):
                model(**prompts, past_key_values=cache, logits_to_keep=1)
            found = model(**prompts, past_key_values=cache, logits_to_keep=1).logits
            assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
            cache.reset()


def test_weights_that_change_between_the_forwards_of_a_loop_leave_nothing_to_later_calls(
    model: PreTrainedModel,
) -> None:
    """Another parameter, and then the first one again: nothing that is the model's has been written."""
    cache, ids = PagedPrefixCache(model), torch.tensor([row((1, 64))])
    attention = model.model.layers[0].self_attn
    first, other = attention.v_proj.weight, torch.nn.Parameter(attention.v_proj.weight.detach() * 1.5)
    with torch.no_grad():
        model(ids[:, :32], past_key_values=cache, logits_to_keep=1)
        attention.v_proj.weight = other
        model(ids[:, 32:], past_key_values=cache, logits_to_keep=1)
        attention.v_proj.weight = first
    cache.reset()
    assert_same(run(model, input_ids=ids), run(model, cache, input_ids=ids))


def test_layers_that_are_read_in_the_middle_of_a_forward_go_on(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_everywhere(monkeypatch)
    prompts = batch(*(row((1, 48), (seed, 5)) for seed in range(2, 6)))
    wanted, cache, looks = run(model, **prompts), PagedPrefixCache(model), [4]
    run(model, cache, **prompts)
    cache.reset()
    attention = type(model.model.layers[1].self_attn)
    forward = attention.forward

    def looking(self: Any, *args: Any, **kwargs: Any) -> Any:
        looks[0] -= self.layer_idx == 1
        if self.layer_idx == 1 and not looks[0]:
            assert kwargs["past_key_values"].layers[0].keys.shape[2] > 53
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", looking)
    assert_same(wanted, run(model, cache, **prompts))
    assert looks[0] <= 0


def test_keys_that_are_put_into_a_layer_are_heeded_and_never_kept(model: PreTrainedModel) -> None:
    cache, said = PagedPrefixCache(model, block_size=4), run(model, input_ids=torch.tensor([row((1, 40))])).sequences
    run(model, cache, input_ids=said[:, :40])
    for layer in cache.layers:
        layer.keys = layer.keys * 0.5
    new = {"input_ids": said[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(said)}
    run(model, cache, **new, max_new_tokens=20)
    assert_same(run(model, input_ids=said), run(model, cache, input_ids=said))


def test_a_model_of_another_dtype_keeps_nothing_in_blocks_of_the_first(model: PreTrainedModel) -> None:
    cache, ids = PagedPrefixCache(model), torch.tensor([row((1, 50))])
    run(model.bfloat16(), cache, input_ids=ids)
    model.float()
    for _ in range(2):
        cache.reset()
        assert_same(run(model, input_ids=ids), run(model, cache, input_ids=ids))


def test_rows_that_go_on_with_new_tokens_are_nobody_elses_meanwhile(model: PreTrainedModel) -> None:
    """A call that begins inside of theirs has the same prefix, and would go on in their memory."""
    cache, prompt = PagedPrefixCache(model), row((1, 60))
    for _ in range(2):  # the second one knows how keys and values look
        said = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=4, do_sample=False)
    turn = torch.cat([said, torch.tensor([row((2, 5))])], 1)
    other = torch.tensor([prompt + row((3, 30))])
    new = {"input_ids": turn[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(turn)}
    wanted = run(model, input_ids=turn, max_new_tokens=12)
    nested = AtStep(3, lambda: run(model, cache, input_ids=other))
    assert_same(wanted, run(model, cache, **new, max_new_tokens=12, logits_processor=[nested]))


def test_a_prefix_cache_is_not_reset_under_a_loop_that_may_go_on(model: PreTrainedModel) -> None:
    cache, ids = PagedPrefixCache(model), torch.tensor([row((1, 40))])
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
        for reset in (cache.reset_prefix_cache, cache.store.reset_prefix_cache):
            with pytest.raises(CacheBusyError, match="may resume"):
                reset()
        assert cache.get_seq_length() == 40
    cache.reset()
    cache.reset_prefix_cache()
    run(model, cache, input_ids=ids)
    assert cache.last_call.reused_tokens == 0


# What a breaker found: each gave other logits than a `DynamicCache`, in silence.


def test_weights_that_a_processor_changes_under_beams_leave_nothing(model: PreTrainedModel) -> None:
    cache, ids = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 24))])
    weight = model.model.layers[0].self_attn.k_proj.weight
    before = weight.detach().clone()
    change = AtStep(2, lambda: weight.data.mul_(-1))
    said = run(model, cache, input_ids=ids[:, :8], num_beams=2, max_new_tokens=14, logits_processor=[change]).sequences
    weight.data.copy_(before)
    assert_same(run(model, input_ids=said), run(model, cache, input_ids=said))


@pytest.mark.parametrize("capture", [False, "dry"])
def test_beams_leave_the_columns_of_their_prompt_where_they_lie(
    capture: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_paged_cache.attention.launches.tokens_of_a_launch", lambda *_, **__: math.inf)
    prompts, moved = batch(row((1, 12)), row((2, 9))), []
    change_places = memory.change_places

    def watched(held: Any, index: torch.Tensor, start: int, stop: int) -> None:
        moved.append(start)
        change_places(held, index, start, stop)

    monkeypatch.setattr(memory, "change_places", watched)
    cache = PagedPrefixCache(model, block_size=4, capture=capture)
    for warm in (False, True, True):
        given: dict[str, Any] = {**prompts, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8}
        assert_same(run(model, **given), run(model, cache, **given))
        assert {*moved} == {12}, warm
        moved.clear()
        assert_same(run(model, **prompts), run(model, cache, **prompts))  # rows that move whole, if at all
    zero_blocks(cache)
    assert not is_same(run(model, **given), run(model, cache, **given))


def test_rows_of_a_custom_loop_with_beams_change_places_whole(model: PreTrainedModel) -> None:
    found, ids = [], torch.tensor([row((1, 24))] * 2)

    def healed(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        """Takes back what the prompt ends with, goes on with another end of each row, and lets them change places."""
        cache, said = given["past_key_values"], []
        ends = torch.tensor([row((3, 7)), row((4, 7))])
        for new, start in ((input_ids, 0), (ends, 18), (ends[:, :1], 25), (ends[:, :1], 26)):
            if start in (18, 26):
                cache.crop(-6) if start == 18 else cache.reorder_cache(torch.tensor([1, 0]))
            columns = torch.arange(start, start + new.shape[1])[None].expand(2, -1)
            mask = torch.ones(2, start + new.shape[1], dtype=torch.int64)
            said.append(model(new, attention_mask=mask, position_ids=columns, past_key_values=cache).logits[:, -1])
        found.append(torch.stack(said))
        return input_ids

    cache = PagedPrefixCache(model, block_size=4)
    for each in (DynamicCache(config=model.config), cache):
        model.generate(ids[:1], custom_generate=healed, past_key_values=each, num_beams=2, do_sample=False)
    assert (found[0] - found[1]).abs().max() <= TOLERANCE * found[0].abs().max()
    assert cache.verify().differing == ()


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices"])
def test_rows_of_beams_change_places_whole_once_their_call_is_over(move: str, model: PreTrainedModel) -> None:
    prompts, found = batch(row((1, 12)), row((2, 9))), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=4)):
        run(model, cache, **prompts, num_beams=2, num_return_sequences=2)
        getattr(cache, move)(torch.tensor([2, 3, 0, 1]))
        mask = torch.tensor([[0] * 3 + [1] * 15] * 2 + [[1] * 18] * 2)
        with torch.no_grad():
            given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            found.append(model(torch.tensor([[5]] * 4), **given, past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() <= TOLERANCE * found[0].abs().max()


def test_a_cache_goes_on_with_the_rows_that_were_passed_on(model: PreTrainedModel) -> None:
    ids, found = torch.tensor([row((1, 20))]), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        first = run(model, cache, input_ids=ids)
        run(model, first.past_key_values, input_ids=torch.cat([first.sequences, ids[:, :3]], 1))
        with torch.no_grad():
            found.append((cache.get_seq_length(), model(ids[:, :1], past_key_values=cache).logits))
    assert found[0][0] == found[1][0]
    assert (found[0][1] - found[1][1]).abs().max() <= TOLERANCE * found[0][1].abs().max()


def test_layers_that_are_trimmed_by_hand_are_the_rows(model: PreTrainedModel) -> None:
    ids, found = torch.tensor([row((1, 17))]), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        with torch.no_grad():
            model(ids[:, :16], past_key_values=cache)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :10], layer.values[:, :, :10]
            assert cache.get_seq_length() == 10
            found.append(model(ids[:, 16:], past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() <= TOLERANCE * found[0].abs().max()


def test_a_copy_of_edited_rows_is_not_kept(model: PreTrainedModel) -> None:
    cache, ids = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 24))])
    with torch.no_grad():
        model(ids[:, :16], past_key_values=cache, logits_to_keep=1)
    cache.layers[0].keys.zero_()
    copied = copy.deepcopy(cache)
    del cache
    copied.reset()
    assert_same(run(model, input_ids=ids), run(model, copied, input_ids=ids))


def test_positions_that_a_custom_generate_gives_its_steps_are_read(model: PreTrainedModel) -> None:
    def generate(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        rows = given["past_key_values"]
        logits = model(input_ids, past_key_values=rows, logits_to_keep=1).logits
        for number in range(9):
            token = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
            at = torch.tensor([[40 + number]])
            logits = model(input_ids=token, past_key_values=rows, position_ids=at, logits_to_keep=1).logits
        return input_ids

    cache = PagedPrefixCache(model, block_size=4)
    said = model.generate(torch.tensor([row((1, 24))]), custom_generate=generate, past_key_values=cache)
    assert_same(run(model, input_ids=said), run(model, cache, input_ids=said))


@pytest.mark.parametrize("capture", [False, "dry"])
@pytest.mark.parametrize("num_refused", [1, 2, 3])
def test_where_memory_runs_out_as_rows_begin_others_are_given_up_and_it_is_tried_again(
    num_refused: int, capture: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the rows of the call before, then the blocks; then there is no memory for `DynamicCache` either."""
    reference, cache = run(model, **PROMPTS), PagedPrefixCache(model, capture=capture)
    run(model, cache, **batch(row((1, 40), (2, 9))))
    before, refused, fill, captured = weakref.ref(cache._rows), list[bool](), opening.fill, list[Any]()

    def refusing(store: Any, rows: Any, *args: Any, **kwargs: Any) -> None:
        captured.append(rows.captured)
        if len(refused) < num_refused:
            refused.append(before() is not None)
            raise torch.OutOfMemoryError("refused")
        fill(store, rows, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "fill", refusing)
        if num_refused == 3:
            with pytest.raises(torch.OutOfMemoryError):
                run(model, cache, **PROMPTS)
        else:
            assert_same(reference, run(model, cache, **PROMPTS))
            assert cache.last_call.reused_tokens in ({64} if num_refused == 1 else {0, 64})  # as far as blocks made way
    assert refused == [True, False, False][:num_refused]
    assert not capture or len({*map(id, captured)}) == len(captured)  # each try has the arena anew
    cache.check()
    assert_same(reference, run(model, cache, **PROMPTS))


def test_bypassed_rows_count_index_keys_among_what_their_layers_hold() -> None:
    model = zoo.build("deepseek_v32")
    rows = run(
        model, PagedPrefixCache(model), input_ids=PROMPTS["input_ids"], output_hidden_states=True
    ).past_key_values
    assert rows.why_bypassed is not None
    held = [getattr(layer, name, None) for layer in rows.layers for name in ("keys", "values", "indexer_keys")]
    assert any(getattr(layer, "indexer_keys", None) is not None for layer in rows.layers)
    assert rows.kv_bytes == sum(tensor.nbytes for tensor in held if tensor is not None)
