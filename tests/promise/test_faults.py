"""Whatever is raised wherever: the invariants hold, nothing half written is reused, and the next calls are right.

Faults are put into our own classes and into transformers', not into the model as hooks: those would be another root,
and hide what was committed.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_paged_cache import ForwardMismatchError, PagedPrefixCache
from hf_paged_cache.rows import memory
from hf_paged_cache.rows.rows import Rows

from ..internals import (
    FAULT_POINTS,
    layer_write,
    make_forwards_cheap,
    make_pools_grow,
    reused_of_chunks,
    split_everywhere,
)
from ..reference import assert_same, batch, row, run
from ..tiny_models import build, tiny

PROMPT = row((1, 18))


class BoomError(Exception):
    """The fault."""


def new_cache() -> PagedPrefixCache:
    """A cache with a call after it that the next one shares ten tokens with: two blocks and a half."""
    cache = PagedPrefixCache(tiny("llama"), block_size=4, num_blocks=100)
    run(tiny("llama"), cache, **batch(row((1, 10), (2, 4))))
    return cache


@functools.cache
def next_calls() -> list[tuple[dict[str, Any], Any]]:
    """Calls that reuse whatever there is to reuse, and what they must give."""
    calls: list[dict[str, Any]] = [
        batch(PROMPT),
        batch(row((1, 18), (3, 3)), row((1, 12))),
        {**batch(PROMPT), "num_beams": 3},
        batch(row((1, 10), (2, 4))),
    ]
    return [(arguments, run(tiny("llama"), **arguments)) for arguments in calls]


def assert_sound(cache: PagedPrefixCache) -> None:
    """Invariants hold, the next calls are right, and all blocks come back."""
    cache.check()
    for arguments, reference in next_calls():
        assert_same(reference, run(tiny("llama"), cache, **arguments))
        cache.check()
    cache.reset()
    assert cache.stats().num_blocks_in_use == 0
    cache.reset_prefix_cache()
    stats = cache.stats()
    assert stats.num_free_blocks == stats.num_blocks - 1
    cache.check()


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, after: bool, error: type[Exception] = BoomError
) -> list[int]:
    """Raise in the `number`th call of a method, before or after it did its work; number 0 only counts the calls."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number and not after:
            raise error
        result = original(*args, **kwargs)
        if len(calls) == number:
            raise error
        return result

    monkeypatch.setattr(owner, name, failing)
    return calls


POINTS = [*FAULT_POINTS, (LlamaMLP, "__call__")]  # not its forward: another one is another root


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_in_a_call_leaves_nothing_wrong_behind(
    owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_forwards_cheap(monkeypatch)
    model = tiny("llama")
    # a prompt that comes alone has nothing to run ahead
    prompts = [PROMPT, row((1, 16), (4, 4))] if name == "run_ahead" else [PROMPT]
    victim = {**batch(*prompts), "num_beams": 3, "max_new_tokens": 8}
    with monkeypatch.context() as patch:
        cache = new_cache()
        calls = fail_at(patch, owner, name, 0, after)
        run(model, cache, **victim)
    assert calls, "the call never comes here"
    for number in sorted({1, (len(calls) + 1) // 2, len(calls)}):
        cache = new_cache()
        with monkeypatch.context() as patch:
            fail_at(patch, owner, name, number, after)
            with pytest.raises(BoomError):
                run(model, cache, **victim)
        assert_sound(cache)


MEMORY_PLACES = [point for point in POINTS if point[1] in ("begin", "read", "keep", "apply", "update", "make_room")]


@pytest.mark.parametrize(
    ("owner", "name"), [*MEMORY_PLACES, POINTS[-1]], ids=lambda value: getattr(value, "__name__", value)
)
def test_out_of_memory_anywhere_leaves_the_cache_right(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call before it has left is given up first, and then it is tried once more."""
    make_pools_grow(monkeypatch)
    num_struck = 0
    for number, (arguments, reference) in enumerate(next_calls()):
        for at in (1, 5):
            cache = PagedPrefixCache(tiny("llama"), block_size=4)
            if at == 1:
                run(tiny("llama"), cache, **batch(row((1, 10), (2, 4))))
            with monkeypatch.context() as patch:
                calls = fail_at(patch, owner, name, at, number % 2 == 1, torch.OutOfMemoryError)
                with contextlib.suppress(torch.OutOfMemoryError):
                    assert_same(reference, run(tiny("llama"), cache, **arguments))
            num_struck += len(calls) >= at
            assert_sound(cache)
    assert num_struck


def test_out_of_memory_where_a_prompt_in_chunks_is_filled_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is half copied then: no forward may go on behind it."""
    model, cache, copy_known = tiny("llama"), new_cache(), memory.load_blocks
    num_copies = list[int]()

    def refusing(*args: Any) -> None:
        num_copies.append(1)
        if len(num_copies) == 1:
            raise torch.OutOfMemoryError
        copy_known(*args)

    way = {**batch(PROMPT), "prefill_chunk_size": 4, "max_new_tokens": 4}
    run(model, cache, **way)
    cache.reset()
    monkeypatch.setattr(memory, "load_blocks", refusing)
    assert_same(run(model, **way), run(model, cache, **way))
    assert len(num_copies) == reused_of_chunks(1)
    assert_sound(cache)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_fault_in_a_layer_of_a_plain_forward_takes_that_forward_back(
    number: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 and 1 of the first forward, then of the second; the rows resume from what was confirmed."""
    model = tiny("llama")
    ids = torch.tensor([PROMPT])
    cache = PagedPrefixCache(model, block_size=4)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        with monkeypatch.context() as patch:
            fail_at(patch, *layer_write(cache), number, after)
            done = 0 if number <= 2 else 9
            if done:
                model(ids[:, :done], past_key_values=cache)
            with pytest.raises(BoomError):
                model(ids[:, done : done + 9], past_key_values=cache)
        cache.check()
        assert cache.get_seq_length() == done
        got = model(ids[:, done:], past_key_values=cache).logits
    torch.testing.assert_close(got, wanted[:, done:], atol=1e-4, rtol=1e-4)
    assert_sound(cache)


def test_a_forward_that_goes_round_the_hooks_is_refused() -> None:
    model = tiny("llama")
    cache = new_cache()
    with pytest.raises(ForwardMismatchError), torch.no_grad():
        model.model(torch.tensor([PROMPT]), past_key_values=cache)
    assert_sound(cache)


@pytest.mark.parametrize(
    "rows", [[row((1, 12))], [row((1, 12)), row((1, 12)), row((2, 12))]], ids=["1 row", "equal rows"]
)
def test_a_call_with_a_misspelt_option_leaves_the_rows_that_can_go_on(rows: list[list[int]]) -> None:
    model = build("llama")
    cache, reference = PagedPrefixCache(model, block_size=4, num_blocks=24), DynamicCache(config=model.config)
    for each in (cache, reference):
        run(model, each, **batch(*rows), max_new_tokens=4)
    with pytest.raises(ValueError, match="max_new_tokenss"):
        run(model, cache, input_ids=torch.tensor([row((9, 20))]), max_new_tokenss=4)
    assert cache.get_seq_length() == 15
    new = torch.tensor([[5, 6]] * len(rows))
    given = {"input_ids": new, "attention_mask": torch.ones(len(rows), 17, dtype=torch.long), "max_new_tokens": 3}
    assert_same(run(model, reference, **given), run(model, cache, **given))
    cache.check()


def test_out_of_memory_as_a_call_leaves_blocks_does_not_replace_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has grown during the call, so its rows get columns of their own when it ends."""
    split_everywhere(monkeypatch)
    make_pools_grow(monkeypatch)
    model, cache, num_struck = tiny("llama"), PagedPrefixCache(tiny("llama"), block_size=4), 0
    call = batch(row((1, 16), (2, 3)), row((1, 16), (3, 3)))
    reference = run(model, **call, max_new_tokens=80)
    run(model, cache, **batch(row((1, 16))), max_new_tokens=1)
    cache.reset()

    def refusing(rows: Rows) -> None:
        nonlocal num_struck
        if not rows.in_generate and rows.shared is not None:
            num_struck += 1
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "make_dense", refusing)
        assert_same(reference, run(model, cache, **call, max_new_tokens=80))
    assert num_struck == 1
    assert_sound(cache)
