"""Implements a layer of sparse attention that chooses its keys by an index.

Index keys are one more stream beside the layer's keys and values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer

from ..model.layers import INDEX
from .layers import RowsLayer, grown, room_for


class IndexedLayer(RowsLayer, DynamicIndexedLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """`IndexedLayer` holds the keys and values of one layer, [R, H, columns, D], and index keys, [R, columns, D].

    A layer has no index keys where it uses another layer's. In layers of this class, columns that rows share are never
    held once.
    """

    _index: Tensor | None = None  # [R, 1, room, D]
    _num_indexed = 0  # columns of `_index` that are written

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append new index keys, [R, T, D]; return the index keys of all columns."""
        new = indexer_key_states.detach().unsqueeze(1)
        at = self._num_indexed
        stop, held = at + new.shape[2], self._index
        if held is None or stop > held.shape[2] or held.dtype != new.dtype or held.device != new.device:
            self._index = held = grown(held, at, room_for(stop, self._owner().wanted), new, new.dtype)
            self.indexer_dtype, self.indexer_device, self.is_own = new.dtype, new.device, True
        held.narrow(2, at, new.shape[2]).copy_(new)
        self._num_indexed = stop
        return held.narrow(2, 0, stop).squeeze(1)

    def lie_in(self, tensors: Mapping[str, Tensor], n: int, base: int = 0) -> None:
        super().lie_in(tensors, n, base)
        self._index, self._num_indexed = tensors.get(INDEX), n
        if self._index is not None:
            self.indexer_dtype, self.indexer_device = self._index.dtype, self._index.device

    def named(self) -> list[tuple[str, Tensor]]:
        return super().named() + ([] if self._index is None else [(INDEX, self._index)])

    def put_into(self, layer: Any) -> None:
        super().put_into(layer)
        if self._index is not None:
            layer.update_indexer(self._index[:, 0, : self.n])
            layer.indexer_position_ids = self.indexer_position_ids

    @property
    def is_indexer_initialized(self) -> bool:  # type: ignore[override]
        return self._index is not None and self.n > 0

    @property
    def indexer_keys(self) -> Tensor | None:
        """Index keys of all columns, [R, columns, D]; None where there are none."""
        return None if self._index is None or not self.n else self._index[:, 0, : self.n]

    @indexer_keys.setter
    def indexer_keys(self, states: Tensor | None) -> None:
        self._owner().give(self.layer_idx, "indexer_keys", states)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all columns so far, [3, R, columns], by which one model weighs index keys.

        They are the positions of plain tokens. None without rows.
        """
        owner = self._owner()
        if owner is None or self._index is None or not owner.n:
            return None
        columns = torch.arange(owner.n, device=self._index.device)
        rows = [(columns - row.pad).clamp_(min=0) + row.first_position for row in owner.prompts]
        return torch.stack(rows).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        """Ignore positions: they follow from the rows, which may have begun with what was known."""

    def lazy_initialization_indexer(self, indexer_key_states: Tensor) -> None:
        """Do nothing: memory is made when index keys come."""

    def crop(self, tokens_to_remove: int) -> None:
        RowsLayer.crop(self, tokens_to_remove)
        self._num_indexed = min(self._num_indexed, self.n)

    def reset(self) -> None:
        RowsLayer.reset(self)
        self._index, self._num_indexed = None, 0
