"""A failure again, in one thread, with as few operations as it takes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from .report import Report
from .worker import Worker
from .world import Operation, SoakError, World

CHECK_EVERY = 25  # operations


def replay(seed: str, operations: Sequence[Operation]) -> str:
    """Do these in a new world; returns the failure, or "" if there is none."""
    world = World(seed, Report())
    world.workers = [Worker(world, number) for number in range(1 + max((of.worker for of in operations), default=0))]
    try:
        for number, operation in enumerate(operations, 1):
            world.workers[operation.worker].perform(operation)
            if number % CHECK_EVERY == 0:
                world.common[0].check()
        with world.gate.alone():
            world.check_at_rest(random.Random(0))
    except SoakError as error:
        return str(error)
    return ""


def shortest(
    operations: Sequence[Operation], fails: Callable[[Sequence[Operation]], bool], seconds: float
) -> list[Operation] | None:
    """The fewest of these operations that still fail, as far as the time goes; None if they do not fail again."""
    deadline = time.monotonic() + seconds
    kept = [of for of in operations if of.worker == operations[-1].worker]
    if not fails(kept):
        kept = list(operations)
        if not fails(kept):
            return None
    size = len(kept) // 2
    while size:
        start = 0
        while start < len(kept) and time.monotonic() < deadline:
            fewer = kept[:start] + kept[start + size :]
            if fewer and fails(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept
