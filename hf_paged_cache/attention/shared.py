"""Attends to what rows share and to what each row has alone, and joins these parts of one layer.

Queries of all rows of a segment are stacked into one row, which sees the whole segment; tails get their part of
the mask that was passed. Parts are merged by their lse. What cannot be served like this becomes dense.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kv.tensors import to_device
from .backends import Part, aligned, attend, can_attend, is_fused, merge
from .lazy import KnownMasks
from .segments import Plan


class SharedForward:
    """`SharedForward` holds what the layers have in common in one forward of rows that share segments.

    Args:
        bounds: device -> paddings of the rows, and columns at which their tails begin; sent once for all forwards.
    """

    def __init__(self, plan: Plan, bounds: dict[torch.device, Tensor], start: int, stop: int) -> None:
        self.plan, self.start, self.stop = plan, start, stop
        self._bounds, self.masks = bounds, KnownMasks()

    def mask_of_tails(
        self, mask: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[bool, Tensor | None]:
        """Return whether a mask only says where rows begin and that they are causal, and what it says of the tails.

        That is [R, 1, T, columns of the tails], added to scores; None: queries see all of the tails.
        """
        plan, start, stop = self.plan, self.start, self.stop
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
    """`LayerReads` holds what one layer reads in one forward; see `LazyReads`.

    Of what later forwards change, it refers only to the tails' memory.

    Args:
        shared: `SharedColumns`, which are told how layers read.
        segments, tails: name -> tensors of the segments, and of the tails.
    """

    def __init__(
        self,
        shared: Any,
        forward: SharedForward,
        segments: Mapping[str, Sequence[Tensor]],
        tails: Mapping[str, Tensor],
    ) -> None:
        self._shared, self._forward, self._segments, self._tails = shared, forward, segments, tails

    def dense(self, name: str, *, is_call: bool) -> Tensor:
        self._shared.look(is_call=is_call)
        forward, tail = self._forward, self._tails[name]
        plan, (rows, heads, _, size) = forward.plan, tail.shape
        whole = tail.new_zeros((rows, heads, forward.stop, size))
        whole[:, :, plan.first_own :] = tail
        for segment, states in zip(plan.segments, self._segments[name], strict=True):
            for row in segment.rows:
                first = plan.pads[row] + segment.start
                whole[row, :, first : first + states.shape[2]] = states[0]
        return whole

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """Attend to segments and tails, and merge the parts."""
        forward, keys, values = self._forward, self._tails["key"], self._tails["value"]
        plan, length = forward.plan, forward.stop - forward.start
        num_rows, num_heads, num_queries, size = query.shape
        if num_rows != len(plan.pads) or (num_queries != length and length != 1) or not is_fused():
            return None
        if not can_attend(query, keys, values):
            self._shared.look()
            return None
        kind = query.dtype, query.device
        fits, of_tails = forward.masks.of(mask, kind, lambda: forward.mask_of_tails(mask, *kind))
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
