"""Calls interrupted at random lines, again and again on one cache object: each time, the next call on it is right.

Run it with `python -m tests.interrupts --times 2000 --seed 0`. Lines are of this package, or of everything that
`generate` runs; every third call is interrupted a second time while it is being left. The collector is off, so that
nothing is mended by it. A failure names seed, number and line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import time
from collections import Counter
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from hf_paged_cache import PagedPrefixCache, PrefixStore

from .promise.test_interrupted_calls import CALLS, OURS, Interrupter, assert_all_accounted_for
from .reference import assert_same, run
from .tiny_models import tiny

NUM_NEW = 3
SECOND_WITHIN = 40  # lines


class TwiceInterrupter(Interrupter):
    """Interrupts at a line of this package, or of all that runs, and perhaps once more so many lines later.

    Args:
        at_line: the first one; 0 only counts.
        after: lines between the first and the second interrupt; 0: there is no second one.
        everywhere: lines of other packages count, too.
    """

    def __init__(self, at_line: int = 0, after: int = 0, *, everywhere: bool = False) -> None:
        super().__init__(at_line)
        self._after = after
        self._everywhere = everywhere

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._everywhere and not frame.f_code.co_filename.startswith(OURS):
            return self._line
        return super()._enter_frame(frame, event, arg)

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            return super()._line(frame, event, arg)
        except KeyboardInterrupt:
            if self._after:
                self._at_line, self._after = self.num_lines + self._after, 0
            raise


def interrupts(times: int, seed: int = 0) -> Counter[str]:
    """Interrupt that many calls on one cache.

    Returns:
        how many of them were interrupted in each file.
    Raises:
        AssertionError, PagedCacheError: the call after one of them was wrong or refused; says which and where.
    """
    model, rng, places = tiny("llama"), random.Random(seed), Counter[str]()
    references = {name: run(model, max_new_tokens=NUM_NEW, **arguments) for name, arguments in CALLS.items()}
    cache = PagedPrefixCache(PrefixStore(model, block_size=4, num_blocks=26))
    num_lines: dict[Any, int] = {}
    gc.collect()
    gc.disable()
    try:
        for number in tqdm(range(times), disable=None):
            name, everywhere = rng.choice([*CALLS]), rng.random() < 0.5
            arguments, where = {**CALLS[name], "max_new_tokens": NUM_NEW}, (name, everywhere)
            if where not in num_lines:
                with TwiceInterrupter(everywhere=everywhere) as counter:
                    run(model, cache, **arguments)
                num_lines[where] = counter.num_lines
            after = rng.randint(1, SECOND_WITHIN) if rng.random() < 0.35 else 0
            at_line = rng.randint(1, num_lines[where])
            with (
                TwiceInterrupter(at_line, after, everywhere=everywhere) as interrupter,
                contextlib.suppress(KeyboardInterrupt),
            ):
                run(model, cache, **arguments)
            torch.set_grad_enabled(True)  # where torch's own `no_grad` was interrupted on its way out, they are off
            places[interrupter.place.partition(":")[0] or "none: it was over"] += 1
            try:
                following = rng.choice([*CALLS])
                assert_same(references[following], run(model, cache, max_new_tokens=NUM_NEW, **CALLS[following]))
                if number % 50 == 0:
                    assert_all_accounted_for(cache)
            except BaseException as error:
                error.add_note(f"seed {seed}, number {number}: {name}, at {interrupter.place}")
                raise
    finally:
        gc.enable()
    assert_all_accounted_for(cache)
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    places = interrupts(given.times, given.seed)
    for place, number in places.most_common(12):
        print(f"{number:8}  {place}")  # noqa: T201  # a command prints
    print(f"{given.times} interrupts, the next call right each time, {time.perf_counter() - start:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
