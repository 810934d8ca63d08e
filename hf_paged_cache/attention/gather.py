"""Owns nothing between two layers: each layer's rows are gathered for its attention, so the least memory is held."""

from collections.abc import Callable, Iterator, Mapping, Sequence

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
        self._tables = BlockTables(pool.block_size)  # of the rows of the forward
        # window, or None -> the columns that such layers read; empty where a forward reads only what it writes
        self._sources: dict[int | None, ReadSource] = {}

    def start_forward(
        self,
        rows: Callable[[], Sequence[RowLayout]],
        num_rows: int,
        start: int,
        stop: int,
        transfer: Transfer | None = None,
    ) -> None:
        self._sources = {}
        if start:
            self._tables.update(rows(), Transfer() if transfer is None else transfer)
            for window in {None, *self._windows.of_layer.values()}:
                self._sources[window] = self._tables.columns(first_column(window, start), stop)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._sources:
            return {name: states.contiguous() for name, states in new.items()}  # as `DynamicCache` gives them
        source = self._sources[self._windows.of_layer.get(layer_idx)]
        gathered = self._pool.gather(layer_idx, source, new, self._memory)
        return {name: gathered[name].to(states.dtype) for name, states in new.items()}

    def read_step(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
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
        self._sources = {}
        self._tables.drop()
        self._memory.drop()

    def do_without_copies(self) -> None:
        self._memory.drop()

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes
