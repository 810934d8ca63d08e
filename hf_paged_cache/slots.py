"""Where in the pool the tokens of a forward lie: rows and their blocks -> slots, to write to and to read from.

slot = block_id * block_size + offset in the block. A column is counted from the left, padding included: column
`pad + i` of a row holds its token `i`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import PoolArgumentError
from .tokens import TokenIds


class RowLayout(NamedTuple):
    """What a reader must know of one running row."""

    root: bytes
    pad: int  # columns of left padding
    token_ids: TokenIds  # of all tokens, those of the announced forward included
    block_ids: Sequence[int]  # logical block index -> block id


class WriteTarget:
    """Where the new tokens of one forward go: slot `slots[i]` takes the token at `sources[i]`.

    `sources` counts the forward's tokens row by row (`row * num_new_columns + column`); None means all of them, in
    order. Tokens that are not named (left padding, columns a row computes for its siblings' sake) are not written.
    The index tensors are made once per device and used by every layer.
    """

    __slots__ = ("_on_device", "end_slot", "first_slot", "num_slots", "slots", "sources")

    def __init__(self, slots: Sequence[int], sources: Sequence[int] | None = None) -> None:
        self.slots = slots
        self.sources = sources
        self.num_slots = len(slots)
        self.end_slot = 1 + max(slots, default=-1)  # one behind the highest
        self.first_slot = _start_of_run(slots)  # None: the slots do not lie side by side
        self._on_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """`slots` and `sources` as int64 tensors on `device`."""
        found = self._on_device.get(device)
        if found is None:
            sources = None if self.sources is None else torch.tensor(self.sources, dtype=torch.int64, device=device)
            found = (torch.tensor(self.slots, dtype=torch.int64, device=device), sources)
            self._on_device[device] = found
        return found


class ReadSource:
    """The slots that a read takes, [R, C] int64. The index into a layer's tensors is made once for a device and number of heads."""

    __slots__ = ("_index", "shape", "slots")

    def __init__(self, slots: Tensor) -> None:
        if slots.dim() != 2 or slots.dtype != torch.int64:
            raise PoolArgumentError(f"slots must be a 2-D int64 tensor, got {slots.dim()}-D {slots.dtype}")
        self.slots = slots
        self.shape = tuple(slots.shape)
        self._index: dict[tuple[torch.device, int], Tensor] = {}

    def index_for(self, num_heads: int, device: torch.device) -> Tensor:
        """[R * H * C] int64 on `device`: where a slot's heads lie among those of all slots, heads before columns."""
        found = self._index.get((device, num_heads))
        if found is None:
            heads = torch.arange(num_heads, device=device)[:, None]
            found = (self.slots.to(device)[:, None] * num_heads + heads).flatten()
            self._index[device, num_heads] = found
        return found


def slot_matrix(rows: Sequence[RowLayout], stop: int, block_size: int) -> Tensor:
    """[R, stop] int64: the slot of each column of each row; a row's padding reads the null block."""
    num_blocks = max(1, max(len(row.block_ids) for row in rows))
    blocks = torch.tensor([[*row.block_ids, *[0] * (num_blocks - len(row.block_ids))] for row in rows])
    positions = torch.arange(stop)[None, :] - torch.tensor([[row.pad] for row in rows])
    is_token = positions >= 0
    positions = positions.clamp_(min=0)
    slots = blocks.gather(1, (positions // block_size).clamp_(max=num_blocks - 1)) * block_size + positions % block_size
    return slots * is_token


def _start_of_run(slots: Sequence[int]) -> int | None:
    """The first slot if `slots` count up by one, else None."""
    if not slots:
        return None
    first = slots[0]
    if slots[-1] - first != len(slots) - 1:
        return None
    return first if all(slot == first + i for i, slot in enumerate(slots)) else None
