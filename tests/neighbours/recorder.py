"""The logits that a model's callers get, for libraries that keep them to themselves."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..reference import TOLERANCE


class Recorder:
    """Keeps the last token's logits of every forward that has a cache.

    A forward inside a forward is one that the cache runs for itself, and nobody sees its logits.

    Args:
        model: gets forward hooks, which stay: taking them off and on would be a change of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[Tensor] = []  # [rows, vocabulary] each
        self._depth = 0
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._record, with_kwargs=True)

    def _begin(self, *_: Any) -> None:
        self._depth += 1

    def _record(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._depth -= 1
        if kwargs.get("past_key_values") is not None and not self._depth:
            self.steps.append(output.logits[:, -1].detach().float().clone())

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        """What the call returns, and the logits of its forwards."""
        self.steps, self._depth = [], 0
        return call(*args, **kwargs), self.steps


def assert_same_steps(wanted: list[Tensor], got: list[Tensor]) -> None:
    """As many forwards, and logits within the tolerance of `assert_same`."""
    assert [step.shape for step in got] == [step.shape for step in wanted]
    scale = max(float(step.abs().max()) for step in wanted)
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        distance = float((one - other).abs().max())
        assert distance <= TOLERANCE * scale, (
            f"forward {number}: logits differ by {distance / scale:.1e} of their scale"
        )


def are_same_steps(wanted: list[Tensor], got: list[Tensor]) -> bool:
    """Whether `assert_same_steps` passes."""
    try:
        assert_same_steps(wanted, got)
    except AssertionError:
        return False
    return True
