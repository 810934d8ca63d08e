"""The values of a forward's token ids, mask and positions, of all rows, read in one wait for their device.

Owns what is computed there so that little has to be read. Refuses tensors of shapes that contradict each other; what the
values mean for the rows, `forward_arguments` decides.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError
from ..kv.transfers import read_together

_Numbers = TypeVar("_Numbers", list[int], "array[int]")


class MaskValues(NamedTuple):
    """What a mask says of each row, and why it is not of the form 0...01...1."""

    pads: list[int]  # columns of left padding
    num_zeros: list[int]  # new columns that it hides
    first_shown: list[int]  # the first column that it does not hide
    why_unusual: str | None = None


class PositionValues(NamedTuple):
    """The position of each row's last token, or one for all rows, and why they do not number tokens."""

    last: Sequence[int] = ()
    run_starts: Sequence[int] = ()  # the new column from which on positions count up by one
    why_unusual: str | None = None


class InputValues(NamedTuple):
    """What a forward was passed.

    Attributes:
        token_ids: of each row, all columns; -1 for each embedding.
        num_new_columns: columns of the ids.
        are_embeddings: there are no ids.
        positions: None where none were passed, or the model takes none.
        max_position: the largest, of padding, too; None where none were passed.
    """

    token_ids: list[TokenIds]
    num_new_columns: int
    are_embeddings: bool
    mask: MaskValues
    positions: PositionValues | None
    max_position: int | None

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.token_ids)


class KnownInputs(NamedTuple):
    """What a forward is about to be passed, by somebody who made it: nobody has to wait for its device to read it.

    Attributes:
        token_ids: the tensor; of a forward that is passed another, nothing is known.
    """

    token_ids: Tensor
    values: InputValues


def read_inputs(arguments: Mapping[str, Any], num_running: int, before: int, *, takes_positions: bool) -> InputValues:
    """Read them.

    Args:
        arguments: of the forward, by name.
        num_running: rows that resume; 0 for a first forward.
        before: columns that they have.
        takes_positions: the model's forward has `position_ids`.

    Raises:
        CacheArgumentError: no ids and no embeddings; or another number of rows, or of columns of the mask.
    """
    ids: Tensor | None = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else None
    if ids is not None and ids.dim() != 2:
        raise CacheArgumentError(f"input_ids must be [rows, tokens], got {tuple(ids.shape)}")
    if ids is not None and (ids.is_floating_point() or ids.is_complex()):
        raise CacheArgumentError(f"input_ids must be integers, got a tensor of {ids.dtype}")
    num_rows, num_new = shape_of(arguments, before)
    if num_running and num_rows != num_running:
        raise CacheArgumentError(
            f"the cache runs {num_running} rows, got {num_rows}; cache.reset() it for another batch"
        )
    mask, why_no_mask = _form_of(arguments.get("attention_mask"), num_rows, before, num_new)
    positions = arguments.get("position_ids")
    runs, why_no_runs = _runs_of(positions, num_rows, num_new) if takes_positions else (None, None)
    wanted = (ids, mask, runs, positions.max() if isinstance(positions, Tensor) and positions.numel() else None)
    found = read_together([tensor for tensor in wanted if tensor is not None])
    given_ids, form, run, highest = [[] if tensor is None else found.pop(0) for tensor in wanted]
    if ids is None:
        token_ids = [array("q", [-1]) * num_new] * num_rows
    else:
        token_ids = _in_rows(array("q", given_ids), num_rows)
    masked = _mask_values([] if mask is None else _in_rows(form, 3), why_no_mask, num_rows, before, num_new)
    counted = None
    if takes_positions and positions is not None:
        last, starts = _in_rows(run, 2)
        counted = PositionValues(last, starts, why_no_runs)
    return InputValues(token_ids, num_new, ids is None, masked, counted, highest[0] if highest else None)


def num_pads(pad: int, before: int, num_new: int) -> int:
    """How many of the new columns are left padding."""
    return min(num_new, max(0, pad - before))


def shape_of(arguments: Mapping[str, Any], before: int) -> tuple[int, int]:
    """Rows and new columns of a forward: of its embeddings or ids; else of its mask, after `before` columns, or its positions.

    Raises:
        CacheArgumentError: it has none of them.
    """
    for name in ("inputs_embeds", "input_ids"):
        given = arguments.get(name)
        if given is not None:
            return given.shape[0], given.shape[1] if given.shape[0] else 0
    for name, num_old in (("attention_mask", before), ("position_ids", 0)):
        given = arguments.get(name)
        if isinstance(given, Tensor) and given.dim() == 2:
            return given.shape[0], max(0, given.shape[1] - num_old)
    raise CacheArgumentError(
        "a forward without input_ids and without inputs_embeds, and without an attention_mask or position_ids of "
        "[rows, columns] that would tell how many columns it has; pass one of them"
    )


def _form_of(mask: Any, num_rows: int, before: int, num_new: int) -> tuple[Tensor | None, str | None]:
    """[3, rows]: columns that a mask shows, the first of them, and new columns that it shows; or why there is none."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"{mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
        return None, f"the attention mask is a {kind}, not [rows, columns]"
    if mask.shape != (num_rows, before + num_new):
        raise CacheArgumentError(
            f"the attention mask is {tuple(mask.shape)}; with the cache's tokens and the new ones it must be "
            f"{(num_rows, before + num_new)}: pass ids that go on exactly where the rows stopped, or cache.reset() first"
        )
    ones = mask != 0
    return torch.stack((ones.sum(dim=1), ones.int().argmax(dim=1), ones[:, before:].sum(dim=1))), None


def _mask_values(
    form: Sequence[list[int]], why_unusual: str | None, num_rows: int, before: int, num_new: int
) -> MaskValues:
    none, num_columns = [0] * num_rows, before + num_new
    if not form:
        return MaskValues(none, none, none if why_unusual is None else [num_columns] * num_rows, why_unusual)
    shown, first_shown, shown_of_new = form
    pads = [num_columns - count for count in shown]
    for row, (pad, first) in enumerate(zip(pads, first_shown, strict=True)):
        if pad != num_columns and pad != first:
            why = f"the attention mask of row {row} has zeros after its first one (right padding or holes)"
            return MaskValues(none, [num_new - count for count in shown_of_new], first_shown, why)
    return MaskValues(pads, [num_pads(pad, before, num_new) for pad in pads], pads)


def _runs_of(positions: Any, num_rows: int, num_new: int) -> tuple[Tensor | None, str | None]:
    """[2, rows or 1]: the last position, and the column from which on they count up by one; or why there are none."""
    if positions is None:
        return None, None
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] not in (1, num_rows):
        return None, "positions are not one number a token"
    if positions.shape[1] != num_new:
        return None, "positions of another length than the token ids"
    if positions.is_floating_point():
        return None, "positions are no integers"
    if not num_new:
        return None, None
    columns = torch.arange(num_new, device=positions.device)
    starts = positions - columns  # the same all along a run
    behind_others = ((starts != starts[:, -1:]) * (columns + 1)).amax(dim=1)
    return torch.stack((positions[:, -1].to(torch.int64), behind_others)), None


def _in_rows(numbers: _Numbers, num_rows: int) -> list[_Numbers]:
    """As many rows of one length; none of nothing."""
    if not num_rows or not numbers:
        return [numbers] * num_rows
    length = len(numbers) // num_rows
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]
