"""Results beside each other: tokens are equal, numbers agree to a part of their scale."""

from collections.abc import Mapping
from typing import Any

import torch

FIELDS = (
    *("logits", "scores", "hidden_states", "attentions", "router_logits"),
    *("sequences_scores", "beam_indices", "loss", "gradients"),
)


class DifferenceError(AssertionError):
    """Ours is not the reference's result."""


class TokenError(DifferenceError):
    """The tokens are not the reference's; the logits before them, if there are any, agree."""


def compare(ours: Any, reference: Any, mask: list[list[int]] | None = None, tolerance: float = 1e-4) -> float:
    """Return the largest distance, as a part of its scale, or raise `DifferenceError`.

    A result is ids, an output by name, or a list: of numbers, or of outputs of as many tokens as their "size" says.
    """
    if isinstance(reference, torch.Tensor):
        ours, reference = {"sequences": ours}, {"sequences": reference}
    columns = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    return _distance("result", ours, reference, columns, tolerance)


def _distance(name: str, ours: Any, reference: Any, columns: torch.Tensor | None, tolerance: float) -> float:
    if (ours is None) != (reference is None):
        raise DifferenceError(f"{name}: ours {type(ours)}, reference {type(reference)}")
    if reference is None:
        return 0.0
    if isinstance(reference, torch.Tensor):
        return _distance_of_numbers(name, torch.as_tensor(ours), reference, columns, tolerance)
    largest, start = 0.0, 0
    if isinstance(reference, Mapping):
        if "sequences" in reference:
            _compare_tokens(ours, reference, tolerance)
        for field in FIELDS:
            pairs = [(ours.get(field), reference.get(field), columns)]
            if "sequences" in reference and isinstance(pairs[0][1], tuple) and isinstance(pairs[0][0], tuple):
                first, later = ([of[field][at] for of in (ours, reference)] for at in (slice(1), slice(1, None)))
                pairs = [(*first, columns), (*later, None)]  # later steps of a generate have no padding
            for our, their, part in pairs:
                largest = max(largest, _distance(f"{name}.{field}", our, their, part, tolerance))
        return largest
    if len(ours) != len(reference):
        raise DifferenceError(f"{name}: {len(ours)} parts, reference {len(reference)}")
    for i, (our, their) in enumerate(zip(ours, reference, strict=True)):
        part = columns
        if isinstance(their, Mapping):
            part = None if columns is None else columns[:, start : start + their["size"]]
            start += their["size"]
        largest = max(largest, _distance(f"{name}[{i}]", our, their, part, tolerance))
    return largest


def _compare_tokens(ours: Any, reference: Any, tolerance: float) -> None:
    """Rows that have chosen the same tokens so far have the same logits; those of beams have other rows."""
    ids, wanted = ours["sequences"], reference["sequences"]
    if torch.equal(ids, wanted):
        return
    logits, wanted_logits = ours.get("logits"), reference.get("logits")
    if logits and wanted_logits and ids.shape[0] == wanted.shape[0] == wanted_logits[0].shape[0]:
        width = min(ids.shape[1], wanted.shape[1])
        differ = [*(ids[:, :width] != wanted[:, :width]).any(0).tolist(), True].index(True)
        last = differ - wanted.shape[1] + len(wanted_logits)
        for i, pair in enumerate(zip(logits[: last + 1], wanted_logits[: last + 1], strict=False)):
            _distance(f"logits[{i}], before the tokens differ", *pair, None, tolerance)
    raise TokenError(f"sequences: ours {ids.tolist()}, reference {wanted.tolist()}")


def _distance_of_numbers(
    name: str, ours: torch.Tensor, reference: torch.Tensor, columns: torch.Tensor | None, tolerance: float
) -> float:
    if ours.shape != reference.shape:
        raise DifferenceError(f"{name}: shape {tuple(ours.shape)}, reference {tuple(reference.shape)}")
    if columns is not None and reference.dim() in (3, 4):
        ours, reference = (_real(value, columns, reference.dim() - 2) for value in (ours, reference))
    if not reference.is_floating_point() and not torch.equal(ours, reference):
        raise DifferenceError(f"{name}: {ours.tolist()}, reference {reference.tolist()}")
    finite = torch.isfinite(reference)
    if not torch.equal(ours[~finite].nan_to_num(), reference[~finite].nan_to_num()):
        raise DifferenceError(f"{name}: other values are infinite or no numbers than the reference's")
    ours, reference = ours[finite].double(), reference[finite].double()
    if not len(reference):
        return 0.0
    scale = max(float(reference.abs().max()), 1e-6)
    distance = float((ours - reference).abs().max()) / scale
    if not distance <= tolerance:
        raise DifferenceError(f"{name}: differs by {distance:.2g} of its scale {scale:.2g}")
    return distance


def _real(values: torch.Tensor, columns: torch.Tensor, axis: int) -> torch.Tensor:
    """Of [rows, ..., tokens, ...] those tokens that are no padding; `columns` ends where the tokens end."""
    num_rows, num_tokens = values.shape[0], values.shape[axis]
    if num_rows % columns.shape[0]:
        return values
    columns = columns.repeat_interleave(num_rows // columns.shape[0], 0)[:, -num_tokens:]
    more = columns.new_ones(num_rows, num_tokens - columns.shape[1])
    return values.movedim(axis, 1)[torch.cat([columns, more], 1)]
