"""Which thread runs a forward: only another one that lives is in the way."""

from __future__ import annotations

import threading

from hf_paged_cache.call.forward_thread import ForwardThread


def test_before_any_forward_no_thread_runs_one() -> None:
    assert not ForwardThread().is_another()


def test_the_thread_that_announced_is_another_to_all_others_as_long_as_it_lives() -> None:
    forward, announced, over = ForwardThread(), threading.Event(), threading.Event()
    seen_by_itself = []

    def announce() -> None:
        forward.start()
        seen_by_itself.append(forward.is_another())
        announced.set()
        over.wait()

    thread = threading.Thread(target=announce)
    thread.start()
    announced.wait()
    seen_by_others = forward.is_another()
    over.set()
    thread.join()
    assert seen_by_others
    assert seen_by_itself == [False]
    assert not forward.is_another()


def test_the_last_thread_that_announced_counts() -> None:
    forward = ForwardThread()
    thread = threading.Thread(target=forward.start)
    thread.start()
    thread.join()
    forward.start()
    assert not forward.is_another()
