"""How a call or a step is timed: the wall clock on a CPU, events of the stream on a CUDA device. Owns no result."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
from torch import Tensor
from transformers import LogitsProcessor


class Clock:
    """Marks moments on a device, and says later how far they are apart."""

    def __init__(self, device: torch.device, *, collects_garbage: bool = True) -> None:
        self._collects_garbage = collects_garbage
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This moment; on a CUDA device, when all that was asked of it until now is done."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """From each mark to the next."""
        if not self._is_cuda:
            return [after - before for before, after in itertools.pairwise(marks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]

    def time(self, function: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Seconds of one call with the cyclic garbage collector off, and what it returned."""
        if self._is_cuda:
            torch.cuda.synchronize()
        with harness.garbage_collection(False) if self._collects_garbage else contextlib.nullcontext():
            start = self.mark()
            result = function()
            (seconds,) = self.seconds([start, self.mark()])
        return seconds, result


class StepMarks(LogitsProcessor):
    """Changes no score; marks the moment after each forward.

    From mark to mark is a step: choosing a token, reordering, a forward.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._marks.append(self._clock.mark())
        return scores

    def seconds(self) -> list[float]:
        """Of each decode step."""
        return self._clock.seconds(self._marks)
