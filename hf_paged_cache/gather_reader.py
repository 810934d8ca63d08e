"""A reader that copies each layer's rows for the moment of its attention: beside the blocks, memory is one layer's rows."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .host_memory import RecycledMemory
from .pool import BlockPool
from .slots import ReadSource, RowLayout, slot_matrix


class GatherReader:
    """Gathers each layer's rows for the moment of its attention. A `Reader`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._memory = RecycledMemory()
        self._source_of_all: ReadSource | None = None  # columns [0, stop) of the forward; None: start is 0
        self._source_of_past: ReadSource | None = None  # columns [0, start)

    def start_rows(
        self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: int | None
    ) -> None:
        """See Reader."""

    def start_forward(self, rows: Callable[[], Sequence[RowLayout]], num_rows: int, start: int, stop: int) -> None:
        """See Reader."""
        self._source_of_all = self._source_of_past = None
        if start > 0:
            slots = slot_matrix(rows(), stop, self._pool.block_size)
            self._source_of_all, self._source_of_past = ReadSource(slots), ReadSource(slots[:, :start])

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Reader."""
        if self._source_of_all is None or self._source_of_past is None:
            return dict(new)
        if torch.is_grad_enabled():  # a gradient flows through what is new, and its pass keeps what it was given
            past = self._pool.gather(layer_idx, self._source_of_past, new)
            return {name: torch.cat((past[name].to(states.dtype), states), dim=2) for name, states in new.items()}
        gathered = self._pool.gather(layer_idx, self._source_of_all, new, self._memory)
        for name, states in new.items():
            if gathered[name].dtype != states.dtype:
                gathered[name] = gathered[name].to(states.dtype)
        return gathered

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
        self._source_of_all = self._source_of_past = None
        self._memory.drop()

    @property
    def num_bytes(self) -> int:
        """See Reader."""
        return self._memory.num_bytes
