"""Models whose layers carry states: the same result as `DynamicCache`, and no token that a snapshot could spare."""

import copy
from collections.abc import Callable
from functools import cache as cached
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import ForwardMismatchError, PagedPrefixCache, PrefixStore

from ..conformance import zoo
from ..internals import failing_forward, held_tensors, zero_states
from ..reference import Forwards, assert_near, assert_right, assert_same, batch, is_same, row, run

# A gated delta net beside attention; convolutions alone; Mamba and attention in one layer; one token otherwise than
# several.
ALL = ("qwen3_next", "lfm2", "falcon_h1", "zamba2")
NAMES = pytest.mark.parametrize("name", ALL)
RECURRENT = ("qwen3_next", "falcon_h1", "zamba2")
SHARED = 128  # tokens, where all of them may keep a snapshot


@cached
def tiny(name: str) -> PreTrainedModel:
    """The same model for all tests, which must leave it as it was."""
    return zoo.build(name)


def play(model: PreTrainedModel, cache: PagedPrefixCache, **arguments: Any) -> Any:
    """A call with both caches, compared; the output of ours."""
    output = assert_right(model, cache, **arguments)
    cache.check()
    return output


@NAMES
def test_the_third_request_computes_its_question_and_at_most_64_tokens(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    for number, shared in enumerate((200, 200, 200, 150, 150, 150)):
        play(model, cache, **batch(row((1, shared), (number + 2, 20))))
        if number in (2, 5):
            assert cache.last_call.computed_tokens <= 20 + 64


def test_where_two_prompts_part_a_third_goes_on_from_states_and_a_window() -> None:
    model, common = tiny("zaya"), 144  # both: what the window sees where a forward was cut is kept with the states
    cache = PagedPrefixCache(model, block_size=8)
    for seed in (5, 6, 7):
        play(model, cache, **batch(row((1, common), (seed, 190))))
    assert cache.last_call.reused_tokens == common
    cache.reset()
    zero_states(cache.store)
    inputs = batch(row((1, common), (9, 190)))
    assert not is_same(run(model, **inputs), run(model, cache, **inputs))


@NAMES
def test_no_block_that_is_known_is_written_again(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    play(model, cache, **batch(row((1, 150), (2, 20))))
    cache.reset()
    for tensor in held_tensors(cache):
        tensor.mul_(1 + 1e-6)  # what is computed again differs from it, and logits do not
    before = [tensor.clone() for tensor in held_tensors(cache)]
    play(model, cache, **batch(row((1, 150), (3, 20))), max_new_tokens=1)
    for was, tensor in zip(before, held_tensors(cache), strict=True):
        written = (tensor[: len(was)] != was).flatten(1).any(1)
        assert int(written.sum()) == 1, "the one that is full after the known blocks"
    assert "blocks are cached up to token 144" in cache.last_call.rows[0].stopped or name == "lfm2"


@NAMES
def test_eight_padded_rows_with_a_new_prefix_compute_it_once(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    lengths = [5 + 3 * number for number in range(8)]
    rows = [row((1, 4 * SHARED), (number + 2, length)) for number, length in enumerate(lengths)]
    play(model, cache, **batch(*rows))
    assert cache.last_call.computed_tokens == 4 * SHARED + sum(lengths)
    others = [row((1, 4 * SHARED), (number + 20, length)) for number, length in enumerate(lengths)]
    play(model, cache, **batch(*others))
    assert cache.last_call.computed_tokens == sum(lengths)


@NAMES
def test_what_is_generated_is_found_from_its_last_boundary_by_others(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    unit = cache.store.blocks.align  # snapshots are kept at multiples of so many tokens
    first = play(model, cache, **batch(row((1, 2 * SHARED))), max_new_tokens=3 * unit + 5)
    num_run = first.sequences.shape[1] - 1
    other = PagedPrefixCache(cache.store)
    play(model, other, **batch(first.sequences[0].tolist() + row((2, 9))))
    if name == "zamba2":
        assert other.last_call.computed_tokens == num_run + 10 - 2 * SHARED
        return
    assert other.last_call.computed_tokens == num_run % unit + 10
    if name != "lfm2":  # which has one at every block of the prompt
        assert cache.stats().num_snapshots <= 4, "one of those that were passed"


@NAMES
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_beams_and_samples_carry_their_states_along(name: str, how: dict[str, Any]) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    rows = batch(row((1, SHARED), (2, 9)), row((1, SHARED), (3, 4)))
    for _ in range(2):
        play(model, cache, **rows, **how, max_new_tokens=20)
    assert cache.last_call.reused_tokens > SHARED
    if name in RECURRENT:
        zero_states(cache)  # keys and values are as they were
        cache.reset()
        assert not is_same(run(model, **rows, **how), run(model, cache, **rows, **how))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_what_is_computed_again_is_read_as_it_is_now(num_beams: int) -> None:
    """Behind a snapshot of zeros the first keys are others than the pool's, and no later token knows of it."""
    model = tiny("lfm2")
    cache, prompt = PagedPrefixCache(model, block_size=8), batch(row((1, 325)))
    reference = run(model, **prompt, num_beams=num_beams)
    run(model, cache, **prompt, max_new_tokens=1)
    zero_states(cache)
    assert not is_same(reference, run(model, cache, **prompt, num_beams=num_beams))
    assert cache.last_call.computed_tokens == 5


def forwards(model: PreTrainedModel, *caches: Any) -> Callable[[torch.Tensor], None]:
    """Runs the same ids with each cache, and compares the logits."""

    def run_both(ids: torch.Tensor) -> None:
        with torch.no_grad():
            wanted, got = (model(ids, past_key_values=each, use_cache=True).logits[:, -1] for each in caches)
        assert_near(got, wanted)

    return run_both


@NAMES
def test_behind_a_step_that_died_the_whole_prompt_is_right_and_new_tokens_alone_are_refused(name: str) -> None:
    """Of the layers, those before the one that failed have seen the step's token, and the others have not."""
    model = tiny(name)
    prompt = row((1, 70))
    said = run(model, **batch(prompt)).sequences[0].tolist()
    cache = PagedPrefixCache(model)  # built first: that runs forwards
    with Forwards(model) as shapes:
        run(model, cache, **batch(prompt))
    for number, is_refused in zip(range(len(shapes) - 3, len(shapes) + 1), (True, False) * 2, strict=True):
        cache = PagedPrefixCache(model)
        with failing_forward(model, number, KeyError("planted")), pytest.raises(KeyError):
            run(model, cache, **batch(prompt))
        num_run = cache.get_seq_length()
        assert num_run > 70
        whole = torch.tensor([said[:num_run] + row((2, 5))])
        if is_refused:
            with pytest.raises(ForwardMismatchError, match="is lost"):
                run(model, cache, input_ids=whole[:, num_run:], attention_mask=torch.ones_like(whole))
            cache.reset()
        play(model, cache, input_ids=whole)


@NAMES
def test_rows_that_are_copied_selected_and_reordered_go_on_as_themselves(name: str) -> None:
    model = tiny(name)
    ours, theirs = PagedPrefixCache(model), DynamicCache(config=model.config)
    run_both = forwards(model, theirs, ours)
    run_both(torch.tensor([row((1, 70)), row((2, 70))]))
    run_both(torch.tensor([[5], [6]]))
    copied = forwards(model, copy.deepcopy(theirs), copy.deepcopy(ours))
    run_both(torch.tensor([[7], [8]]))
    copied(torch.tensor([row((3, 3)), row((4, 3))]))
    for cache in (ours, theirs):
        cache.reorder_cache(torch.tensor([1, 0, 1]))
    run_both(torch.tensor([row((5, 2)), row((6, 2)), row((7, 2))]))
    ours.batch_select_indices(torch.tensor([2]))
    theirs.reorder_cache(torch.tensor([2]))
    run_both(torch.tensor([[9]]))
    ours.batch_repeat_interleave(2)
    theirs.reorder_cache(torch.tensor([0, 0]))
    run_both(torch.tensor([[9], [10]]))
    ours.check()


@NAMES
def test_a_long_prompt_keeps_snapshots_on_a_grid_as_long_as_there_is_room(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    grid = cache.store.blocks.grid
    play(model, cache, **batch(row((1, 2 * grid + 70))), max_new_tokens=1)
    play(model, cache, **batch(row((1, grid + 30), (2, 20))), max_new_tokens=1)
    assert cache.last_call.computed_tokens <= 50
    few = PagedPrefixCache(model, num_blocks=400)
    few.store.blocks.snapshots.limit(1)
    play(model, few, **batch(row((1, 2 * grid + 70))), max_new_tokens=1)
    assert few.stats().num_snapshots == 1


@pytest.mark.parametrize("name", RECURRENT)
def test_a_long_prompt_leaves_the_snapshots_of_others_where_there_is_no_room_for_more(name: str) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model, num_blocks=400)
    blocks = cache.store.blocks
    blocks.snapshots.limit(4)
    for number in (2, 3):
        play(model, cache, **batch(row((number, SHARED), (9, 5))), max_new_tokens=1)
    play(model, cache, **batch(row((1, 2 * blocks.grid + 70))), max_new_tokens=1)
    cache.reset()
    play(model, cache, **batch(row((2, SHARED), (8, 5))), max_new_tokens=1)
    assert cache.last_call.computed_tokens == 5


def test_convolutions_alone_keep_every_block_out_of_one_forward() -> None:
    model = tiny("lfm2")
    cache = PagedPrefixCache(model)
    rows = row((1, 100)), row((2, 89))
    with Forwards(model) as shapes:
        run(model, cache, **batch(*rows), max_new_tokens=1)
    assert shapes == [(2, 100)]
    assert cache.stats().num_snapshots == 6 + 5
    for tokens in rows:
        for shared in (16, 48, 80):
            other = PagedPrefixCache(cache.store)
            play(model, other, **batch(tokens[:shared] + row((shared, 20))))
            assert other.last_call.reused_tokens == shared


@NAMES
def test_rows_of_other_lengths_run_ahead_up_to_the_column_of_the_last(name: str) -> None:
    """Rows of four lengths after one prefix: as many forwards, and no padding in them."""
    model = tiny(name)
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(row((1, 4 * SHARED), (2, 9))))
    rows = batch(*(row((1, 4 * SHARED), (number, 5 * number)) for number in (3, 4, 5, 6)))
    reference = run(model, **rows, max_new_tokens=1)
    with Forwards(model) as shapes:
        assert_same(reference, run(model, cache, **rows, max_new_tokens=1))
    assert shapes == [(1, 15), (1, 10), (1, 5), (4, 15)]


def test_salts_do_not_share_states_and_count_their_own() -> None:
    model = tiny("qwen3_next")
    store = PrefixStore(model)
    caches = [PagedPrefixCache(store, cache_salt=salt) for salt in ("a", "b")]
    for cache in caches:
        play(model, cache, **batch(row((1, SHARED), (2, 9))))
        assert cache.last_call.reused_tokens == 0
    counts = [cache.stats().num_snapshots for cache in caches]
    assert counts[0] == counts[1] > 0
    assert store.stats().num_snapshots == sum(counts)
    caches[0].reset()
    caches[0].reset_prefix_cache()
    assert [cache.stats().num_snapshots for cache in caches] == [0, counts[1]]
