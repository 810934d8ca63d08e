"""A child that is forked while another thread is in a call generates rightly, and holds none of that call's blocks."""

import os
import threading
from typing import Any

import pytest

from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..reference import AtStep, assert_same, batch, exit_code, forked, row, run
from ..tiny_models import tiny

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


@pytest.mark.parametrize("is_reset", [True, False], ids=["all is forgotten", "the thread's cache goes on"])
def test_a_child_forked_in_the_middle_of_a_call_has_none_of_its_blocks(is_reset: bool) -> None:
    model, is_there, may_go = tiny("llama"), threading.Event(), threading.Event()
    store = PrefixStore(model, block_size=4, num_blocks=64)
    store.looks.weighs_launches = False  # so that rows read known blocks where these lie
    cache, prompts = PagedPrefixCache(store), batch(row((1, 24), (2, 8)), row((1, 24), (3, 8)))
    given = {**prompts, "max_new_tokens": 4, "do_sample": False}
    # not seeded: the lock in torch's `manual_seed` would be one that a child may find taken
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    expected, of_thread = run(model, **given), list[Any]()
    model.generate(**given, past_key_values=PagedPrefixCache(store))

    def stand() -> None:
        is_there.set()
        assert may_go.wait(60)

    def work() -> None:
        waits = [AtStep(1, stand)]
        of_thread.append(model.generate(**given, **outputs, past_key_values=cache, logits_processor=waits))

    thread = threading.Thread(target=work)
    thread.start()
    assert is_there.wait(60)
    assert store.stats().num_blocks_in_use, "the thread holds no block"

    def deed() -> None:
        if is_reset:
            store.reset_prefix_cache()
            assert not any(found.num_tokens for found in map(cache.lookup, prompts["input_ids"]))
        assert_same(expected, model.generate(**given, **outputs, past_key_values=cache))
        cache.reset_prefix_cache()
        assert not store.stats().num_blocks_in_use
        store.check()

    status = exit_code(forked(deed))
    may_go.set()
    thread.join()
    assert status == 0
    assert_same(expected, of_thread[0])
    store.check()
