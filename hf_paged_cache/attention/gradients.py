"""Owns the running rows' keys and values with the graph that computed them, as a `DynamicCache` keeps them.

What readers give has no graph, and is their memory. While the rows' forwards run with gradients on, what is held here
takes its place; a forward without gradients ends that, as it does for a `DynamicCache`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kv.transfers import Transfer, to_device


class GradientPath:
    """What attention reads of the running rows where a gradient flows through it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], Tensor] = {}  # (layer, name) -> [R, H, columns, D]

    def __bool__(self) -> bool:
        """Whether a gradient flows through the rows."""
        return any(states.requires_grad for states in self._held.values())

    def clear(self) -> None:
        """Other rows run from here on, or none."""
        self._held = {}

    def start_forward(self) -> None:
        """A forward begins."""
        if self._held and not torch.is_grad_enabled():
            self.clear()

    def join(self, layer_idx: int, new: Mapping[str, Tensor], read: dict[str, Tensor], start: int) -> dict[str, Tensor]:
        """With gradients on, put in place of what a reader gave: the columns `[0, start)`, held or read, then `new`."""
        if torch.is_grad_enabled():
            for name, states in new.items():
                past = self._held.get((layer_idx, name))
                if past is None or past.shape[2] != start:
                    past = read[name].narrow(2, 0, start)
                read[name] = torch.cat((past, states), dim=2) if start else states.contiguous()
                if read[name].requires_grad:
                    self._held[layer_idx, name] = read[name]
        return read

    def in_place_of(self, layer_idx: int, read: dict[str, Tensor], alias: Sequence[int]) -> dict[str, Tensor]:
        """Put what is held of a layer in place of all columns of what was read of it; row `i` of that is row `alias[i]`."""
        for name, states in read.items():
            held = self._held.get((layer_idx, name))
            if held is not None and held.shape[2] == states.shape[2]:
                read[name] = held.index_select(0, to_device(alias, held.device))
        return read

    def select_rows(self, sources: Sequence[int]) -> None:
        """Row `i` goes on as row `sources[i]`."""
        transfer = Transfer()
        rows = transfer.add(sources)
        for key, states in self._held.items():
            self._held[key] = states.index_select(0, transfer.on(states.device, rows))

    def crop(self, num_columns: int) -> None:
        """Columns from `num_columns` on are taken back."""
        for key, states in self._held.items():
            self._held[key] = states[:, :, :num_columns]
