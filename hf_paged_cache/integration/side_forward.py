"""Makes the arguments of forwards that we run ourselves, for scores, prefills and what runs ahead of a call."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..call.request import RowInput
from ..kv.transfers import to_device
from ..model.probing import input_device
from .forward_arguments import ArgumentReader, num_pads

# Arguments of a `generate` that runs one prompt, whatever the model's generation config says.
FIRST_TOKEN: dict[str, Any] = {
    **{"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True},
    **dict.fromkeys(("prefill_chunk_size", "prompt_lookup_num_tokens", "cache_implementation", "stop_strings")),
    **{"return_dict_in_generate": True, "output_logits": True},
}


class SideForwards:
    """`SideForwards` makes the arguments of one model's forwards.

    Args:
        model: model that is run.
        reader: says which arguments the model takes.
    """

    def __init__(self, model: Any, reader: ArgumentReader) -> None:
        self.model = model
        self.takes_positions = reader.takes_positions  # if not, the model numbers its columns
        self.takes_logits_to_keep = reader.takes_logits_to_keep

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
            num_pad, first = num_pads(pad, start, num_new), max(num_held, row.pad)  # column of the row's first token
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
