"""What a forked child does with a store whose other threads were in the middle of calls. The first is a short run of `tests.forks`; the long one is a command."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.call.fill import fill
from hf_paged_cache.integration import opening

from ..forks import failed, forks
from ..reference import assert_same, batch, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.mark.usefixtures("one_thread")
def test_a_child_that_is_forked_while_threads_generate_is_right_or_refuses_clearly() -> None:
    outcomes = forks(16, seconds=60, seed=0)
    assert not failed(outcomes), outcomes


class _Waits(LogitsProcessor):
    """Lets a thread stand in the middle of its call until it may go on."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.is_there.set()
        assert self.may_go.wait(60)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.wait()
        return scores


def _in_a_child(deed: Callable[[], Any]) -> int:
    """Exit status of a forked child that does this."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            deed()
            status = 0
        except BaseException:  # noqa: BLE001  # a child never returns
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_reset", [True, False], ids=["all is forgotten", "the thread's cache goes on"])
@pytest.mark.parametrize("stands_in", ["its steps", "what fills its rows"])
def test_a_child_forked_in_the_middle_of_a_call_has_none_of_its_blocks(
    stands_in: str, is_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, waits = tiny("llama"), _Waits()
    store = PrefixStore(model, block_size=4, num_blocks=64)
    store.looks.weighs_launches = False  # so that rows read known blocks where these lie
    cache, prompts = PagedPrefixCache(store), batch(row((1, 24), (2, 8)), row((1, 24), (3, 8)))
    given = {**prompts, "max_new_tokens": 4, "do_sample": False}
    expected = run(model, **given)
    model.generate(**given, past_key_values=PagedPrefixCache(store))
    here = threading.get_ident()

    def fill_later(*arguments: Any, **more: Any) -> None:
        if threading.get_ident() != here:
            waits.wait()
        fill(*arguments, **more)

    if stands_in == "what fills its rows":
        monkeypatch.setattr(opening, "fill", fill_later)
        processors = LogitsProcessorList()
    else:
        processors = LogitsProcessorList([waits])
    thread = threading.Thread(
        target=lambda: model.generate(**given, past_key_values=cache, logits_processor=processors)
    )
    thread.start()
    assert waits.is_there.wait(60)
    num_held = store.blocks.allocator.num_blocks_in_use

    def deed() -> None:
        if is_reset:
            store.reset_prefix_cache()
            assert not any(found.num_tokens for found in map(cache.lookup, prompts["input_ids"]))
        outputs = {"return_dict_in_generate": True, "output_logits": True}
        assert_same(expected, model.generate(**given, **outputs, past_key_values=cache))
        assert (cache.last_call.reused_tokens > 0) != is_reset
        cache.reset_prefix_cache()
        assert not store.blocks.allocator.num_blocks_in_use
        store.check()

    status = _in_a_child(deed)
    waits.may_go.set()
    thread.join()
    assert status == 0
    assert num_held, "the thread held no block"
