"""Attends a forward of many new columns after few known ones as one causal square.

After known columns a forward is given a mask, and kernels compute every score of a mask, but of a causal square only
half. So queries of zeros stand in for the known columns, and their results are left out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .backends import is_fused
from .lazy import KnownMasks, lazily

# Measured on a CPU, with 9 heads of 64, and so used there alone. With 256 columns, 16 of them known, square and mask
# take as long. With 1,024 columns, the square takes 0.69 of the mask's time after 16 known columns, 0.77 after 64, 0.92
# after 256 and 1.16 after 424; with 2,048 columns, 0.59 after 48 known ones; with 4,000 columns, 0.65 after 1,000.
MIN_COLUMNS = 512
MIN_NEW = 3  # least number of new columns for each known one


def pays(start: int, stop: int) -> bool:
    """Return whether a square is quicker than the mask for a forward of the columns `[start, stop)`.

    Examples:
        >>> pays(16, 1024), pays(0, 1024), pays(1024, 1040)
        (True, False, False)
    """
    return start > 0 and stop >= MIN_COLUMNS and stop - start >= MIN_NEW * start


class CausalSquare:
    """`CausalSquare` attends one forward of the columns `[start, stop)`, for the layers that see all columns."""

    def __init__(self, start: int, stop: int, looks: Any) -> None:
        self.start, self.stop, self.looks = start, stop, looks  # `Looks`: told where the model does something else
        self._masks = KnownMasks()

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer reads, [R, H, columns, D]: lazily if a kernel skips what a causal square hides."""
        skips = keys.device.type == "cpu" and keys.shape[3] == values.shape[3] and is_fused()
        if keys.shape[2] != self.stop or not skips:  # or a forward that told nobody
            return keys, values
        return lazily(_LayerReads(self, keys, values), keys, values, self.stop)

    def is_causal(self, mask: Tensor | None) -> bool:
        """Return whether a mask hides from each query the columns after it, and nothing else."""
        return mask is not None and bool(self._masks.of(mask, None, lambda: self._look(mask)))

    def _look(self, mask: Tensor) -> bool:
        if mask.dim() != 4 or mask.shape[1:] != (1, self.stop - self.start, self.stop):
            return False
        if mask.stride(0) == 0:  # the mask is expanded to all rows
            mask = mask[:1]
        queries = torch.arange(self.start, self.stop, device=mask.device)[:, None]
        is_seen = torch.arange(self.stop, device=mask.device) <= queries
        if mask.dtype == torch.bool:
            return bool((mask == is_seen).all())
        return bool(torch.where(is_seen, mask == 0, mask <= torch.finfo(mask.dtype).min / 2).all())


class _LayerReads:
    """`_LayerReads` holds what one layer reads; see `LazyReads`."""

    def __init__(self, square: CausalSquare, keys: Tensor, values: Tensor) -> None:
        self._square, self._states = square, {"key": keys, "value": values}

    def dense(self, name: str, *, is_call: bool) -> Tensor:
        if is_call:
            return self._states[name]
        self._square.looks.model_looks = True
        return self._states[name].contiguous()

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        square, key, value = self._square, self._states["key"], self._states["value"]
        if query.shape[2] != square.stop - square.start or not square.is_causal(mask):
            return None
        queries = torch.nn.functional.pad(query, (0, 0, square.start, 0))
        out = scaled_dot_product_attention(
            queries, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out[:, :, square.start :]
