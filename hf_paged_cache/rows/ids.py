"""Owns the token ids that ran in each column: one more stream of the rows, which moves with their keys and values.

So what is kept has the name of what ran, whoever generates: beams, loops of one's own, processors that rewrite ids.
"""

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..blocks import TokenIds


class IdsStream:
    """`IdsStream` holds token ids, [R, columns], as forwards were passed them.

    They stay on the device of the forwards, so nobody waits.
    """

    _ids: Tensor | None = None
    named: Mapping[int, TokenIds] = MappingProxyType({})  # row -> its prompt, for rows with images, which tokens name

    def start(self, inputs: Sequence[Any], num_columns: int) -> None:
        """Start with the tokens that are known of each row, a `RowInput`: those in the first `num_columns` columns."""
        with torch.inference_mode(False):
            ids = self._ids = torch.zeros((len(inputs), num_columns + 64), dtype=torch.int64, device="cpu")
        for number, row in enumerate(inputs):
            if row.pad < num_columns:
                known = torch.frombuffer(row.token_ids, dtype=torch.int64, count=num_columns - row.pad)
                ids[number, row.pad : num_columns] = known

    def note(self, ids: Tensor, num_before: int) -> None:
        """Note the ids of a forward, [R, T], which follow the first `num_before` columns."""
        stop, held = num_before + ids.shape[1], self._ids
        if held is None or stop > held.shape[1] or held.device != ids.device:
            held = self._grow(ids, num_before, stop)
        held.narrow(1, num_before, ids.shape[1]).copy_(ids)

    def _grow(self, ids: Tensor, num_before: int, stop: int) -> Tensor:
        with torch.inference_mode(False):
            grown = torch.zeros((ids.shape[0], stop + stop // 4 + 64), dtype=torch.int64, device=ids.device)
        if self._ids is not None and num_before:
            grown[:, :num_before].copy_(self._ids[:, :num_before])
        self._ids = grown
        return grown

    def select(self, index: Tensor) -> None:
        """Let row `i` continue as row `index[i]`."""
        if self.named:
            self.named = {row: self.named[of] for row, of in enumerate(index.tolist()) if of in self.named}
        if self._ids is not None:
            with torch.inference_mode(False):
                self._ids = self._ids.index_select(0, index.to(self._ids.device, copy=index.is_inference()))

    def rows(self, prompts: Sequence[Any], stop: int) -> list[TokenIds]:
        """Return the tokens of each row, a `Prompt`, before column `stop`.  Cost: waits for their device."""
        rows: list[TokenIds] = []
        ids = None if self._ids is None else self._ids[:, :stop].cpu().numpy()
        for row, prompt in enumerate(prompts):
            rows.append(array("q", b"" if ids is None else ids[row, prompt.pad :].tobytes()))
        for row, named in self.named.items():
            num = min(len(rows[row]), len(named))
            rows[row][:num] = named[:num]
        return rows

    def copy(self) -> "IdsStream":
        copied = IdsStream()
        copied.named = self.named
        with torch.inference_mode(False):
            copied._ids = None if self._ids is None else self._ids.clone()
        return copied
