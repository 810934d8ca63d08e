"""A reader that copies each layer's rows for the moment of its attention: beside the blocks, memory is one layer's rows."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.recycled_memory import RecycledMemory
from ..kv.slot_mapping import ReadSource, RowLayout, read_source


class GatherReader:
    """Gathers each layer's rows for the moment of its attention. A `Reader`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._memory = RecycledMemory()
        self._layouts: Callable[[], Sequence[RowLayout]] = list  # of the rows of the forward
        self._start = self._stop = 0  # columns of the forward
        self._source: ReadSource | None = None  # columns [0, stop); made by the first layer that reads them
        self._source_of_past: ReadSource | None = None  # columns [0, start), likewise

    def start_rows(
        self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float
    ) -> None:
        """See Reader."""

    def start_forward(self, rows: Callable[[], Sequence[RowLayout]], num_rows: int, start: int, stop: int) -> None:
        """See Reader."""
        self._layouts, self._start, self._stop = rows, start, stop
        self._source = self._source_of_past = None

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Reader."""
        if not self._start:
            return {name: states.contiguous() for name, states in new.items()}  # as a DynamicCache's `cat` leaves them
        size = self._pool.block_size
        if torch.is_grad_enabled():  # a gradient flows through what is new, and its pass keeps what it was given
            if self._source_of_past is None:
                self._source_of_past = read_source(self._layouts(), 0, self._start, size)
            past = self._pool.gather(layer_idx, self._source_of_past, new)
            return {name: torch.cat((past[name].to(states.dtype), states), dim=2) for name, states in new.items()}
        if self._source is None:
            self._source = read_source(self._layouts(), 0, self._stop, size)
        gathered = self._pool.gather(layer_idx, self._source, new, self._memory)
        for name, states in new.items():
            if gathered[name].dtype != states.dtype:
                gathered[name] = gathered[name].to(states.dtype)
        return gathered

    def read_step(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Reader."""
        gathered = self.read(layer_idx, {"key": key, "value": value})
        return gathered["key"], gathered["value"]

    def expand_rows(self, sources: Sequence[int]) -> None:
        """See Reader."""

    def reorder_rows(self, sources: Sequence[int], shared_columns: int) -> None:
        """See Reader."""

    def crop(self, num_columns: int) -> None:
        """See Reader."""

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """See Reader."""
        self.drop()

    def pause(self) -> None:
        """See Reader."""
        self.drop()

    def drop(self) -> None:
        """See Reader."""
        self._layouts, self._source, self._source_of_past = list, None, None
        self._start = self._stop = 0
        self._memory.drop()

    @property
    def num_bytes(self) -> int:
        """See Reader."""
        return self._memory.num_bytes
