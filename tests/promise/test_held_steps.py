"""Through a model: steps that the pool, and on an accelerator the host, catch up with later are stored as all others are.

Each test runs with token ids that are read at once, as on a CPU, and held, as on an accelerator.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore
from hf_paged_cache.blocks import BlockTable

from ..internals import hold_all_token_ids, never_flush, reused_of_chunks, spoil_unwritten_slots
from ..kv.test_pool_contents import (
    assert_equal,
    assert_found_blocks_hold_what_a_plain_forward_gives,
    assert_rows_hold_what_a_plain_forward_gives,
    plain,
    stored,
)
from ..reference import AtStep, assert_same, batch, row, run
from ..tiny_models import build, tiny

SIZE = 4  # tokens of a block
ONE, THREE = batch(row((1, 13))), batch(row((1, 13)), row((2, 10)), row((3, 9)))
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.way("pool")]  # on rows no step is held
in_each_way = pytest.mark.parametrize("_way_of_calls", ["pool", "rows"], indirect=True)


@pytest.fixture(params=["ids read at once", "ids held"], autouse=True)
def _ids_are_held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "ids held":
        hold_all_token_ids(monkeypatch)


def caches() -> list[PagedPrefixCache]:
    """One of each attention, with blocks in which NaN lies."""
    made = []
    for attention in ("paged", "gather"):
        store = PrefixStore(tiny("llama"), block_size=SIZE, num_blocks=200)
        cache = PagedPrefixCache(store, attention=attention)
        run(store.model, cache, **batch(row((9, 5))))
        cache.reset_prefix_cache()
        made.append(cache)
    return made


def poison(cache: PagedPrefixCache) -> None:
    """Put NaN into all slots that hold nothing: whatever is not written there in the end is seen."""
    blocks = cache.store.blocks
    with blocks.lock:
        for layer_idx in blocks.pool.layer_indices:
            spoil_unwritten_slots(blocks, layer_idx, torch.nan)


def generate(cache: PagedPrefixCache, given: dict[str, Any], num_new: int, **arguments: Any) -> Any:
    """A call that finds poison in each slot of the pool that it does not write, however late."""
    ends = [AtStep(step, lambda: poison(cache)) for step in (2, num_new)]
    return run(
        cache.store.model,
        cache,
        **given,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        logits_processor=ends,
        **arguments,
    )


def go_on(cache: PagedPrefixCache, num_new: int) -> None:
    """A plain forward of new tokens on the rows of a cache."""
    rows, num_columns = cache.call.rows.in_batch(), cache.get_seq_length() + num_new
    mask = torch.tensor([[0] * each.pad + [1] * (num_columns - each.pad) for each in rows])
    positions = (mask.cumsum(1) - 1)[:, -num_new:]
    with torch.no_grad():
        cache.store.model(
            torch.full((len(rows), num_new), 7), attention_mask=mask, position_ids=positions, past_key_values=cache
        )


# What ends held steps.


def nothing(cache: PagedPrefixCache) -> None:
    """The call's end does."""


def crop(cache: PagedPrefixCache) -> None:
    cache.crop(-3)


def crop_in_the_block_before(cache: PagedPrefixCache) -> None:
    cache.crop(-SIZE - 1)


def repeat_and_select(cache: PagedPrefixCache) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, -1]))


def copy_and_go_on(cache: PagedPrefixCache) -> None:
    copied = copy.deepcopy(cache)
    assert_rows_hold_what_a_plain_forward_gives(copied)
    for held in (copied, cache):
        go_on(held, 5)
    assert_rows_hold_what_a_plain_forward_gives(copied)


DEEDS = [nothing, crop, crop_in_the_block_before, repeat_and_select, copy_and_go_on]


@pytest.mark.parametrize("num_new", [3, 6, 9])
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_the_pool_holds_what_a_plain_forward_gives_however_steps_end(
    deed: Callable[[PagedPrefixCache], None], num_new: int
) -> None:
    for cache in caches():
        for given in (ONE, THREE):
            generate(cache, given, num_new)
            deed(cache)
            assert_rows_hold_what_a_plain_forward_gives(cache)
            assert_found_blocks_hold_what_a_plain_forward_gives(cache)


def test_without_the_flush_the_pool_holds_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The aid itself works."""
    never_flush(monkeypatch)
    paged, gather = caches()
    generate(gather, THREE, 6)
    assert_rows_hold_what_a_plain_forward_gives(gather)
    generate(paged, THREE, 6)
    with pytest.raises(AssertionError, match="layer 0, key"):
        assert_rows_hold_what_a_plain_forward_gives(paged)


@pytest.mark.parametrize(
    "way",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True, "temperature": 50.0},
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 4},
    ],
    ids=lambda way: " ".join(way),
)
def test_the_pool_holds_what_a_plain_forward_gives_in_each_way_to_generate(way: dict[str, Any]) -> None:
    for cache in caches():
        reference = run(cache.store.model, **ONE, max_new_tokens=10, min_new_tokens=10, **way)
        for _ in range(2):
            assert_same(reference, generate(cache, ONE, 10, **way))
            assert_rows_hold_what_a_plain_forward_gives(cache)
        assert cache.last_call.reused_tokens >= (reused_of_chunks(1) if "prefill_chunk_size" in way else 1)
        assert_found_blocks_hold_what_a_plain_forward_gives(cache)


def test_layers_that_are_read_in_the_middle_of_a_call_are_whole() -> None:
    for cache in caches():
        read: list[torch.Tensor] = []

        def look(cache: PagedPrefixCache = cache, read: list[torch.Tensor] = read) -> None:
            read.append(cache.layers[1].keys)

        at = [AtStep(step, look) for step in (3, 6)]
        run(cache.store.model, cache, **THREE, max_new_tokens=8, min_new_tokens=8, logits_processor=at)
        whole = cache.layers[1].keys
        pads = [each.pad for each in cache.call.rows.distinct]
        for keys in read:
            for number, pad in enumerate(pads):
                assert keys[number, :, pad:].equal(whole[number, :, pad : keys.shape[2]])
        assert_rows_hold_what_a_plain_forward_gives(cache)


def test_a_block_is_found_by_others_with_the_token_behind_it() -> None:
    """While the call that computes it runs, and no step later than if each step were written at once."""
    model, found = tiny("llama"), []
    tokens = array("q", run(model, **ONE, max_new_tokens=16).sequences[0].tolist())
    for cache in caches():
        num_found: list[int] = []

        def look(cache: PagedPrefixCache = cache, num_found: list[int] = num_found) -> None:
            with (
                cache.store.blocks.lock,
                BlockTable(cache.store.blocks.allocator, cache.call.rows.distinct[0].root) as table,
            ):
                num_found.append(table.hold_prefix(tokens))
                assert_equal(stored(cache, table), plain(model, tokens[: table.num_tokens]))

        at = [AtStep(step, look) for step in range(3, 16)]
        run(model, cache, **ONE, max_new_tokens=16, logits_processor=at)
        found.append(num_found)
    # the first forward runs 13 tokens; after a step of a token, full blocks of those before it are found
    assert found == [[(13 + step - 2) // SIZE * SIZE for step in range(3, 16)]] * 2


@pytest.mark.parametrize("layer", [0, 1])
def test_steps_before_one_that_dies_are_stored(layer: int) -> None:
    """Some layers of the view have its column then, and some have not."""
    model = build("llama")
    for cache in [PagedPrefixCache(model, block_size=SIZE, attention=kind) for kind in ("paged", "gather")]:  # type: ignore[arg-type]
        run(model, cache, **batch(row((9, 5))))
        cache.reset_prefix_cache()
        forwards, broken = [], model.model.layers[layer].mlp
        theirs = broken.forward

        def failing(*args: Any, forwards: list[None] = forwards, theirs: Any = theirs) -> Any:
            forwards.append(None)
            if len(forwards) == 4:
                raise ZeroDivisionError
            return theirs(*args)

        def custom(model: Any, input_ids: torch.Tensor, cache: Any = cache, broken: Any = broken, failing: Any = failing, **_: Any) -> Any:  # fmt: skip
            """A loop that tries the step once more."""
            given, mask = input_ids, torch.ones_like(input_ids)
            for _ in range(7):
                broken.forward = failing
                try:
                    logits = model(given, attention_mask=mask, past_key_values=cache).logits
                except ZeroDivisionError:
                    poison(cache)
                    logits = model(given, attention_mask=mask, past_key_values=cache).logits
                given = logits[:, -1:].argmax(-1)
                input_ids = torch.cat((input_ids, given), dim=1)
                mask = torch.ones_like(input_ids)
            return input_ids

        with torch.no_grad():
            output = model.generate(**ONE, past_key_values=cache, max_new_tokens=7, custom_generate=custom)
        del broken.forward
        assert output.equal(model.generate(**ONE, max_new_tokens=7, do_sample=False))
        assert_rows_hold_what_a_plain_forward_gives(cache)
        assert_found_blocks_hold_what_a_plain_forward_gives(cache)


def test_a_call_that_fails_keeps_rows_that_can_go_on() -> None:
    model = tiny("llama")
    for cache in caches():
        with pytest.raises(ZeroDivisionError):
            run(model, cache, **THREE, max_new_tokens=9, logits_processor=[AtStep(7, lambda: 1 / 0)])
        go_on(cache, 1)
        assert_rows_hold_what_a_plain_forward_gives(cache)
        cache.reset()
        cache.check()


# What a loop of its own passes that is no plain step.


class Loop:
    """A `custom_generate` that decodes greedily, and changes what one step is passed, or each of them."""

    def __init__(self, change: Callable[[dict[str, Any]], None], at: int | None = 3, num_new: int = 10) -> None:
        self.change = change
        self.at = at
        self.num_new = num_new
        self.logits: list[torch.Tensor] = []

    def __call__(self, model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        past, mask, given = kwargs.get("past_key_values"), kwargs["attention_mask"], input_ids
        mask = torch.ones_like(input_ids) if mask is None else mask  # `generate` leaves a mask of ones out
        for number in range(self.num_new):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :].clone()
            arguments: dict[str, Any] = {"input_ids": given, "attention_mask": mask.clone(), "position_ids": positions}
            if self.at is None or number == self.at:
                self.change(arguments)
            past = (
                output := model(**arguments, past_key_values=past, logits_to_keep=1, use_cache=True)
            ).past_key_values
            self.logits.append(output.logits)
            given = output.logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, given), dim=1)
            mask = torch.cat((mask, torch.ones_like(given)), dim=1)
        return input_ids

    def run(self, model: PreTrainedModel, cache: PagedPrefixCache | None, given: dict[str, Any]) -> torch.Tensor:
        past = {} if cache is None else {"past_key_values": cache}
        output: torch.Tensor = model.generate(**given, **past, max_new_tokens=self.num_new, custom_generate=self)
        return output


def hide_a_token(arguments: dict[str, Any]) -> None:
    arguments["attention_mask"][:, 7] = 0


def skip_positions(arguments: dict[str, Any]) -> None:
    arguments["position_ids"] += 4


def number_one_row_otherwise(arguments: dict[str, Any]) -> None:
    arguments["position_ids"][-1] += 2


@in_each_way
@pytest.mark.parametrize("change", [hide_a_token, skip_positions, number_one_row_otherwise])
@pytest.mark.parametrize("given", [ONE, THREE], ids=["1 row", "3 rows"])
def test_what_an_unusual_step_computed_is_never_found(
    given: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    """Steps that follow it count on, and would look plain by themselves."""
    model = tiny("llama")
    theirs = Loop(change)
    tokens = theirs.run(model, None, given)
    for cache in caches():
        ours = Loop(change)
        assert ours.run(model, cache, given).equal(tokens)
        for got, wanted in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        cache.reset()
        mask = torch.cat((given["attention_mask"], torch.ones(len(tokens), 10, dtype=torch.int64)), dim=1)
        whole = {"input_ids": tokens, "attention_mask": mask}
        assert_same(run(model, **whole), run(model, cache, **whole))
        pads = given["attention_mask"].shape[1] - given["attention_mask"].sum(1)
        first_unusual = [given["attention_mask"].shape[1] + 3 - 1 - int(pad) for pad in pads]
        found = [each.matched_tokens for each in cache.last_call.rows]
        assert found == [length // SIZE * SIZE for length in first_unusual]


def show_padding(arguments: dict[str, Any]) -> None:
    arguments["attention_mask"][-1, 0] = 1


def fall_back(arguments: dict[str, Any]) -> None:
    arguments["position_ids"] -= 2


@in_each_way
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (show_padding, "padding (and|has no|, which).*keys and values|was padding"),
        (fall_back, r"but the cache holds (its first )?\d+ "),
    ],
)
@pytest.mark.parametrize("at", [3, 9], ids=["in the middle", "at last"])
def test_a_step_that_runs_on_what_is_not_there_is_refused(change: Any, why: str, at: int) -> None:
    model = tiny("llama")
    for cache in caches():
        with pytest.raises(CacheArgumentError, match=why):
            Loop(change, at).run(model, cache, THREE)
        assert not cache.is_generating
        cache.check()
        assert_same(run(model, **THREE), run(model, cache, **THREE))


def test_ids_that_are_written_into_behind_a_step_are_not_taken_for_what_ran() -> None:
    """One tensor for the ids of all steps: what it held when a block is complete is another step's token."""
    model = tiny("llama")
    for cache in caches():
        given = torch.zeros(1, 1, dtype=torch.int64)

        def one_tensor(arguments: dict[str, Any], given: torch.Tensor = given) -> None:
            if arguments["input_ids"].shape[1] == 1:
                arguments["input_ids"] = given.copy_(arguments["input_ids"])

        tokens = Loop(one_tensor, at=None).run(model, cache, ONE)
        assert tokens.equal(model.generate(**ONE, max_new_tokens=10, do_sample=False))
        assert_rows_tell_no_wrong_tokens(cache, tokens)
        whole = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        cache.reset()
        assert_same(run(model, **whole), run(model, cache, **whole))


def assert_rows_tell_no_wrong_tokens(cache: PagedPrefixCache, tokens: torch.Tensor) -> None:
    """What a row says of itself to the next call is what it ran."""
    (held,) = cache.call.rows.distinct
    told = list(held.true_token_ids)
    assert told == tokens[0, : len(told)].tolist()


def test_nothing_behind_the_end_of_a_sequence_is_stored() -> None:
    """One row ends before the others, and gets pads from there on."""
    model = tiny("llama")
    free = run(model, **THREE, max_new_tokens=16)
    generated = free.sequences[:, THREE["input_ids"].shape[1] :]
    end = int(generated[0, 4])
    options = {"eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 16}
    reference, found = run(model, **THREE, **options), []
    for cache in caches():
        assert_same(reference, run(model, cache, **THREE, **options))
        found.append([each.true_token_ids.tolist() for each in cache.call.rows.distinct])
        for each, num_given in zip(found[-1], (13, 10, 9), strict=True):
            assert end not in each[num_given:-1]
        cache.check()
    assert found[0] == found[1]
    assert len(found[0][0]) == 13 + generated[0].tolist().index(end) + 1
