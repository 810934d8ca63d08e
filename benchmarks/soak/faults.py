"""What makes a call fail: an act at a place that `generate` and the model pass, or an interrupt from another thread.

Each thread has a plan of its own, so the calls beside it run on.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

Result = TypeVar("Result")


class FaultError(Exception):
    """What fails on purpose."""


class Interrupt(KeyboardInterrupt):
    """Sent by another thread; it arrives between any two instructions of a call."""


FAULTS = (FaultError, KeyboardInterrupt, torch.OutOfMemoryError)  # all that is raised on purpose
IN_MODEL = ("before the model", "before a layer", "after an attention", "after a layer", "after the model")
SECONDS_BETWEEN_RINGS = 0.001
IN_GENERATE = ("logits processor", "stopping criteria", "streamer")


class Plan(threading.local):
    """What happens in this thread where its call passes a place for the n-th time."""

    def __init__(self) -> None:
        self.place = ""  # empty: nothing is planned
        self._countdown = 0
        self._act: Callable[[], Any] = lambda: None

    def set(self, place: str, countdown: int, act: Callable[[], Any]) -> None:
        self.place, self._countdown, self._act = place, countdown, act

    def clear(self) -> None:
        self.place = ""

    def passes(self, place: str) -> None:
        if place == self.place:
            self._countdown -= 1
            if self._countdown == 0:
                self._act()

    def watch(self, model: nn.Module) -> None:
        """Put hooks on a model, once and for all: one that came later would be another condition of keys and values."""
        attentions = [module for module in model.modules() if "Attention" in type(module).__name__]
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        model.register_forward_pre_hook(lambda *_: self.passes("before the model"))
        layers[0].register_forward_pre_hook(lambda *_: self.passes("before a layer"))
        attentions[-1].register_forward_hook(lambda *_: self.passes("after an attention"))
        layers[1].register_forward_hook(lambda *_: self.passes("after a layer"))
        model.register_forward_hook(lambda *_: self.passes("after the model"))


class Processor(LogitsProcessor):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.plan.passes("logits processor")
        return scores


class Criteria(StoppingCriteria):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.plan.passes("stopping criteria")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def put(self, value: torch.Tensor) -> None:
        self.plan.passes("streamer")

    def end(self) -> None:
        pass


class Alarm:
    """Interrupts the calls of other threads when they are due: a thread that ends when nobody has the alarm anymore."""

    def __init__(self) -> None:
        self.calls: list[Interruptible] = []
        threading.Thread(target=_ring, args=(ref(self),), name="alarm", daemon=True).start()


def _ring(kept: ref[Alarm]) -> None:
    while (alarm := kept()) is not None:
        for calls in list(alarm.calls):
            calls.interrupt_if_due()
        del alarm
        time.sleep(SECONDS_BETWEEN_RINGS)


class Interruptible:
    """The calls of one thread that may be interrupted, once each; nothing is raised outside of them.

    No lock: an interrupt that arrives while a thread takes one can leave it taken. Each side says what it does before
    it looks at what the other does, so one of the two sees the other.
    """

    def __init__(self, alarm: Alarm) -> None:
        self._thread = 0  # that runs a call; 0: none, and nothing is sent
        self._due = 0.0
        self._is_sending = False
        alarm.calls.append(self)

    def call(self, act: Callable[[], Result], delay: float) -> Result:
        """Run `act`, and interrupt it after `delay` seconds if it still runs.

        Raises:
            Interrupt: it arrived; `act` may have just ended.
        """
        try:
            try:
                self._due = time.monotonic() + delay
                self._thread = threading.get_ident()
                return act()
            finally:
                self._close()
        except Interrupt:  # perhaps while it was closed; no second one is sent
            self._close()
            raise

    def interrupt_if_due(self) -> None:
        """The alarm's: send the interrupt when it is time."""
        if not self._thread or time.monotonic() < self._due:
            return
        self._is_sending = True
        thread, self._thread = self._thread, 0
        if thread:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupt))
        self._is_sending = False

    def _close(self) -> None:
        self._thread = 0
        while self._is_sending:
            time.sleep(0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)  # not yet arrived


def count_what_finalizers_swallow(counts: Counter[str], problems: list[str]) -> None:
    """From here on the interpreter tells nothing it swallows: faults are counted, all else is a problem."""

    def swallowed(unraisable: Any) -> None:
        kind = unraisable.exc_type
        if issubclass(kind, FAULTS):
            counts[f"{kind.__name__} in a finalizer"] += 1
        else:
            problems.append(f"swallowed in {unraisable.object!r}: {kind.__name__}: {unraisable.exc_value}")

    sys.unraisablehook = swallowed
