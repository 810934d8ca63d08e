"""Owns which reader a layer has: layers with the same window share one, those without a window another."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.slot_mapping import RowLayout
from ..kv.transfers import Transfer
from .base import Reader
from .contiguous import ContiguousReader
from .gather import GatherReader
from .window import WindowReader
from .windows import Windows


class GroupedReader(Reader):
    """A contiguous copy of what each layer sees: of all columns, or of a window of them."""

    keeps_columns = True
    most_copies = 1

    def __init__(self, pool: BlockPool, windows: Windows) -> None:
        self._pool = pool
        self._windows = windows
        self._group()

    def _group(self) -> None:
        """Sort the layers by their windows, as these are now."""
        of_layer = self._windows.of_layer
        of_window = {
            window: WindowReader(self._pool, self._windows, window) for window in sorted(set(of_layer.values()))
        }
        self._others = ContiguousReader(self._pool)  # of layers without a window, also those that no config names
        self._readers: list[Reader] = [self._others, *of_window.values()]
        self._of_layer: Mapping[int, Reader] = {layer_idx: of_window[window] for layer_idx, window in of_layer.items()}
        self._grouped = of_layer  # last: interrupted above, the next forward sorts them again

    def _regroup(self) -> None:
        """Sort the layers again, where their windows have changed since."""
        if self._windows.of_layer is not self._grouped:
            self.drop()
            self._group()

    def start_rows(self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float) -> None:
        self._regroup()
        for reader in self._readers:
            reader.start_rows(rows, num_columns, max_rows=max_rows, max_columns=max_columns)

    def start_forward(
        self,
        rows: Callable[[], Sequence[RowLayout]],
        num_rows: int,
        start: int,
        stop: int,
        transfer: Transfer | None = None,
    ) -> None:
        self._regroup()
        for reader in self._readers:
            reader.start_forward(rows, num_rows, start, stop, transfer)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._of_layer.get(layer_idx, self._others).read(layer_idx, new)

    def read_pair(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._of_layer.get(layer_idx, self._others).read_pair(layer_idx, key, value)

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for reader in self._readers:
            yield from reader.columns(start, stop)

    def expand_rows(self, sources: Sequence[int]) -> None:
        for reader in self._readers:
            reader.expand_rows(sources)

    def reorder_rows(self, sources: Sequence[int], shared_columns: int, index: Tensor | None = None) -> None:
        for reader in self._readers:
            reader.reorder_rows(sources, shared_columns, index)

    def crop(self, num_columns: int) -> None:
        for reader in self._readers:
            reader.crop(num_columns)

    def keep(self, rows: Sequence[RowLayout]) -> None:
        for reader in self._readers:
            reader.keep(rows)

    def pause(self) -> None:
        for reader in self._readers:
            reader.pause()

    def drop(self) -> None:
        for reader in self._readers:
            reader.drop()

    def do_without_copies(self) -> None:
        for reader in self._readers:
            reader.do_without_copies()

    @property
    def num_bytes(self) -> int:
        return sum(reader.num_bytes for reader in self._readers)


def _contiguous(pool: BlockPool, windows: Windows) -> Reader:
    return GroupedReader(pool, windows) if windows.of_layer else ContiguousReader(pool)


READERS: dict[str, Callable[[BlockPool, Windows], Reader]] = {"contiguous": _contiguous, "gather": GatherReader}
"""What a cache's argument `attention` names."""
