"""Who runs a call: brackets whose frames live, and another thread than this one as long as it lives."""

from __future__ import annotations

import threading

from hf_paged_cache.call.running import Bracket, Brackets, ForwardThread

# Brackets


def test_a_bracket_is_open_until_it_is_closed() -> None:
    brackets, outer, inner = Brackets(), Bracket(), Bracket()
    assert not brackets
    brackets.open(outer)
    brackets.open(inner)
    assert outer in brackets
    assert inner in brackets
    brackets.close(outer)
    assert outer not in brackets
    assert inner in brackets
    assert brackets
    brackets.close(inner)
    assert not brackets


def test_one_that_was_never_opened_is_not_open_and_closes_nothing() -> None:
    brackets, bracket = Brackets(), Bracket()
    brackets.open(bracket)
    other = Bracket()
    assert other not in brackets
    brackets.close(other)
    assert bracket in brackets


def test_a_bracket_whose_frame_is_gone_is_open_no_longer() -> None:
    brackets, outer = Brackets(), Bracket()

    def generate() -> None:
        inner = Bracket()
        brackets.open(inner)
        assert inner in brackets

    brackets.open(outer)
    generate()
    assert brackets
    del outer
    assert not brackets


def test_brackets_are_of_another_thread_to_all_but_the_one_that_made_them() -> None:
    brackets, seen = Brackets(), []
    assert not brackets.are_of_another_thread()
    bracket = Bracket()
    brackets.open(bracket)
    assert not brackets.are_of_another_thread()
    thread = threading.Thread(target=lambda: seen.append(brackets.are_of_another_thread()))
    thread.start()
    thread.join()
    assert seen == [True]
    del bracket
    thread = threading.Thread(target=lambda: seen.append(brackets.are_of_another_thread()))
    thread.start()
    thread.join()
    assert seen == [True, False]


# Threads


def test_before_any_forward_no_thread_runs_one() -> None:
    assert not ForwardThread().is_another()


def test_the_thread_that_scheduled_is_another_to_all_others_as_long_as_it_lives() -> None:
    forward, scheduled, over = ForwardThread(), threading.Event(), threading.Event()
    seen_by_itself = []

    def schedule() -> None:
        forward.start()
        seen_by_itself.append(forward.is_another())
        scheduled.set()
        over.wait()

    thread = threading.Thread(target=schedule)
    thread.start()
    scheduled.wait()
    seen_by_others = forward.is_another()
    over.set()
    thread.join()
    assert seen_by_others
    assert seen_by_itself == [False]
    assert not forward.is_another()


def test_the_last_thread_that_scheduled_counts() -> None:
    forward = ForwardThread()
    thread = threading.Thread(target=forward.start)
    thread.start()
    thread.join()
    forward.start()
    assert not forward.is_another()
