"""Attends several heads of queries to each head of keys and values, by a kernel that takes the heads as they are.

Wherever there is a mask, transformers repeats heads, or lays the heads of one token as several tokens; the kernel for
those reads a long row with few threads. On an H100 one row of 18,432 columns takes 432 or 390 microseconds a layer so,
and 42 here (bf16, 32 heads of queries to 8).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .lazy import lazily


def grouped(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values that attention reads, [R, H, columns, D] each, without repeating their heads."""
    return lazily(_Grouped(keys, values), keys, values, keys.shape[2])


class _Grouped:
    """`_Grouped` attends to keys and values whose heads are not repeated; see `LazyReads`."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._states = {"key": keys, "value": values}

    def dense(self, name: str, *, is_call: bool) -> Tensor:
        return self._states[name]

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        keys, values = self._states["key"], self._states["value"]
        sees_one = mask is not None and mask.shape[1:3] == (1, 1)
        if sees_one and query.shape[2] > 1:  # heads of one token, laid as several tokens of fewer heads
            unfolded = query.reshape(query.shape[0], -1, 1, query.shape[3])
        else:
            unfolded = query
        if unfolded.shape[1] == keys.shape[1] or not _takes_groups(unfolded, keys, values, mask):
            return None
        out = scaled_dot_product_attention(unfolded, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.reshape(*query.shape[:3], values.shape[3])


def _takes_groups(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fused kernel takes fewer heads of keys than of queries; torch's unfused one is slower."""
    if query.device.type != "cuda":
        return True
    settings: Any = torch.backends.cuda
    return bool(settings.can_use_cudnn_attention(settings.SDPAParams(query, keys, values, mask, 0.0, False, True)))
