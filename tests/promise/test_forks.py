"""A child that is forked while another thread is in the middle of a call generates rightly, and holds none of that
call's blocks.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers import LogitsProcessor

from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..reference import assert_same, batch, row, run
from ..tiny_models import tiny

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


class Waits(LogitsProcessor):
    """Lets a thread stand in the middle of its call until it may go on."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.is_there.set()
        assert self.may_go.wait(60)
        return scores


def in_a_child(deed: Callable[[], Any]) -> int:
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
def test_a_child_forked_in_the_middle_of_a_call_has_none_of_its_blocks(is_reset: bool) -> None:
    model, waits = tiny("llama"), Waits()
    store = PrefixStore(model, block_size=4, num_blocks=64)
    store.looks.weighs_launches = False  # so that rows read known blocks where these lie
    cache, prompts = PagedPrefixCache(store), batch(row((1, 24), (2, 8)), row((1, 24), (3, 8)))
    given = {**prompts, "max_new_tokens": 4, "do_sample": False}
    # not seeded: the lock in torch's `manual_seed` would be one that a child may find taken
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    expected, of_thread = run(model, **given), list[Any]()
    model.generate(**given, past_key_values=PagedPrefixCache(store))

    def work() -> None:
        of_thread.append(model.generate(**given, **outputs, past_key_values=cache, logits_processor=[waits]))

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.is_there.wait(60)
    assert store.stats().num_blocks_in_use, "the thread holds no block"

    def deed() -> None:
        if is_reset:
            store.reset_prefix_cache()
            assert not any(found.num_tokens for found in map(cache.lookup, prompts["input_ids"]))
        assert_same(expected, model.generate(**given, **outputs, past_key_values=cache))
        cache.reset_prefix_cache()
        assert not store.stats().num_blocks_in_use
        store.check()

    status = in_a_child(deed)
    waits.may_go.set()
    thread.join()
    assert status == 0
    assert_same(expected, of_thread[0])
    store.check()
