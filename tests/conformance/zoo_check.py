"""Whether a model of the zoo can be a reference: finite logits that depend on early tokens, and its own cache agrees.

The last is printed and not judged: some architectures cannot be continued by several tokens even on a `DynamicCache`.
"""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import zoo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, COLUMNS, FIRST = 2, 40, 16  # tokens of a forward; those of them that the cache is filled with first
EARLY = 3  # the column whose token is changed
DEPENDS = 1e-3  # of scale, the least that another early token must change the last logits by


@dataclass
class Report:
    """What was seen of one model; `text` says why it failed, or why it was not built."""

    name: str
    seconds: float = 0.0
    dependence: float = math.nan  # of the last logits on an early token, of their scale
    distance: float = math.nan  # between a plain forward and one continued on a DynamicCache, of scale
    text: str = ""
    failed: bool = False

    def __str__(self) -> str:
        state = "FAILED" if self.failed else "ok" if not math.isnan(self.dependence) else "not built"
        numbers = "" if math.isnan(self.dependence) else f"depends {self.dependence:.1e}  continued {self.distance:.1e}"
        return f"{self.name:36s} {state:9s} {self.seconds:5.2f} s  {numbers} {self.text}"


def check(name: str, seed: int = 0) -> Report:
    """Build a model and try it on `ROWS` x `COLUMNS` tokens.  Cost: three forwards."""
    report, start = Report(name), time.perf_counter()
    try:
        model = zoo.build(name, seed)
    except zoo.CannotBuildError as error:
        report.text = str(error)
        return report
    except Exception as error:  # noqa: BLE001  # a table of all types continues with the next
        report.text, report.failed = f"cannot be built: {type(error).__name__}: {error}", True
        return report
    try:
        _try(model, report)
    except Exception as error:  # noqa: BLE001
        report.text, report.failed = f"{type(error).__name__}: {error}", True
    report.seconds = time.perf_counter() - start
    return report


def _try(model: PreTrainedModel, report: Report) -> None:
    ids = torch.randint(1, zoo.vocabulary(model), (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, EARLY] = ids[:, EARLY] % (zoo.vocabulary(model) - 1) + 1
    plain, changed = forward(model, ids), forward(model, other)
    if not (torch.isfinite(plain).all() and torch.isfinite(changed).all()):
        raise AssertionError("logits are not finite")
    report.dependence = distance(plain[:, -1], changed[:, -1])
    report.distance, report.text = _continued(model, ids, plain)
    if report.dependence <= DEPENDS:
        raise AssertionError("the last logits hardly depend on an early token")


@torch.no_grad()
def forward(model: PreTrainedModel, ids: torch.Tensor, first: int = 0, **arguments: Any) -> torch.Tensor:
    """Logits [rows, columns - first, vocabulary] of the columns from `first` on; without a cache unless one is passed.

    Mask and positions are passed as `generate` passes them: a few models do not count them from the cache.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = torch.arange(first, ids.shape[1]).expand(len(ids), -1)
    arguments = {"attention_mask": torch.ones_like(ids), "use_cache": "past_key_values" in arguments, **arguments}
    return model(input_ids=ids[:, first:], **arguments).logits.float()


def _continued(model: PreTrainedModel, ids: torch.Tensor, plain: torch.Tensor) -> tuple[float, str]:
    """The distance of a forward of the first columns and then the rest, on one DynamicCache; nan and why, if it fails."""
    from transformers import DynamicCache

    try:
        cache = DynamicCache(config=model.config)
        forward(model, ids[:, :FIRST], past_key_values=cache)
        return distance(forward(model, ids, FIRST, past_key_values=cache), plain[:, FIRST:]), ""
    except Exception as error:  # noqa: BLE001
        return math.nan, f"not continued: {type(error).__name__}: {error}"


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    return float((left - right).abs().max() / right.abs().max())
