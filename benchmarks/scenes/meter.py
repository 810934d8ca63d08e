"""CPU time of our own lines, by part: they are wrapped from here while a scene runs, and put back.

    bracket         `model.generate` less the class's own `generate` inside it
    hooks           the two forward hooks, `before_forward` and `after_forward`, whole: slots and commits are in them
    update          all `PagedPrefixCache.update`, or all of `DynamicCache`'s (`Cache.update`)

Not counted, being too small to wrap without changing them: `get_seq_length` and `get_mask_sizes`, torch's dispatch of
the hooks, and the work of threads other than the calling one. What is wrapped gets slower by a microsecond, which is
counted as ours.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import harness
from torch import Tensor
from transformers import Cache

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.integration import hooks


@dataclass(frozen=True)
class StepCost:
    """CPU seconds of one decode step."""

    whole: float
    hooks: float
    update: float


@dataclass(frozen=True)
class CallCost:
    """CPU seconds of one call; its decode steps but the last, whose end cannot be seen."""

    whole: float
    bracket: float
    hooks: float
    update: float
    steps: Sequence[StepCost]


class Meter:
    """CPU seconds of the calling thread by part, forward by forward; what precedes the first forward is number 0."""

    def __init__(self) -> None:
        self.forwards: list[Counter[str]] = [Counter()]

    def timing(self, part: str, function: Callable[..., Any], *, starts_forward: bool = False) -> Callable[..., Any]:
        """`function`, its time added to `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            if starts_forward:
                self.forwards.append(Counter(started=start))
            try:
                return function(*args, **kwargs)
            finally:
                self.forwards[-1][part] += time.thread_time() - start

        return timed

    def total(self, part: str) -> float:
        """Of all forwards."""
        return sum(forward[part] for forward in self.forwards)

    def measure(self, call: Callable[[], Tensor]) -> tuple[CallCost, Tensor]:
        """Run a call of `generate`; what its parts took, and its tokens."""
        self.forwards = [Counter()]
        with harness.garbage_collection(False):
            start = time.thread_time()
            tokens = call()
            whole = time.thread_time() - start
        steps = [
            StepCost(after["started"] - step["started"], step["hooks"], step["update"])
            for step, after in zip(self.forwards[2:-1], self.forwards[3:], strict=True)
        ]
        cost = CallCost(whole, whole - self.total("generate"), self.total("hooks"), self.total("update"), steps)
        return cost, tokens


@contextlib.contextmanager
def metered(model: Any) -> Iterator[Meter]:
    """Wrap what belongs to us, and `Cache.update`; caches made inside are measured. All is put back."""
    meter = Meter()
    hooks.detach(model)
    with contextlib.ExitStack() as stack:
        for owner, name, part in (
            (hooks, "before_forward", "hooks"),
            (hooks, "after_forward", "hooks"),
            (PagedPrefixCache, "update", "update"),
            (Cache, "update", "update"),
            (type(model), "generate", "generate"),
        ):
            wrapped = meter.timing(part, getattr(owner, name), starts_forward=name == "before_forward")
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        stack.callback(hooks.detach, model)  # first of all that is undone: hooks are found by what they are
        yield meter
