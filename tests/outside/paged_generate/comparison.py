"""Whether two results of `generate` are the same: tokens, and every tensor that the call was asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# of the largest number
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
COMPARED = ("logits", "scores", "sequences_scores", "hidden_states", "attentions")


def assert_same(wanted: Any, got: Any) -> None:
    """Equal tokens, and logits, scores, hidden states and attentions within the tolerance of their scale.

    Where rows part at two tokens that the wanted logits hold for equal, within the tolerance, what is compared ends there:
    rounding has decided. Results that are no `ModelOutput` are tensors, and equal.
    """
    if not hasattr(wanted, "sequences"):
        _assert_close("the result", wanted, got)
        return
    num_steps = None if wanted.sequences.equal(got.sequences) else _parted_by_rounding(wanted, got)
    for name in COMPARED:
        if num_steps is None:
            _assert_close(name, getattr(wanted, name, None), getattr(got, name, None))
        elif name == "logits":
            _assert_close(name, wanted.logits[:num_steps], got.logits[:num_steps])


def _parted_by_rounding(wanted: Any, got: Any) -> int:
    """Steps up to the one where the tokens part, that included; what parts for another reason is an error."""
    first = "the tokens are others"
    if wanted.logits is None or got.logits is None or getattr(wanted, "beam_indices", None) is not None:
        raise AssertionError(f"{first}: {got.sequences.tolist()}, not {wanted.sequences.tolist()}")
    num_steps = min(len(wanted.logits), len(got.logits))
    columns = wanted.sequences.shape[1] - len(wanted.logits)
    for step in range(num_steps):
        mine, theirs = got.sequences[:, columns + step], wanted.sequences[:, columns + step]
        _assert_close(f"{first}; logits[{step}]", wanted.logits[step], got.logits[step])
        rows = (mine != theirs).nonzero().flatten()
        if len(rows):
            logits = wanted.logits[step][rows]
            gap = (logits.gather(1, mine[rows, None]) - logits.gather(1, theirs[rows, None])).abs().max()
            if float(gap) > 2 * _tolerance(logits):
                raise AssertionError(f"{first} from step {step} on: {mine.tolist()}, not {theirs.tolist()}")
            return step + 1
    raise AssertionError(f"{first}: {got.sequences.tolist()}, not {wanted.sequences.tolist()}")


def _assert_close(name: str, wanted: Any, got: Any) -> None:
    """Tensors, or tuples of them."""
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        torch.testing.assert_close(
            got.float(),
            wanted.float(),
            rtol=0,
            atol=_tolerance(wanted),
            equal_nan=True,
            msg=lambda why: f"{name}: {why}",
        )
    elif isinstance(wanted, tuple) and isinstance(got, tuple):
        if len(got) != len(wanted):
            raise AssertionError(f"{name}: {len(got)} of them, not {len(wanted)}")
        for number, (theirs, mine) in enumerate(zip(wanted, got, strict=True)):
            _assert_close(f"{name}[{number}]", theirs, mine)
    elif wanted is not None or got is not None:
        raise AssertionError(f"{name}: a {type(got).__name__}, not a {type(wanted).__name__}")


def _tolerance(wanted: Tensor) -> float:
    """The largest difference allowed between numbers."""
    finite = wanted[wanted.isfinite() & (wanted.abs() < 1e30)]  # what a processor forbids is the least number there is
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return TOLERANCE.get(wanted.dtype, 0.0) * scale
