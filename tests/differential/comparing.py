"""Results beside each other: tokens are equal, numbers agree to a part of their scale."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

TOLERANCE = 1e-4
FIELDS = (
    "logits",
    "scores",
    "hidden_states",
    "attentions",
    "router_logits",
    "sequences_scores",
    "beam_indices",
    "loss",
    "gradients",
)


class DifferenceError(AssertionError):
    """Ours is not the reference's result."""


class TokenError(DifferenceError):
    """The tokens are not the reference's; the logits before them, if there are any, agree."""


def compare(ours: Any, reference: Any, mask: list[list[int]] | None = None) -> float:
    """Return the largest distance, as a part of its scale, or raise `DifferenceError`."""
    columns = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    if isinstance(reference, list) and reference and isinstance(reference[0], Mapping):
        return _compare_pieces(ours, reference, columns)
    if isinstance(reference, torch.Tensor):
        if not reference.is_floating_point():
            ours, reference = {"sequences": ours}, {"sequences": reference}
        else:
            return _compare_values("result", ours, reference, None)
    if isinstance(reference, list):
        return max(_compare_values(f"[{i}]", *pair, None) for i, pair in enumerate(_zip("list", ours, reference)))
    return _compare_output(ours, reference, columns, prompt_only="sequences" in reference)


def compare_bits(ours: Any, reference: Any, mask: list[list[int]] | None = None) -> float:
    """Raise `DifferenceError` unless tokens, logits and scores of a `generate` are the same bits."""
    for name in ("sequences", "logits", "scores", "sequences_scores", "beam_indices"):
        pair = [_flat(output, name) for output in (ours, reference)]
        for i, (our, their) in enumerate(_zip(name, *pair)):
            if our.shape != their.shape or not torch.equal(our.nan_to_num(), their.nan_to_num()):
                raise DifferenceError(f"{name}[{i}] has other bits than the reference's")
    return 0.0


def _flat(output: Any, name: str) -> Sequence[torch.Tensor]:
    found = output.get(name)
    return [found] if isinstance(found, torch.Tensor) else found or ()


def _compare_output(ours: Any, reference: Any, columns: torch.Tensor | None, *, prompt_only: bool) -> float:
    if "sequences" in reference:
        _compare_tokens(ours, reference)
    largest = 0.0
    for name in FIELDS:
        if (reference.get(name) is None) != (ours.get(name) is None):
            raise DifferenceError(f"{name}: ours {type(ours.get(name))}, reference {type(reference.get(name))}")
        if reference.get(name) is not None:
            largest = max(largest, _compare_tree(name, ours[name], reference[name], columns, prompt_only))
    return largest


def _compare_pieces(ours: Any, reference: Any, columns: torch.Tensor | None) -> float:
    largest, start = 0.0, 0
    for i, (our, their) in enumerate(_zip("pieces", ours, reference)):
        if [*our] == ["size"]:  # there was no room for this call
            continue
        part = None if columns is None else columns[:, start : start + their["size"]]
        start += their["size"]
        try:
            largest = max(largest, _compare_output(our, their, part, prompt_only=False))
        except DifferenceError as error:
            raise type(error)(f"piece {i}: {error}") from None
    return largest


def _compare_tree(name: str, ours: Any, reference: Any, columns: torch.Tensor | None, prompt_only: bool) -> float:
    if isinstance(reference, torch.Tensor):
        return _compare_values(name, ours, reference, columns)
    largest = 0.0
    for i, (our, their) in enumerate(_zip(name, ours, reference)):
        part = columns if not prompt_only or i == 0 else None  # later steps of a generate have no padding
        largest = max(largest, _compare_tree(f"{name}[{i}]", our, their, part, False))
    return largest


def _zip(name: str, ours: Any, reference: Any) -> list[tuple[Any, Any]]:
    if len(ours) != len(reference):
        raise DifferenceError(f"{name}: {len(ours)} parts, reference {len(reference)}")
    return list(zip(ours, reference, strict=True))


def _compare_tokens(ours: Any, reference: Any) -> None:
    logits = ours.get("logits"), reference.get("logits")
    ours, theirs = ours["sequences"], reference["sequences"]
    if ours.shape != theirs.shape or bool((ours != theirs).any()):
        if ours.shape[0] == theirs.shape[0]:
            _compare_logits_before(ours, theirs, *logits)
        raise TokenError(f"sequences: ours {ours.tolist()}, reference {theirs.tolist()}")


def _compare_logits_before(ours: torch.Tensor, theirs: torch.Tensor, our_logits: Any, their_logits: Any) -> None:
    """Rows that have chosen the same tokens so far have the same logits; those of beams have other rows."""
    if their_logits is None or our_logits is None or their_logits[0].shape[0] != theirs.shape[0]:
        return
    width = min(ours.shape[1], theirs.shape[1])
    differ = (ours[:, :width] != theirs[:, :width]).any(0).nonzero()
    prompt = theirs.shape[1] - len(their_logits)
    last = int(differ[0]) - prompt if len(differ) else width - prompt - 1
    for i, pair in enumerate(zip(our_logits[: last + 1], their_logits[: last + 1], strict=False)):
        _compare_values(f"logits[{i}], before the tokens differ", *pair, None)


def _compare_values(name: str, ours: Any, reference: Any, columns: torch.Tensor | None) -> float:
    if reference is None and ours is None:
        return 0.0
    ours, reference = torch.as_tensor(ours), torch.as_tensor(reference)
    if ours.shape != reference.shape:
        raise DifferenceError(f"{name}: shape {tuple(ours.shape)}, reference {tuple(reference.shape)}")
    if columns is not None and reference.dim() in (3, 4):
        axis = reference.dim() - 2
        ours, reference = (_real(value, columns, axis) for value in (ours, reference))
    if not reference.is_floating_point():
        if bool((ours != reference).any()):
            raise DifferenceError(f"{name}: {ours.tolist()}, reference {reference.tolist()}")
        return 0.0
    finite = torch.isfinite(reference)
    if bool((finite != torch.isfinite(ours)).any()):
        raise DifferenceError(f"{name}: other values are infinite or no numbers than the reference's")
    if not bool(finite.any()):
        return 0.0
    scale = max(float(reference[finite].abs().max()), 1e-6)
    distance = float((ours[finite] - reference[finite]).abs().max()) / scale
    if distance > TOLERANCE:
        raise DifferenceError(f"{name}: differs by {distance:.2g} of its scale {scale:.2g}")
    return distance


def _real(values: torch.Tensor, columns: torch.Tensor, axis: int) -> torch.Tensor:
    """Of [rows, ..., tokens, ...] those tokens that are no padding; `columns` ends where the tokens end."""
    num_rows, num_tokens = values.shape[0], values.shape[axis]
    if num_rows % columns.shape[0]:
        return values
    columns = columns.repeat_interleave(num_rows // columns.shape[0], 0)[:, -num_tokens:]
    if columns.shape[1] < num_tokens:
        more = columns.new_ones(num_rows, num_tokens - columns.shape[1])
        columns = torch.cat([columns, more], 1)
    return values.movedim(axis, 1)[columns]
