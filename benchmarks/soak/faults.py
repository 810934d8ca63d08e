"""What makes a call fail: an act at a place that `generate` and the model pass, or an interrupt from another thread.

Each thread has a plan of its own, so the calls beside it run on.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

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


class Interruptible:
    """The calls of one thread that may be interrupted, once each; nothing is raised outside of them."""

    def __init__(self) -> None:
        self.num_sent = 0
        self._lock = threading.Lock()
        self._thread = 0  # that runs a call; 0: none, and nothing is sent

    def call(self, act: Callable[[], Result], delay: float) -> Result:
        """Run `act`, and interrupt it after `delay` seconds if it still runs.

        Raises:
            Interrupt: it arrived; `act` may have just ended.
        """
        timer = threading.Timer(delay, self._send)
        try:
            try:
                timer.start()  # first: an interrupt inside would leave its own lock unlocked
                with self._lock:
                    self._thread = threading.get_ident()
                return act()
            finally:
                self._close(timer)
        except Interrupt:  # perhaps while it was closed; no second one is sent
            self._close(timer)
            raise

    def _send(self) -> None:
        with self._lock:
            if self._thread:
                self.num_sent += 1
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Interrupt))
                self._thread = 0

    def _close(self, timer: threading.Timer) -> None:
        timer.cancel()
        with self._lock:
            self._thread = 0
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
