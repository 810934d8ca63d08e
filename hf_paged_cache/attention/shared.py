"""Attends to what rows share and to what each row has alone, and joins these parts of one layer.

Queries of all rows of a segment are stacked into one row, which sees the whole segment; tails get their part of
the mask that was passed. Parts are merged by their lse. What cannot be served like this becomes dense.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kv.transfers import Transfer
from .backends import Part, aligned, attend, merge
from .lazy import KnownMasks
from .segments import Plan


class ReadsOnce(Protocol):
    """`ReadsOnce` is told how layers read."""

    def look(self, *, is_call: bool = False) -> None: ...  # what layers read was asked for dense

    def count(self, plan: Plan) -> None: ...  # attention has read the plan's segments once


class PlanOnDevices:
    """`PlanOnDevices` holds the rows of a plan on the devices that ask for them.

    The rows are sent once: while the plan lasts, no forward sends anything more.
    """

    def __init__(self, plan: Plan, transfer: Transfer) -> None:
        self._transfer = transfer
        self._bounds = transfer.add([*plan.pads, *plan.ends])
        self._segments = [
            None if rows[-1] - rows[0] == len(rows) - 1 else transfer.add(rows) for rows, *_ in plan.segments
        ]

    def bounds(self, device: torch.device) -> Tensor:
        """Return [2, R]: the padding of each row, and the column at which its tail begins."""
        return self._transfer.on(device, self._bounds).view(2, -1)

    def of_segment(self, number: int, device: torch.device) -> Tensor | None:
        """Return the rows that have a segment, [N]; None if these rows follow one another."""
        added = self._segments[number]
        return None if added is None else self._transfer.on(device, added)


class SharedForward:
    """`SharedForward` holds what the layers have in common in one forward of rows that share segments."""

    def __init__(self, plan: Plan, rows: PlanOnDevices, start: int, stop: int) -> None:
        self.plan, self.rows, self.start, self.stop = plan, rows, start, stop
        self.is_counted = False
        self._masks = KnownMasks()

    def mask_of_tails(
        self, mask: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[bool, Tensor | None]:
        """Return whether a mask only says where rows begin and that they are causal, and what it says of the tails.

        Args:
            mask: mask that attention was given, the same for most layers.

        Returns:
            True if segments can be read under the mask, and the mask of the tails, [R, 1, T, columns of the tails],
                added to scores; None: queries see all of the tails.
        """
        found: tuple[bool, Tensor | None] = self._masks.of(
            mask, (dtype, device), lambda: self._look(mask, dtype, device)
        )
        return found

    def _look(self, mask: Tensor | None, dtype: torch.dtype, device: torch.device) -> tuple[bool, Tensor | None]:
        plan, start, stop = self.plan, self.start, self.stop
        first, last, num_rows, length = plan.first_own, max(plan.ends), len(plan.pads), stop - start
        if mask is None:
            if length > 1 or any(plan.pads):
                return False, None
            if all(end == first for end in plan.ends):
                return True, None
        elif mask.dim() != 4 or mask.shape[0] not in (1, num_rows) or mask.shape[1:] != (1, length, stop):
            return False, None
        pads, ends = self.rows.bounds(device).view(2, num_rows, 1, 1, 1)
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
    """

    def __init__(
        self,
        shared: ReadsOnce,
        forward: SharedForward,
        segments: Mapping[str, Sequence[Tensor]],
        tails: Mapping[str, Tensor],
    ) -> None:
        self._shared = shared
        self._forward = forward
        self._segments = segments
        self._tails = tails
        self._dense: dict[str, Tensor] = {}
        self._is_refused = False

    def dense(self, name: str) -> Tensor:
        """Return dense columns, as `LazyReads.dense` says, to somebody who looks."""
        self._shared.look(is_call=self._is_refused)
        if name not in self._dense:
            self._dense[name] = self.gather(name)
        return self._dense[name]

    def gather(self, name: str) -> Tensor:
        """Return all that the rows see, [R, H, columns, D]."""
        forward, tail = self._forward, self._tails[name]
        plan, (rows, heads, _, size) = forward.plan, tail.shape
        whole = tail.new_zeros((rows, heads, forward.stop, size))
        whole[:, :, plan.first_own :] = tail
        for segment, states in zip(plan.segments, self._segments[name], strict=True):
            for row in segment.rows:
                first = plan.pads[row] + segment.start
                whole[row, :, first : first + states.shape[2]] = states[0]
        return whole

    def refuse(self) -> None:
        """Note that this call is why dense tensors are asked for, as `LazyReads.refuse` says."""
        self._is_refused = True

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """Attend to segments and tails, and merge the parts, as `LazyReads.attend` says; else refuse."""
        forward, keys, values = self._forward, self._tails["key"], self._tails["value"]
        plan, length = forward.plan, forward.stop - forward.start
        num_rows, num_heads, num_queries, size = query.shape
        fits, of_tails = False, None
        if num_rows == len(plan.pads) and (num_queries == length or length == 1):
            fits, of_tails = forward.mask_of_tails(mask, query.dtype, query.device)
        if not fits or size != keys.shape[3]:
            self.refuse()
            return None
        if not forward.is_counted:
            forward.is_counted = True
            self._shared.count(plan)
        result = attend(query, Part(keys, values, of_tails), scale)
        heads, parts = keys.shape[1], zip(self._segments["key"], self._segments["value"], strict=True)
        for number, (segment, (key, value)) in enumerate(zip(plan.segments, parts, strict=True)):
            rows, is_all = segment.rows, len(segment.rows) == num_rows
            index = forward.rows.of_segment(number, query.device)
            chosen = query if is_all else _take(query, rows, index)
            stacked = chosen.reshape(len(rows), heads, -1, size).transpose(0, 1).reshape(1, heads, -1, size)
            out, lse = attend(stacked, Part(key, value), scale)
            out = out.view(heads, len(rows), -1, value.shape[3]).transpose(0, 1)
            part = (
                out.reshape(len(rows), num_heads, num_queries, value.shape[3]),
                lse.reshape(heads, len(rows), -1).transpose(0, 1).reshape(len(rows), num_heads, num_queries),
            )
            result = merge(result, part) if is_all else _merge_rows(result, rows, index, part)
        return result[0].to(query.dtype)


def _take(states: Tensor, rows: Sequence[int], index: Tensor | None) -> Tensor:
    """Return some rows: a view of them if they follow one another."""
    return states.narrow(0, rows[0], len(rows)) if index is None else states.index_select(0, index)


def _merge_rows(
    whole: tuple[Tensor, Tensor], rows: Sequence[int], index: Tensor | None, part: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge a part into the rows that have it, as `merge` does, in place where possible."""
    out, lse = whole
    merged, merged_lse = merge((_take(out, rows, index), _take(lse, rows, index)), part)
    out = out.to(merged.dtype)
    for states, of_rows in ((out, merged), (lse, merged_lse)):
        if index is None:
            states.narrow(0, rows[0], len(rows)).copy_(of_rows)
        else:
            states.index_copy_(0, index, of_rows)
    return out, lse
