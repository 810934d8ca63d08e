"""The least that a decode step can cost: a cache that appends in place, moves only what rows do not share, and keeps no
books.
"""

from __future__ import annotations

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class InPlaceLayer(DynamicLayer):
    """A layer whose keys and values have room behind them; all rows start with what it is made of."""

    def __init__(self, ready: DynamicLayer, num_spare: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = ready.keys.dtype, ready.keys.device, True
        rows, heads, self._length, _ = ready.keys.shape
        self._shared = self._length
        self._room = tuple(
            states.new_zeros((rows, heads, self._length + num_spare, states.shape[3]))
            for states in (ready.keys, ready.values)
        )
        for room, states in zip(self._room, (ready.keys, ready.values), strict=True):
            room[:, :, : self._length] = states
        self.keys, self.values = (room[:, :, : self._length] for room in self._room)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start, stop = self._length, self._length + key_states.shape[2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:stop] = states
        self._length = stop
        self.keys, self.values = (room[:, :, :stop] for room in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for room in self._room:
            span = room[:, :, self._shared : self._length]
            span.copy_(span.index_select(0, beam_idx.to(span.device)))

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._length += tokens_to_remove


def in_place(ready: DynamicCache, num_spare: int) -> DynamicCache:
    """A copy of `ready` with room for `num_spare` more tokens."""
    cache = DynamicCache()
    cache.layers = [InPlaceLayer(layer, num_spare) for layer in ready.layers]
    return cache
