"""Owns what several rows of a call have in common: segments, held once, that attention reads once for all of them.

A segment lies where it was: in a run of the pool's blocks, which a lease keeps, in rows that ran ahead, or in the row
that ran for several.
The rows' own memory, their *tails*, begins where the first of their segments ends.

Queries of all rows of a segment are stacked into one row, which sees the whole segment; tails get their part of the
mask that was passed. Parts are merged by their lse. What cannot be served like this becomes dense.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..attention.backends import Part, aligned, attend, can_attend, is_fused, merge
from ..attention.lazy import KnownMasks, lazily
from ..blocks import Allocation
from ..kv.tensors import to_device
from .memory import Columns, Streams

MODEL_LOOKS = "the model looks at keys and values itself, or torch has no kernel for them on this device"
CALL_LOOKS = (
    "attention was asked for what cannot be read once: dropout, is_causal, a mask that hides more than padding, "
    "or all of it by a compiled forward"
)
IN_CHUNKS = "prefill_chunk_size was given, and what is read in parts rounds otherwise"


class Segment(NamedTuple):
    """`Segment` is a run of tokens that some rows have."""

    rows: tuple[int, ...]  # that have the segment, and follow one another
    start: int  # tokens before the segment in each of these rows
    block_ids: tuple[int, ...]  # of the blocks that hold the segment


class Plan(NamedTuple):
    """`Plan` says what is read once, and from where on each row is read by itself."""

    segments: tuple[Segment, ...]  # those of a row follow one another, from the row's first token on
    pads: tuple[int, ...]  # row -> columns of padding
    ends: tuple[int, ...]  # row -> column at which its segments end, and its tail begins
    first_own: int  # first column of any tail; all tails are read from there on


@dataclass
class Looks:
    """`Looks` remembers whether a model looks at keys and values otherwise than by torch's attention."""

    model_looks: bool = False  # for good, once the model was seen to look
    weighs_launches: bool = True  # what rows share is held once only where that pays; False for trials of models


@dataclass
class Seen:
    """`Seen` remembers how attention has read the rows of one call."""

    tokens: int = 0  # most tokens that were read once at a time
    dense: str = ""  # why what rows share was read for each row by itself, if it was


class Forward(NamedTuple):
    """`Forward` is one forward of rows that share segments, of the columns `[start, stop)`."""

    start: int
    stop: int
    masks: KnownMasks


class SharedColumns:
    """`SharedColumns` has the segments of the rows of one call.

    Args:
        plan: which rows have which segment; its block ids mean nothing here.
        segments: for each segment, memory of one row whose columns are the segment's tokens.
        leases: leases of the blocks in which segments lie.
        num_pool_blocks: blocks that the pool had room for then; when it has grown, segments lie in its old memory.
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
        self._num_tokens = sum(num for num, number in zip(self.lengths, shared_by, strict=True) if number > 1)
        # device -> paddings of the rows, and columns at which their tails begin; sent once for all forwards
        self._bounds: dict[torch.device, Tensor] = {}
        self._forward = Forward(0, 0, KnownMasks())
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
        self._forward = Forward(start, stop, KnownMasks())

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer reads, lazily, [R, H, columns, D]: segments, and each row's own columns."""
        forward, held = self._forward, self._of_layer[layer_idx]
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

    def parts(self, row: int, start: int, stop: int) -> Iterator[tuple[int, Columns]]:
        """Yield those of the columns `[start, stop)` of a row that lie in segments, each part with its first column."""
        for segment, length, held in zip(self.plan.segments, self.lengths, self.segments, strict=True):
            first = self.plan.pads[row] + segment.start
            end = min(stop, first + length)
            if row in segment.rows and first <= start < end:
                yield start, Columns(held, 0, start - first, end - first)
                start = end

    def mask_of_tails(
        self, mask: Tensor | None, start: int, stop: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[bool, Tensor | None]:
        """Return whether a mask only says where rows begin and that they are causal, and what it says of the tails.

        It is the mask of a forward of the columns `[start, stop)`.

        That is [R, 1, T, columns of the tails], added to scores; None: queries see all of the tails.
        """
        plan = self.plan
        first, last, num_rows, length = plan.first_own, max(plan.ends), len(plan.pads), stop - start
        if mask is None:
            if length > 1 or any(plan.pads):
                return False, None
            if all(end == first for end in plan.ends):
                return True, None
        elif mask.dim() != 4 or mask.shape[0] not in (1, num_rows) or mask.shape[1:] != (1, length, stop):
            return False, None
        if device not in self._bounds:
            self._bounds[device] = to_device([*plan.pads, *plan.ends], device)
        pads, ends = self._bounds[device].view(2, num_rows, 1, 1, 1)
        columns = torch.arange(stop, device=device)
        queries = torch.arange(start, stop, device=device)[:, None]
        seen = columns >= ends
        added: Tensor | None = None
        if mask is not None:
            shown = mask if mask.dtype == torch.bool else mask == 0
            hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
            is_token = queries >= pads
            before = torch.where(columns[:last] >= pads, shown[..., :last], hidden[..., :last])
            itself = torch.diagonal(shown, start, -2, -1).unsqueeze(-1)
            fits = (before | (columns[:last] >= ends) | ~is_token).all() & (itself | ~is_token).all()
            if not bool(fits):
                return False, None
            if mask.dtype == torch.bool:
                seen = seen & mask
            else:
                added = mask[..., first:].to(dtype)
        seen = (seen | (columns == queries))[..., first:]  # padding sees itself: no query may see nothing
        if added is None:
            added = torch.zeros((), dtype=dtype, device=device)
        else:
            added = torch.where((columns == queries)[:, first:], 0.0, added)
        return True, aligned(torch.where(seen, added, -math.inf))


class LayerReads:
    """`LayerReads` holds what one layer reads in one forward, by name, of segments and of tails; see `LazyReads`.

    Of what later forwards change, it refers only to the tails' memory.
    """

    def __init__(
        self,
        shared: SharedColumns,
        forward: Forward,
        segments: Mapping[str, Sequence[Tensor]],
        tails: Mapping[str, Tensor],
    ) -> None:
        self._shared, self._forward, self._segments, self._tails = shared, forward, segments, tails

    def dense(self, name: str, *, is_call: bool) -> Tensor:
        self._shared.look(is_call=is_call)
        plan, tail = self._shared.plan, self._tails[name]
        rows, heads, _, size = tail.shape
        whole = tail.new_zeros((rows, heads, self._forward.stop, size))
        whole[:, :, plan.first_own :] = tail
        for segment, states in zip(plan.segments, self._segments[name], strict=True):
            for row in segment.rows:
                first = plan.pads[row] + segment.start
                whole[row, :, first : first + states.shape[2]] = states[0]
        return whole

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """Attend to segments and tails, and merge the parts."""
        plan, keys, values = self._shared.plan, self._tails["key"], self._tails["value"]
        start, stop, masks = self._forward
        length = stop - start
        num_rows, num_heads, num_queries, size = query.shape
        if num_rows != len(plan.pads) or (num_queries != length and length != 1) or not is_fused():
            return None
        if not can_attend(query, keys, values):
            self._shared.look()
            return None
        kind = query.dtype, query.device
        fits, of_tails = masks.of(mask, kind, lambda: self._shared.mask_of_tails(mask, start, stop, *kind))
        if not fits:
            return None
        self._shared.count()
        result = attend(query, Part(keys, values, of_tails), scale)
        heads, parts = keys.shape[1], zip(self._segments["key"], self._segments["value"], strict=True)
        for segment, (key, value) in zip(plan.segments, parts, strict=True):
            first, num = segment.rows[0], len(segment.rows)
            chosen = query.narrow(0, first, num)
            stacked = chosen.reshape(num, heads, -1, size).transpose(0, 1).reshape(1, heads, -1, size)
            out, lse = attend(stacked, Part(key, value), scale)
            out = out.view(heads, num, -1, size).transpose(0, 1).reshape(num, num_heads, num_queries, size)
            lse = lse.reshape(heads, num, -1).transpose(0, 1).reshape(num, num_heads, num_queries)
            result = merge(result, (out, lse)) if num == num_rows else _merge_rows(result, first, (out, lse))
        return result[0].to(query.dtype)


def _merge_rows(whole: tuple[Tensor, Tensor], first: int, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge a part into the rows from `first` on that have it, as `merge` does, in place where possible."""
    out, lse = whole
    num = part[0].shape[0]
    merged, merged_lse = merge((out.narrow(0, first, num), lse.narrow(0, first, num)), part)
    out = out.to(merged.dtype)
    out.narrow(0, first, num).copy_(merged)
    lse.narrow(0, first, num).copy_(merged_lse)
    return out, lse
