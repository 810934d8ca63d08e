"""What a cache attaches to its model: once, found however it is passed, and taken off again without a trace."""

import contextlib
import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from ..reference import assert_same, at_once, run
from .test_interrupted_calls import Interrupter

IDS = torch.arange(1, 41).view(1, 40)


def generate(model: Any, cache: Any = None) -> list[int]:
    options = {} if cache is None else {"past_key_values": cache}
    return model.generate(IDS, max_new_tokens=4, do_sample=False, **options)[0].tolist()


def trace(model: Any) -> tuple[Any, ...]:
    """What of a model others could meet."""
    hooks = (model._forward_pre_hooks, model._forward_hooks)
    return {*vars(model)}, [[*each.values()] for each in hooks], model.generate, [*model.state_dict()]


def num_hooks(model: Any) -> tuple[int, int]:
    return len(model._forward_pre_hooks), len(model._forward_hooks)


def test_attaching_twice_and_detaching_leaves_no_trace(tiny_llama: Any) -> None:
    handle = tiny_llama.register_forward_hook(lambda module, args, output: None)  # of others
    before, signature = trace(tiny_llama), inspect.signature(tiny_llama.generate)
    said = [getattr(tiny_llama.generate, name) for name in ("__name__", "__qualname__", "__doc__")]
    cache = PagedPrefixCache(tiny_llama)
    attached = trace(tiny_llama)
    assert attached != before
    assert attached[-1] == before[-1]  # no state of the model
    assert inspect.signature(tiny_llama.generate) == signature
    assert [getattr(tiny_llama.generate, name) for name in ("__name__", "__qualname__", "__doc__")] == said
    PagedPrefixCache(tiny_llama)
    assert trace(tiny_llama) == attached
    cache.detach()
    assert trace(tiny_llama) == before
    tiny_llama.generate = mine = lambda *args, **kwargs: "mine"
    cache.detach()  # nothing is attached
    assert tiny_llama.generate is mine
    handle.remove()


def test_a_detached_model_can_be_attached_again(tiny_llama: Any) -> None:
    PagedPrefixCache(tiny_llama).detach()
    again = PagedPrefixCache(tiny_llama)
    assert generate(tiny_llama, again) == generate(tiny_llama, again)
    assert again.last_call.reused_tokens == 39


@pytest.mark.usefixtures("switching")
def test_threads_that_build_the_first_cache_at_once_attach_it_once(tiny_llama: Any) -> None:
    """A model that is attached twice confirms every forward twice."""
    barrier = threading.Barrier(8)

    def build() -> PagedPrefixCache:
        barrier.wait(timeout=60)
        return PagedPrefixCache(tiny_llama)

    expected = generate(tiny_llama)
    for _ in range(20):
        cache, *_ = at_once(*[build] * 8)
        assert num_hooks(tiny_llama) == (1, 1)
        assert generate(tiny_llama, cache) == expected
        cache.detach()
        assert num_hooks(tiny_llama) == (0, 0)


def test_calls_without_our_cache_run_as_if_nothing_were_attached(tiny_llama: Any) -> None:
    expected = generate(tiny_llama)
    PagedPrefixCache(tiny_llama)
    assert generate(tiny_llama) == expected
    assert generate(tiny_llama, DynamicCache(config=tiny_llama.config)) == expected
    with torch.no_grad():
        assert tiny_llama(IDS).logits.shape == (1, 40, 128)


@pytest.mark.parametrize("given", ["by name", "by position", "ids by position"])
def test_a_cache_is_found_however_it_is_passed(given: str, tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    with torch.no_grad():
        plain = tiny_llama(IDS, logits_to_keep=1)
        for _ in range(2):
            cache.reset()
            if given == "by name":
                output = tiny_llama(input_ids=IDS, past_key_values=cache, logits_to_keep=1)
            elif given == "by position":
                output = tiny_llama(IDS, None, None, cache, logits_to_keep=1)
            else:
                output = tiny_llama(IDS, past_key_values=cache, logits_to_keep=1)
            torch.testing.assert_close(output.logits, plain.logits, atol=1e-3, rtol=0)
    assert (type(output), output.past_key_values) == (type(plain), cache)
    assert cache.get_seq_length() == 40
    assert cache.stats().reused_tokens > 0


def saved_by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_by_torch])
def test_a_model_that_is_copied_works_and_caches_alone_and_takes_no_blocks_along(
    copied: Callable[[Any], Any], tiny_llama: Any
) -> None:
    ours = PagedPrefixCache(tiny_llama)
    expected = generate(tiny_llama, ours)
    other = copied(tiny_llama)
    assert generate(other) == expected
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(3)
    theirs, of_other = PagedPrefixCache(other), type(other).generate(other, IDS, max_new_tokens=4, do_sample=False)
    assert of_other[0].tolist() != expected
    for reused in (0, 39):
        assert generate(other, theirs) == of_other[0].tolist()
        assert theirs.last_call.reused_tokens == reused
        assert generate(tiny_llama, ours) == expected
        assert ours.last_call.reused_tokens == 39
    theirs.detach()
    assert (num_hooks(other), num_hooks(tiny_llama)) == ((0, 0), (1, 1))
    assert other.generate.__self__ is other


def test_nothing_is_saved_with_the_model(tiny_llama: Any, tmp_path: Path) -> None:
    PagedPrefixCache(tiny_llama)
    tiny_llama.save_pretrained(tmp_path)
    loaded = type(tiny_llama).from_pretrained(tmp_path)
    assert "generate" not in vars(loaded)
    assert generate(loaded) == generate(tiny_llama)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_detached", [False, True])
def test_wherever_attaching_or_detaching_is_interrupted_the_next_one_is_whole(
    is_detached: bool, tiny_llama: Any
) -> None:
    def begin() -> PagedPrefixCache:
        cache = PagedPrefixCache(tiny_llama)
        if not is_detached:
            cache.detach()
        return cache

    def act(cache: PagedPrefixCache) -> None:
        cache.detach() if is_detached else PagedPrefixCache(tiny_llama)

    cache, wanted = begin(), run(tiny_llama, input_ids=IDS)
    with Interrupter() as counter:
        act(cache)
    assert counter.num_lines > 5
    for at_line in range(1, counter.num_lines + 1, 1 + counter.num_lines // 12):
        cache = begin()
        with Interrupter(at_line) as interrupter, contextlib.suppress(KeyboardInterrupt):
            act(cache)
        again = PagedPrefixCache(tiny_llama)
        assert_same(wanted, run(tiny_llama, again, input_ids=IDS))
        assert num_hooks(tiny_llama) == (1, 1), interrupter.place
        again.detach()
        assert num_hooks(tiny_llama) == (0, 0), interrupter.place
