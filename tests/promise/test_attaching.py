"""What is attached to a model, once, and taken off again without a trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.integration.hooks import after_forward, attach, before_forward, detach, is_attached

from ..reference import assert_same, run
from .test_interrupted_calls import Interrupter

IDS = torch.arange(1, 41).view(1, 40)


def generate(model: Any, cache: Any = None) -> list[int]:
    options = {} if cache is None else {"past_key_values": cache}
    return model.generate(IDS, max_new_tokens=4, do_sample=False, **options)[0].tolist()


def hooks_of(model: Any) -> tuple[list[Any], list[Any]]:
    return list(model._forward_pre_hooks.values()), list(model._forward_hooks.values())


# Attaching


def test_attaching_twice_and_detaching_leaves_no_trace(tiny_llama: Any) -> None:
    before, generate_before = set(tiny_llama.__dict__), tiny_llama.generate
    attach(tiny_llama)
    assert is_attached(tiny_llama)
    assert hooks_of(tiny_llama) == ([before_forward], [after_forward])
    bracket = tiny_llama.__dict__["generate"]
    PagedPrefixCache(PrefixStore(tiny_llama))
    assert tiny_llama.__dict__["generate"] is bracket
    assert hooks_of(tiny_llama) == ([before_forward], [after_forward])
    detach(tiny_llama)
    assert set(tiny_llama.__dict__) == before
    assert tiny_llama.generate == generate_before
    assert hooks_of(tiny_llama) == ([], [])
    assert not tiny_llama._forward_pre_hooks_with_kwargs
    assert not tiny_llama._forward_hooks_with_kwargs
    assert not is_attached(tiny_llama)
    tiny_llama.generate = mine = lambda *args, **kwargs: "mine"
    detach(tiny_llama)  # nothing is attached
    assert tiny_llama.generate is mine


def test_hooks_of_others_stay_where_they_are(tiny_llama: Any) -> None:
    handle = tiny_llama.register_forward_hook(lambda module, args, output: None)
    before = hooks_of(tiny_llama)
    attach(tiny_llama)
    detach(tiny_llama)
    assert hooks_of(tiny_llama) == before
    handle.remove()


def test_a_detached_model_can_be_attached_again(tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    cache.detach()
    again = PagedPrefixCache(tiny_llama)
    assert generate(tiny_llama, again) == generate(tiny_llama, again)
    assert again.last_call.reused_tokens == 39


@pytest.mark.usefixtures("one_thread", "switching")
def test_threads_that_attach_a_model_at_once_attach_it_once(tiny_llama: Any) -> None:
    """As when each builds the first cache of a model; a model attached twice confirms every forward twice."""
    cache = PagedPrefixCache(tiny_llama)
    barrier = threading.Barrier(8, action=lambda: detach(tiny_llama))

    def build() -> None:
        barrier.wait(timeout=60)
        attach(tiny_llama)

    with torch.no_grad():
        expected = tiny_llama(IDS, logits_to_keep=1).logits
        with ThreadPoolExecutor(8) as pool:
            for _ in range(300):
                for built in [pool.submit(build) for _ in range(8)]:
                    built.result(timeout=60)
                assert hooks_of(tiny_llama) == ([before_forward], [after_forward])
                cache.reset()
                output = tiny_llama(IDS, past_key_values=cache, logits_to_keep=1)
                torch.testing.assert_close(output.logits, expected, atol=1e-3, rtol=0)
    detach(tiny_llama)
    assert hooks_of(tiny_llama) == ([], [])


@pytest.mark.usefixtures("one_thread", "switching")
def test_attaching_and_detaching_at_once_leaves_all_or_nothing(tiny_llama: Any) -> None:
    barrier = threading.Barrier(8)

    def work(deed: Callable[[Any], None]) -> None:
        barrier.wait(timeout=60)
        deed(tiny_llama)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(500):
            for done in [pool.submit(work, deed) for deed in [attach, detach] * 4]:
                done.result(timeout=60)
            attached = ([before_forward], [after_forward])
            assert hooks_of(tiny_llama) == (attached if is_attached(tiny_llama) else ([], []))


# Calls without our cache


def test_calls_without_our_cache_run_as_if_nothing_were_attached(tiny_llama: Any) -> None:
    expected = generate(tiny_llama)
    from transformers import DynamicCache

    attach(tiny_llama)
    assert generate(tiny_llama) == expected
    assert generate(tiny_llama, DynamicCache(config=tiny_llama.config)) == expected
    with torch.no_grad():
        assert tiny_llama(IDS).logits.shape == (1, 40, 128)


def test_generate_has_the_signature_names_and_text_it_had(tiny_llama: Any) -> None:
    names = ("__name__", "__qualname__", "__doc__")
    signature, said = inspect.signature(tiny_llama.generate), [getattr(tiny_llama.generate, name) for name in names]
    attach(tiny_llama)
    assert inspect.signature(tiny_llama.generate) == signature
    assert [getattr(tiny_llama.generate, name) for name in names] == said


# Forwards


@pytest.mark.parametrize("given", ["by name", "by position", "ids by position"])
def test_a_cache_is_found_however_it_is_passed(given: str, tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    with torch.no_grad():
        expected = tiny_llama(IDS, logits_to_keep=1).logits
        for _ in range(2):
            cache.reset()
            if given == "by name":
                output = tiny_llama(input_ids=IDS, past_key_values=cache, logits_to_keep=1)
            elif given == "by position":
                output = tiny_llama(IDS, None, None, cache, logits_to_keep=1)
            else:
                output = tiny_llama(IDS, past_key_values=cache, logits_to_keep=1)
            torch.testing.assert_close(output.logits, expected, atol=1e-3, rtol=0)
    assert cache.get_seq_length() == 40
    assert cache.stats().reused_tokens > 0


def test_an_output_of_ours_is_the_models_own_type(tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    with torch.no_grad():
        plain = tiny_llama(IDS)
        ours = tiny_llama(IDS.repeat(3, 1), past_key_values=cache)
    assert type(ours) is type(plain)
    assert ours.past_key_values is cache
    assert ours.logits.shape == (3, 40, 128)


# Copies of the model


def assert_works_alone(copied: Any, original: Any) -> None:
    """The copy has a bracket of its own that runs its own weights, and caches of the two share nothing."""
    assert is_attached(copied)
    assert copied.__dict__["generate"].model is copied
    with torch.no_grad():
        copied.model.layers[0].mlp.down_proj.weight.mul_(3)
    expected = type(copied).generate(copied, IDS, max_new_tokens=4, do_sample=False)[0].tolist()
    of_original = type(original).generate(original, IDS, max_new_tokens=4, do_sample=False)[0].tolist()
    assert expected != of_original
    ours, theirs = PagedPrefixCache(original), PagedPrefixCache(copied)
    for _ in range(2):
        assert generate(copied, theirs) == expected
        assert generate(original, ours) == of_original
    assert (ours.last_call.reused_tokens, theirs.last_call.reused_tokens) == (39, 39)
    assert ours.stats().prompt_tokens == theirs.stats().prompt_tokens == 80
    detach(copied)
    assert (is_attached(copied), is_attached(original)) == (False, True)
    assert hooks_of(copied) == ([], [])
    assert hooks_of(original) == ([before_forward], [after_forward])
    assert copied.generate.__self__ is copied


def saved_by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_by_torch])
def test_a_model_that_is_copied_works_and_caches_alone_and_takes_no_blocks_along(
    copied: Callable[[Any], Any], tiny_llama: Any
) -> None:
    expected = generate(tiny_llama, PagedPrefixCache(tiny_llama))
    assert generate(copied(tiny_llama)) == expected
    assert_works_alone(copied(tiny_llama), tiny_llama)


def test_what_is_attached_is_neither_state_of_the_model_nor_saved_with_it(tiny_llama: Any, tmp_path: Path) -> None:
    before = list(tiny_llama.state_dict())
    attach(tiny_llama)
    assert list(tiny_llama.state_dict()) == before
    assert "generate" not in tiny_llama._modules
    tiny_llama.save_pretrained(tmp_path)
    loaded = type(tiny_llama).from_pretrained(tmp_path)
    assert not is_attached(loaded)
    assert generate(loaded) == generate(tiny_llama)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("deed", ["attach", "detach"])
def test_wherever_attaching_or_detaching_is_interrupted_the_next_one_is_whole(deed: str, tiny_llama: Any) -> None:
    model = tiny_llama

    def begin() -> None:
        (detach if deed == "attach" else attach)(model)

    def act() -> None:
        (attach if deed == "attach" else detach)(model)

    begin()
    with Interrupter() as counter:
        act()
    wanted = run(model, input_ids=IDS)
    assert counter.num_lines > 5
    for at_line in range(1, counter.num_lines + 1):
        begin()
        with Interrupter(at_line) as interrupter, contextlib.suppress(KeyboardInterrupt):
            act()
        assert_same(wanted, run(model, PagedPrefixCache(model), input_ids=IDS))
        assert hooks_of(model) == ([before_forward], [after_forward]), interrupter.place
        detach(model)
        assert hooks_of(model) == ([], []), interrupter.place
