"""Runs forwards of our own, for scores, prefills and what runs ahead of a call."""

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..call.request import RowInput
from ..kv.tensors import to_device
from ..model.support import cache_argument
from ..model.trial import input_device
from ..rows.rows import Rows
from .forward_arguments import ArgumentReader


class SideForwards:
    """`SideForwards` runs forwards of one model."""

    def __init__(self, model: Any, reader: ArgumentReader) -> None:
        self.model = model
        self.takes_positions = reader.takes_positions  # if not, the model numbers its columns
        self.takes_logits_to_keep = reader.takes_logits_to_keep

    def run(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        start: int,
        stop: int,
        *,
        num_held: int = 0,
        num_logits: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Run the columns `[start, stop)` on rows, without gradients, and return the logits; see `arguments_of`.

        Args:
            num_logits: number of last columns whose logits are wanted; 0: of all.
            options: other arguments of the forward.
        """
        given = {**(options or {}), cache_argument(self.model): rows, "use_cache": True, "return_dict": True}
        if self.takes_logits_to_keep:
            given["logits_to_keep"] = num_logits
        with torch.no_grad():
            logits: Tensor = self.model(**given, **self.arguments_of(inputs, start, stop, num_held=num_held)).logits
        return logits

    def arguments_of(self, rows: Sequence[RowInput], start: int, stop: int, *, num_held: int = 0) -> dict[str, Tensor]:
        """Return the arguments of a forward of the columns `[start, stop)`.

        Shorter rows are filled up on the right with their own last token; no other token sees these.

        Args:
            num_held: number of columns before the tokens of the rows.
        """
        device, num_new = input_device(self.model), stop - start
        pads = [min(row.pad, stop) for row in rows]
        filled = []
        for row, pad in zip(rows, pads, strict=True):
            num_pad, first = (
                min(num_new, max(0, pad - start)),
                max(num_held, row.pad),
            )  # column of the row's first token
            tokens = array("q", [*[0] * num_pad, *row.token_ids[max(0, start - first) : max(0, stop - first)]])
            filled.append(tokens + array("q", row.token_ids[-1:]) * (num_new - len(tokens)))
        ids = to_device([*chain(*filled)], device).view(len(rows), -1)
        mask = torch.arange(stop, device=device)[None] >= to_device(pads, device)[:, None]
        arguments = {"input_ids": ids, "attention_mask": mask.to(torch.int64)}
        if self.takes_positions:
            firsts = to_device([row.first_position + (row.shift or 0) for row in rows], device)[:, None]
            columns = torch.arange(start, stop, device=device)[None] - to_device(pads, device)[:, None]
            arguments["position_ids"] = columns.clamp_(min=0) + firsts
        return arguments
