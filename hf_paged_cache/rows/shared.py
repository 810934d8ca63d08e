"""Owns what several rows of a call have in common: segments, held once, that attention reads once for all of them.

A segment lies where it was: in a run of the pool's blocks, which a lease keeps, in rows that ran ahead, or in the row
that ran for several.
The rows' own memory begins where the first of their segments ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..attention.lazy import lazily
from ..attention.segments import Plan
from ..attention.shared import LayerReads, SharedForward
from ..blocks import Allocation
from .memory import Columns, Streams

MODEL_LOOKS = "the model looks at keys and values itself, or torch has no kernel for them on this device"
CALL_LOOKS = (
    "attention was asked for what cannot be read once: dropout, is_causal, a mask that hides more than padding, "
    "or all of it by a compiled forward"
)
IN_CHUNKS = "prefill_chunk_size was given, and what is read in parts rounds otherwise"


@dataclass
class Looks:
    """`Looks` remembers whether a model looks at keys and values otherwise than by torch's attention."""

    model_looks: bool = False  # for good, once the model was seen to look
    weighs_launches: bool = True  # what rows share is held once only where that pays; False for trials of models


@dataclass
class Seen:
    """`Seen` remembers how attention has read the rows of one call."""

    tokens: int = 0  # most tokens that were read once at a time
    rows: int = 0  # most rows that they were read for
    dense: str = ""  # why what rows share was read for each row by itself, if it was


class SharedColumns:
    """`SharedColumns` has the segments of the rows of one call.

    Args:
        plan: which rows have which segment; its block ids mean nothing here.
        segments: for each segment, memory of one row whose columns are the segment's tokens.
        leases: leases of the blocks in which segments lie.
        looks: whether the model looks at keys and values itself.
        num_pool_blocks: number of blocks that the pool had room for when the segments were made. Once the pool has
            grown, the segments lie in its old memory.
    """

    rows: ref[Any]  # the rows, once they hold these segments

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Streams]],
        leases: Sequence[Allocation],
        looks: Looks,
        num_pool_blocks: int = 0,
    ) -> None:
        self.plan, self.segments, self.leases, self._looks = plan, segments, leases, looks
        self.num_pool_blocks = num_pool_blocks
        self.lengths = [held[0].tensor.shape[3] for held in segments]
        shared_by = [len(segment.rows) for segment in plan.segments]
        self._num_rows = max((number for number in shared_by if number > 1), default=0)
        self._num_tokens = sum(num for num, number in zip(self.lengths, shared_by, strict=True) if number > 1)
        self._bounds: dict[torch.device, Tensor] = {}  # see `SharedForward`
        self._forward: SharedForward | None = None
        self._of_layer: dict[int, dict[str, list[Tensor]]] = {}
        for held in segments:
            for tensor, names in held:
                for (layer_idx, name), part in zip(names, tensor, strict=True):
                    self._of_layer.setdefault(layer_idx, {}).setdefault(name, []).append(part)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for held in self.segments for tensor, _ in held)

    def start_forward(self, start: int, stop: int) -> None:
        """Begin a forward of the columns `[start, stop)`."""
        self._forward = SharedForward(self.plan, self._bounds, start, stop)

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer reads, lazily, [R, H, columns, D]: segments, and each row's own columns."""
        forward, held = self._forward, self._of_layer[layer_idx]
        assert forward is not None
        if keys.shape[2] + self.plan.first_own == forward.stop and held["key"][0].dtype == keys.dtype:
            reads = LayerReads(self, forward, held, {"key": keys, "value": values})
            return lazily(reads, keys, values, forward.stop)
        rows = self.rows()  # a forward that told nobody, or segments in another dtype
        assert rows is not None  # the rows run
        rows.make_dense()
        dense: tuple[Tensor, Tensor] = rows.layers[layer_idx].columns()
        return dense

    def look(self, *, is_call: bool = False) -> None:
        """Note that what layers read was asked for dense: by this call alone, or by the model, which is so for good."""
        if not is_call:
            self._looks.model_looks = True
        if (rows := self.rows()) is not None:
            rows.seen.dense = rows.seen.dense or (CALL_LOOKS if is_call else MODEL_LOOKS)

    def count(self) -> None:
        """Note that attention has read the segments once."""
        if (rows := self.rows()) is not None:
            rows.seen.tokens = max(rows.seen.tokens, self._num_tokens)
            rows.seen.rows = max(rows.seen.rows, self._num_rows)

    def parts(self, row: int, start: int, stop: int) -> Iterator[tuple[int, Columns]]:
        """Yield those of the columns `[start, stop)` of a row that lie in segments, each part with its first column."""
        for segment, length, held in zip(self.plan.segments, self.lengths, self.segments, strict=True):
            first = self.plan.pads[row] + segment.start
            end = min(stop, first + length)
            if row in segment.rows and first <= start < end:
                yield start, Columns(held, 0, start - first, end - first)
                start = end
