"""A forward of many new columns after few known ones: attended as one causal square.

After known columns a forward is given a mask, and kernels compute every score of a mask. Of a square that is causal they
skip up to half. So where a mask says no more than that, queries of zeros stand in for the known columns, and what they
get is left out. Where torch's fused kernel does not serve, nothing would be skipped, and the mask stays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .lazy import KnownMasks, LazyStates

# Measured on a CPU, and so used there alone, with 9 heads of 64. Of 256 columns, 16 of them known, both take as long. Of 1,024
# the square takes 0.69 of the time with 16 known, 0.77 with 64, 0.92 with 256 and 1.16 with 424; of 2,048 with 48 known 0.59;
# of 4,000 with 1,000 known 0.65.
MIN_COLUMNS = 512
MIN_NEW = 3  # times those known


class CausalSquare:
    """One forward of the columns `[start, stop)`, for the layers that see all columns.

    Args:
        on_look: called where the model does something else with what it reads.
    """

    def __init__(self, start: int, stop: int, on_look: Callable[[], None]) -> None:
        self.start, self.stop = start, stop
        self.on_look = on_look
        self._masks = KnownMasks()

    @staticmethod
    def pays(start: int, stop: int) -> bool:
        """Whether the square is quicker than the mask.

        Examples:
            >>> CausalSquare.pays(16, 1024), CausalSquare.pays(0, 1024), CausalSquare.pays(1024, 1040)
            (True, False, False)
        """
        return start > 0 and stop >= MIN_COLUMNS and stop - start >= MIN_NEW * start

    def read(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a layer reads, name -> [R, H, stop, D], lazily."""
        if states.keys() != {"key", "value"} or not _is_fused(states["key"], states["value"]):
            return dict(states)
        reads = _LayerReads(self, states)
        return {name: LazyStates(reads, name, each.shape, each.dtype, each.device) for name, each in states.items()}

    def is_causal(self, mask: Tensor | None) -> bool:
        """Whether a mask hides from each query what comes after it, and nothing else."""
        return mask is not None and bool(self._masks.of(mask, None, lambda: self._look(mask)))

    def _look(self, mask: Tensor) -> bool:
        if mask.dim() != 4 or mask.shape[1:] != (1, self.stop - self.start, self.stop):
            return False
        if mask.stride(0) == 0:  # expanded to all rows
            mask = mask[:1]
        queries = torch.arange(self.start, self.stop, device=mask.device)[:, None]
        is_seen = torch.arange(self.stop, device=mask.device) <= queries
        if mask.dtype == torch.bool:
            return bool((mask == is_seen).all())
        return bool(torch.where(is_seen, mask == 0, mask <= torch.finfo(mask.dtype).min / 2).all())


def _is_fused(key: Tensor, value: Tensor) -> bool:
    """Whether attention of these is left to a kernel that skips what a causal square hides."""
    settings: Any = torch.backends.cuda  # of all devices, whatever the name says
    return key.device.type == "cpu" and key.shape[3] == value.shape[3] and settings.flash_sdp_enabled()


class _LayerReads:
    """What one layer reads: see `LazyReads`."""

    def __init__(self, square: CausalSquare, states: Mapping[str, Tensor]) -> None:
        self._square = square
        self._states = states
        self._is_refused = False

    def dense(self, name: str) -> Tensor:
        """`LazyReads.dense`."""
        if self._is_refused:
            return self._states[name]
        self._square.on_look()
        return self._states[name].contiguous()

    def refuse(self) -> None:
        """`LazyReads.refuse`."""
        self._is_refused = True

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """`LazyReads.attend`."""
        square, key, value = self._square, self._states["key"], self._states["value"]
        if query.shape[2] != square.stop - square.start or not square.is_causal(mask):
            self.refuse()
            return None
        queries = torch.nn.functional.pad(query, (0, 0, square.start, 0))
        out = scaled_dot_product_attention(
            queries, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out[:, :, square.start :]
