"""Owns the token ids that ran in each column: one more stream of the rows, which moves with their keys and values.

So what is kept has the name of what ran, whoever generates: beams, loops of one's own, processors that rewrite ids.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..blocks.image_tokens import hold_images
from ..blocks.tokens import TokenIds


class IdsStream:
    """`IdsStream` holds token ids, [R, columns], as forwards were passed them.

    They stay on the device of the forwards, so nobody waits.
    """

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._named: list[TokenIds] = []  # per row: the prompt's tokens if it has images, which they name; else none

    def begin(self, prompts: Sequence[TokenIds]) -> None:
        """Begin rows with these prompts."""
        named = [tokens if hold_images(tokens) else tokens[:0] for tokens in prompts]
        self._named = named if any(named) else []

    def start(self, prompts: Sequence[TokenIds], pads: Sequence[int], num_columns: int) -> None:
        """Start with the tokens that are known: those in the first `num_columns` columns, after each row's padding."""
        with torch.inference_mode(False):
            ids = self._ids = torch.zeros((len(pads), num_columns + 64), dtype=torch.int64, device="cpu")
        for number, (tokens, pad) in enumerate(zip(prompts, pads, strict=True)):
            if pad < num_columns:
                known = torch.frombuffer(tokens, dtype=torch.int64, count=num_columns - pad)
                ids[number, pad:num_columns] = known

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
        if self._named:
            self._named = [self._named[number] for number in index.tolist()]
        if self._ids is not None:
            with torch.inference_mode(False):
                self._ids = self._ids.index_select(0, index.to(self._ids.device, copy=index.is_inference()))

    def rows(self, pads: Sequence[int], stop: int) -> list[TokenIds]:
        """Return the tokens of each row before column `stop`, without padding.  Cost: waits for their device."""
        if self._ids is None:
            return [array("q") for _ in pads]
        ids = self._ids[:, :stop].cpu()
        rows = [array("q", ids[row, pad:].contiguous().numpy().tobytes()) for row, pad in enumerate(pads)]
        for row, named in zip(rows, self._named, strict=False):
            num = min(len(row), len(named))
            row[:num] = named[:num]
        return rows

    def copy(self) -> "IdsStream":
        copied = IdsStream()
        copied._named = [*self._named]
        with torch.inference_mode(False):
            copied._ids = None if self._ids is None else self._ids.clone()
        return copied
