"""Who runs a call: brackets as long as their frames' variables live, and frames on the stacks of threads."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

from hf_paged_cache.call.running import Bracket, Brackets, is_on_a_stack

from .bench import in_forward, is_forward

# Brackets


def test_a_bracket_is_open_until_it_is_closed() -> None:
    brackets, outer, inner = Brackets(), Bracket(), Bracket()
    assert not brackets
    brackets.open(ref(outer))
    brackets.open(ref(inner))
    assert ref(outer) in brackets
    assert ref(inner) in brackets
    brackets.close(ref(outer))
    assert ref(outer) not in brackets
    assert ref(inner) in brackets
    assert brackets
    brackets.close(ref(inner))
    assert not brackets


def test_one_that_was_never_opened_is_not_open_and_closes_nothing() -> None:
    brackets, bracket, other = Brackets(), Bracket(), Bracket()
    brackets.open(ref(bracket))
    assert ref(other) not in brackets
    brackets.close(ref(other))
    assert ref(bracket) in brackets


def test_a_bracket_that_is_gone_is_open_no_longer() -> None:
    brackets, outer, inner = Brackets(), Bracket(), Bracket()
    brackets.open(ref(outer))
    brackets.open(gone := ref(inner))
    del inner
    assert brackets
    assert gone in brackets  # nobody has closed it, nor opened another
    brackets.forget_closed()
    assert gone not in brackets
    del outer
    assert not brackets


def test_brackets_are_of_another_thread_to_all_but_the_one_that_opened_them() -> None:
    brackets, seen = Brackets(), []
    assert not brackets.are_of_another_thread()
    bracket = Bracket()
    brackets.open(ref(bracket))
    assert not brackets.are_of_another_thread()
    in_thread(lambda: seen.append(brackets.are_of_another_thread()))
    del bracket
    in_thread(lambda: seen.append(brackets.are_of_another_thread()))
    assert seen == [True, False]


def test_brackets_of_threads_that_are_not_there_are_closed() -> None:
    brackets, bracket, other = Brackets(), Bracket(), Bracket()
    brackets.open(ref(bracket))
    threads: list[int] = []
    in_thread(lambda: (brackets.open(ref(other)), threads.append(threading.get_ident())))
    assert not brackets.lose_threads({-1})
    assert brackets.lose_threads(threads)
    assert ref(bracket) in brackets
    assert ref(other) not in brackets


# Stacks


def in_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_frame_is_on_a_stack_while_it_runs() -> None:
    def ask() -> tuple[bool, bool]:
        return is_on_a_stack(is_forward), is_on_a_stack(is_forward, of_other_threads=True)

    assert ask() == (False, False)
    assert in_forward(ask) == (True, False)
    assert ask() == (False, False)


def test_a_frame_of_another_thread_is_seen_also_of_one_that_threading_does_not_list() -> None:
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        in_forward(lambda: (begun.set(), over.wait()))
        ended.set()

    _thread.start_new_thread(run, ())
    begun.wait()
    seen = is_on_a_stack(is_forward, of_other_threads=True)
    over.set()
    ended.wait()
    assert seen
    assert not is_on_a_stack(is_forward)
