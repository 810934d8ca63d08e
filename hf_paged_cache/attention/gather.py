"""Owns nothing between two layers: each layer's rows are gathered for its attention, so the least memory is held."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.block_tables import BlockTables
from ..kv.recycled_memory import RecycledMemory
from ..kv.slot_mapping import ReadSource, RowLayout
from ..kv.transfers import Transfer
from .base import Reader
from .windows import Windows, first_column


class GatherReader(Reader):
    """Gathers a layer's rows from the pool whenever the layer reads. Holds no copies, so rows may change as they like."""

    keeps_columns = False
    most_copies = 0

    def __init__(self, pool: BlockPool, windows: Windows | None = None) -> None:
        self._pool = pool
        self._windows = Windows({}) if windows is None else windows  # None: no layer has one
        self._memory = RecycledMemory()
        # Window, or None -> block tables of the rows of the forward, and the columns that such layers read of the pool.
        self._tables: dict[int | None, BlockTables] = {}
        self._sources: dict[int | None, ReadSource] = {}  # empty where a forward reads only what it writes
        self._is_step = False

    def start_forward(
        self,
        rows: Callable[[], Sequence[RowLayout]],
        num_rows: int,
        start: int,
        stop: int,
        transfer: Transfer | None = None,
    ) -> None:
        self._sources, self._is_step = {}, stop - start == 1
        if start:
            transfer, layouts = Transfer() if transfer is None else transfer, rows()
            for window in dict.fromkeys((None, *self._windows.of_layer.values())):
                first = first_column(window, start)
                if (tables := self._tables.get(window)) is None:
                    tables = self._tables[window] = BlockTables(self._pool.block_size)
                tables.update(self._pool.rows_in(window, layouts, first), transfer)
                # of a longer forward, the pool may have only what the next one sees in layers with a window
                end = stop if window is None or self._is_step else start
                self._sources[window] = tables.columns(first, end)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._sources:
            return {name: states.contiguous() for name, states in new.items()}  # as `DynamicCache` gives them
        window = self._windows.of_layer.get(layer_idx)
        source = self._sources[window]
        if window is None or self._is_step:
            gathered = self._pool.gather(layer_idx, source, new, self._memory)
            return {name: gathered[name].to(states.dtype) for name, states in new.items()}
        if not source.num_columns:
            return {name: states.detach().contiguous() for name, states in new.items()}
        past = self._pool.gather(layer_idx, source, new, self._memory)
        return {name: torch.cat((past[name].to(states.dtype), states.detach()), 2) for name, states in new.items()}

    def read_pair(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        gathered = self.read(layer_idx, {"key": key, "value": value})
        return gathered["key"], gathered["value"]

    # No copies are held: there is nothing to do where rows start, change or are cut.

    def start_rows(self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float) -> None:
        pass

    def expand_rows(self, sources: Sequence[int]) -> None:
        pass

    def reorder_rows(self, sources: Sequence[int], shared_columns: int, index: Tensor | None = None) -> None:
        pass

    def crop(self, num_columns: int) -> None:
        pass

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        return iter(())

    def keep(self, rows: Sequence[RowLayout]) -> None:
        self.drop()

    def pause(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._sources, self._tables = {}, {}
        self._memory.drop()

    def do_without_copies(self) -> None:
        self._memory.drop()

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes
