"""Owns the token ids that ran in each column: one more stream of the rows, which moves with their keys and values.

So what is kept has the name of what ran, whoever generates: beams, loops of one's own, processors that rewrite ids.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..blocks import TokenIds
from ..blocks.image_tokens import end_of_image
from .request import RowInput


@dataclass(slots=True)
class Prompt:
    """`Prompt` says what one row began with."""

    root: bytes  # the row's prefix key: a digest of all that shapes its keys and values besides tokens
    pad: int  # columns of left padding
    first_position: int  # position of the first token
    shift: int | None  # how far images have moved the positions of the text after them; None: not known
    kept: int = 0  # leading tokens whose blocks need not be kept any more
    most_kept: int | None = None  # most leading tokens that may be kept, where those after them only fill the row up
    image_end: int | None = None  # tokens up to the end of the last image, if its block is to be kept up to there


class IdsStream:
    """`IdsStream` holds token ids, [R, columns], as forwards were passed them.

    They stay on the device of the forwards, so nobody waits.
    """

    _ids: Tensor | None = None
    _named: Mapping[int, TokenIds] = MappingProxyType({})  # row -> its prompt, for rows with images, which tokens name

    def start(self, inputs: Sequence[RowInput], num_columns: int) -> list[Prompt]:
        """Start with the tokens in the first columns of each row; return what the rows began with."""
        prompts, named = list[Prompt](), dict[int, TokenIds]()
        with torch.inference_mode(False):
            ids = self._ids = torch.zeros((len(inputs), num_columns + 64), dtype=torch.int64, device="cpu")
        for number, row in enumerate(inputs):
            prompts.append(Prompt(row.root, row.pad, row.first_position, row.shift))
            if row.pad < num_columns:
                known = torch.frombuffer(row.token_ids, dtype=torch.int64, count=num_columns - row.pad)
                ids[number, row.pad : num_columns] = known
            if row.holds_images:
                prompts[-1].image_end = end_of_image(row.token_ids, 0, len(row.token_ids))
                named[number] = row.token_ids
        self._named = named
        return prompts

    def note(self, ids: Tensor, num_before: int) -> None:
        """Note the ids of a forward, [R, T], which follow the first `num_before` columns."""
        stop, held = num_before + ids.shape[1], self._ids
        if held is None or stop > held.shape[1] or held.device != ids.device:
            with torch.inference_mode(False):
                grown = torch.zeros((ids.shape[0], stop + stop // 4 + 64), dtype=torch.int64, device=ids.device)
            if held is not None and num_before:
                grown[:, :num_before].copy_(held[:, :num_before])
            held = self._ids = grown
        held.narrow(1, num_before, ids.shape[1]).copy_(ids)

    def crop(self, num_columns: int, prompts: Sequence[Prompt]) -> None:
        """Let the next ids follow the first columns: they are not those of a prompt that had more."""
        self._named = {row: named[: max(0, num_columns - prompts[row].pad)] for row, named in self._named.items()}

    def select(self, index: Tensor) -> None:
        """Let row `i` continue as row `index[i]`."""
        if self._named:
            self._named = {row: self._named[of] for row, of in enumerate(index.tolist()) if of in self._named}
        if self._ids is not None:
            with torch.inference_mode(False):
                self._ids = self._ids.index_select(0, index.to(self._ids.device, copy=index.is_inference()))

    def rows(self, prompts: Sequence[Prompt], stop: int) -> list[TokenIds]:
        """Return the tokens of each row before column `stop`.  Cost: waits for their device."""
        rows: list[TokenIds] = []
        ids = None if self._ids is None else self._ids[:, :stop].cpu().numpy()
        for row, prompt in enumerate(prompts):
            rows.append(array("q", b"" if ids is None else ids[row, prompt.pad :].tobytes()))
        for row, named in self._named.items():
            num = min(len(rows[row]), len(named))
            rows[row][:num] = named[:num]
        return rows

    def copy(self) -> "IdsStream":
        """Return a stream that goes on by itself: what is noted there is not written here."""
        copied = IdsStream()
        copied._named = self._named
        with torch.inference_mode(False):
            copied._ids = None if self._ids is None else self._ids.clone()
        return copied
