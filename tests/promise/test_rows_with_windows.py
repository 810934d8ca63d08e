"""Calls on rows of their own of models whose layers see a window: as with `DynamicCache`, from empty stores, used and small ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore
from hf_paged_cache.rows import memory

from ..conformance import zoo
from ..internals import make_forwards_cheap, split_everywhere
from ..reference import TOLERANCE, assert_same, batch, is_same, row, run, zero_blocks

pytestmark = [pytest.mark.usefixtures("one_thread")]

# all layers with a window, some, chunks, and layers that read another one's
TYPES = ("mistral", "gemma3_text", "llama4_text", "gpt_oss")
CALLS: dict[str, dict[str, Any]] = {
    "a row": {**batch(row((1, 50))), "max_new_tokens": 6},
    "one that goes on": batch(row((1, 50), (2, 9))),
    "one that parts": batch(row((1, 30), (3, 9))),
    "padding": batch(row((1, 50), (2, 9)), row((1, 20), (4, 4))),
    "equal rows": batch(row((1, 50), (2, 9)), row((1, 50), (2, 9)), row((1, 50), (3, 9))),
    "beams": {**batch(row((1, 50), (5, 9)), row((1, 50), (6, 4))), "num_beams": 3},
    "samples": {**batch(row((1, 50), (5, 9))), "num_return_sequences": 3, "do_sample": True},
    "lookup": {**batch(row((1, 20), (1, 20))), "prompt_lookup_num_tokens": 3},
    "shorter than a window": batch(row((1, 5))),
    "long": {**batch(row((7, 10))), "max_new_tokens": 90},
    "after a long one": batch(row((7, 10), (8, 5))),
}


def forward(model: Any, ids: Tensor, past: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, past_key_values=past, **more).logits
    return logits[:, -1]


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("num_blocks", [None, 3, 12])
@pytest.mark.parametrize("name", TYPES)
def test_every_call_is_as_with_a_dynamic_cache(
    name: str, num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_forwards_cheap(monkeypatch)
    split_everywhere(monkeypatch)
    model = zoo.build(name)
    cache = PagedPrefixCache(model, block_size=4, num_blocks=num_blocks)
    references = {what: run(model, **given) for what, given in CALLS.items()}
    for turn in range(2):
        for what, given in CALLS.items():
            for is_kept in (True, False):
                assert_same(references[what], run(model, cache, **given))
                cache.check()
                if not is_kept:
                    cache.reset()
            if turn and num_blocks is None:
                assert cache.last_call.reused_tokens > 0, what


@pytest.mark.parametrize("name", TYPES)
def test_what_is_reused_is_seen_in_the_logits(name: str) -> None:
    model, given = zoo.build(name), batch(row((1, 50), (2, 9)))
    cache, reference = PagedPrefixCache(model, block_size=4), run(model, **given)
    run(model, cache, **given)
    cache.reset()
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, **given))
    assert cache.last_call.reused_tokens == 56


@pytest.mark.parametrize("name", TYPES)
def test_most_of_what_was_asked_before_is_reused(name: str) -> None:
    model = zoo.build(name)
    cache, references = (
        PagedPrefixCache(model, block_size=4),
        {what: run(model, **given) for what, given in CALLS.items()},
    )
    for _ in range(3):
        for what, given in CALLS.items():
            assert_same(references[what], run(model, cache, **given))
            cache.reset()
            cache.check()
    assert cache.stats().reused_tokens > cache.stats().computed_tokens


def test_layers_with_a_window_hold_little_more_than_it_however_long_a_call_is() -> None:
    model = zoo.build("mistral")
    window, cache = model.config.sliding_window, PagedPrefixCache(model, block_size=4)
    given = {**batch(row((1, 100))), "max_new_tokens": 150}
    assert_same(run(model, **given), run(model, cache, **given))
    for layer in cache._rows.layers:
        assert layer.held[0].shape[2] <= 3 * window + 100
    assert_same(run(model, **given), run(model, cache, **given))
    assert cache.last_call.reused_tokens == 99  # in blocks: the rows of the call before have passed it


@pytest.mark.parametrize("name", TYPES)
def test_a_loop_is_cropped_reordered_and_copied_as_a_dynamic_cache(name: str) -> None:
    model, new = zoo.build(name), torch.tensor([row((9, 90))])
    prompt = torch.tensor([row((1, 40))])
    cache = PagedPrefixCache(model, block_size=4)
    run(model, cache, input_ids=prompt)
    cache.reset()
    logits = []
    for past in (DynamicCache(config=model.config), cache):
        past.activate_past_recording()
        found = [forward(model, prompt, past, logits_to_keep=1), forward(model, new[:, :5], past)]
        past.crop(-3)
        found.append(forward(model, new[:, 5:7], past))
        past.crop(0)
        past.batch_repeat_interleave(3)
        for step in range(3):
            found.append(forward(model, new[:, step : step + 3].T, past))
            past.crop(0)
            past.reorder_cache(torch.tensor([1, 1, 0]))
        copied = copy.deepcopy(past)
        found += [forward(model, new[:, 30:33].T, each) for each in (past, copied)]
        past.crop(0)
        past.batch_select_indices(torch.tensor([2, 0]))
        found.append(forward(model, new[:, 40:42].T, past))
        logits.append(found)
    for got, wanted in zip(logits[1], logits[0], strict=True):
        assert distance(got, wanted) < TOLERANCE


def test_more_than_a_window_lets_take_back_is_refused_before_anything_changes() -> None:
    model = zoo.build("mistral")
    cache, prompt = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 40))])
    forward(model, prompt, cache, logits_to_keep=1)
    for step in range(150):
        forward(model, torch.tensor([[step % 90 + 1]]), cache)
    with pytest.raises(CacheArgumentError, match="cannot take back 120 tokens: layers with a window"):
        cache.crop(-120)
    plain = DynamicCache(config=model.config)
    forward(model, torch.cat([prompt, torch.tensor([[step % 90 + 1 for step in range(150)]])], dim=1), plain)
    assert distance(forward(model, prompt[:, :1], cache), forward(model, prompt[:, :1], plain)) < TOLERANCE


def test_a_bypassed_call_goes_on_where_the_rows_were() -> None:
    model, prompt = zoo.build("gemma3_text"), torch.tensor([row((1, 60))])
    logits = []
    for past in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=4)):
        forward(model, prompt, past, logits_to_keep=1)
        embeddings = model.get_input_embeddings()(prompt[:, :2])
        with torch.no_grad():
            logits.append(model(inputs_embeds=embeddings, past_key_values=past).logits[:, -1])
        logits.append(forward(model, prompt[:, :1], past))
    assert distance(logits[2], logits[0]) < TOLERANCE
    assert distance(logits[3], logits[1]) < TOLERANCE


def test_threads_call_on_one_cache_of_a_model_with_windows() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = zoo.build("gemma3_text")
    store = PrefixStore(model, block_size=4, num_blocks=60)
    cache = PagedPrefixCache(store)
    prompts = [batch(row((1, 30), (seed, 20))) for seed in range(2, 6)]
    references = [run(model, **given) for given in prompts]

    def play(number: int) -> None:
        for turn in range(4):
            at = (number + turn) % len(prompts)
            assert_same(references[at], run(model, cache, **prompts[at]))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(play, number) for number in range(3)]:
            done.result()
    cache.reset()
    store.check()


class FailsAt:
    """Stands for a function, and raises in one of its calls."""

    def __init__(self, function: Callable[..., Any], number: int, error: BaseException) -> None:
        self.function, self.number, self.error, self.num_calls = function, number, error, 0

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.number:
            raise self.error
        return self.function(*arguments, **more)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["write_blocks", "load_blocks"])
def test_a_fault_while_windows_are_kept_or_loaded_leaves_nothing_wrong_behind(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("gemma3_text")
    given = {**batch(row((1, 50), (2, 9)), row((1, 50), (3, 20))), "max_new_tokens": 12}
    reference, number, failing = run(model, **given), 0, FailsAt(getattr(memory, name), 0, error())
    while failing.num_calls >= number:
        number += 1
        cache = PagedPrefixCache(model, block_size=4, num_blocks=60)
        run(model, cache, **batch(row((1, 50))))
        cache.reset()
        failing = FailsAt(failing.function, number, error("in the middle"))
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, failing)
            try:
                assert_same(reference, run(model, cache, **given))
            except error:
                assert error is KeyboardInterrupt or name == "load_blocks"
        cache.check()
        for _ in range(2):
            assert_same(reference, run(model, cache, **given))
            cache.reset()
            cache.check()
    assert number > 2


def test_other_windows_than_before_are_followed() -> None:
    model, given = zoo.build("mistral"), batch(row((1, 60)))
    cache = PagedPrefixCache(model, block_size=4)
    for window in (24, 11, 40):
        model.config.sliding_window = window
        reference = run(model, **given)
        for turn in range(4):
            assert_same(reference, run(model, cache, **given))
            assert turn < 2 or cache.last_call.reused_tokens >= 56
            cache.reset()
            cache.check()


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_loop_and_a_call_after_autocast_are_as_with_a_dynamic_cache(name: str) -> None:
    model, prompt, other = zoo.build(name), torch.tensor([row((1, 60))]), batch(row((7, 60)))
    logits, cache = [], PagedPrefixCache(model, block_size=4)
    for past in (DynamicCache(config=model.config), cache):
        forward(model, prompt[:, :40], past)
        with torch.autocast("cpu", torch.bfloat16):
            forward(model, prompt[:, 40:43], past)
        logits.append(forward(model, prompt[:, 43:50], past))
    assert distance(logits[1], logits[0]) < TOLERANCE
    with torch.autocast("cpu", torch.bfloat16):
        run(model, PagedPrefixCache(cache.store), **batch(row((8, 60))))
    reference = run(model, **other)
    for _ in range(2):
        assert_same(reference, run(model, cache, **other))
        cache.reset()
    cache.check()
