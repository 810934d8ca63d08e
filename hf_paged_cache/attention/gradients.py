"""Owns the running rows' keys and values with the graph that computed them, as a `DynamicCache` keeps them.

What a view gives has no graph, and is its memory. While the rows' forwards run with gradients on, what is held here
takes its place; a forward without gradients ends that, as it does for a `DynamicCache`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kv.transfers import Transfer, to_device


class GradientPath:
    """What attention reads of the running rows where a gradient flows through it."""

    def __init__(self) -> None:
        # (layer, name) -> [R, H, columns, D], and the first of these columns
        self._held: dict[tuple[int, str], tuple[Tensor, int]] = {}

    def __bool__(self) -> bool:
        """Whether a gradient flows through the rows."""
        return any(states.requires_grad for states, _ in self._held.values())

    def drop(self) -> None:
        """Other rows run from here on, or none."""
        self._held = {}

    def start_forward(self) -> None:
        """A forward begins."""
        if self._held and not torch.is_grad_enabled():
            self.drop()

    def join(self, layer_idx: int, new: Mapping[str, Tensor], read: dict[str, Tensor], start: int) -> dict[str, Tensor]:
        """With gradients on, put in place of what a view gave: the columns before `start`, held or read, then `new`."""
        if torch.is_grad_enabled():
            for name, states in new.items():
                num_past = read[name].shape[2] - states.shape[2]
                past, first = self._held.get((layer_idx, name), (None, 0))
                if past is None or first + past.shape[2] != start or first > start - num_past:
                    past, first = read[name].narrow(2, 0, num_past), start - num_past
                whole = torch.cat((past, states), dim=2) if start else states.contiguous()
                if whole.requires_grad:
                    self._held[layer_idx, name] = whole, first
                read[name] = whole[:, :, start - num_past - first :]
        return read

    def in_place_of(
        self, layer_idx: int, read: dict[str, Tensor], alias: Sequence[int], stop: int
    ) -> dict[str, Tensor]:
        """Put what is held of a layer in place of those columns that were read; row `i` of them is row `alias[i]`.

        Args:
            read: name -> [R, H, columns, D], the last ones up to column `stop`.
        """
        for name, states in read.items():
            held, first = self._held.get((layer_idx, name), (None, 0))
            if held is not None and first + held.shape[2] == stop:
                with_graph = held.index_select(0, to_device(alias, held.device))
                num_without = max(0, states.shape[2] - held.shape[2])
                with_graph = with_graph[:, :, max(0, held.shape[2] - states.shape[2]) :]
                read[name] = torch.cat((states[:, :, :num_without], with_graph), dim=2) if num_without else with_graph
        return read

    def select(self, sources: Sequence[int], shared_columns: int = 0, index: Tensor | None = None) -> None:
        """See `Follower`."""
        if not self._held:
            return
        transfer = Transfer()
        rows = transfer.add(sources)
        for key, (states, first) in self._held.items():
            self._held[key] = states.index_select(0, transfer.on(states.device, rows)), first

    def crop(self, start: int, stop: int) -> None:
        """See `Follower`."""
        for key, (states, first) in self._held.items():
            self._held[key] = states[:, :, : max(0, start - first)], first
