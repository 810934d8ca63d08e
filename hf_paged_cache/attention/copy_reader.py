"""Owns what readers with a copy of columns beside the pool have in common; where there is no memory for one, they do without."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool, reorder_rows
from ..kv.slot_mapping import RowLayout
from .base import Reader
from .gather import GatherReader
from .windows import Windows

MIN_SPARE_COLUMNS = 128  # that a buffer of columns has at least when it grows: few decode steps have to grow it


class CopyReader(Reader):
    """A reader that appends to a copy. Without memory for it, rows are gathered from the pool until other rows start.

    Args:
        windows: of the layers that read here; None: no layer has one.
    """

    keeps_columns = True
    most_copies = 1

    def __init__(self, pool: BlockPool, windows: Windows | None = None) -> None:
        self._pool = pool
        self._windows = windows
        self._buffer_bytes = 0
        self._kept: list[RowLayout] = []  # row -> what it holds, as of the last `keep`
        self._num_rows = 0
        self._max_rows = 0
        self._max_columns = math.inf
        self._start = self._stop = 0
        self._layouts: Callable[[], Sequence[RowLayout]] = list  # of the rows of the forward
        self._gathering: Reader | None = None  # reads in place of the copy

    @abstractmethod
    def _expand(self, sources: Sequence[int]) -> None:
        """`expand_rows`, where there is memory for it."""

    @abstractmethod
    def _spans(self, start: int, stop: int) -> Iterator[Tensor]:
        """Of each buffer [row capacity, H, columns, D], what it holds of the columns `[start, stop)`."""

    def start_rows(self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float) -> None:
        self._max_rows, self._max_columns, self._gathering = max(max_rows, len(rows)), max_columns, None

    def expand_rows(self, sources: Sequence[int]) -> None:
        try:
            self._expand(sources)
        except torch.OutOfMemoryError:
            self._go_without()

    def reorder_rows(self, sources: Sequence[int], shared_columns: int, index: Tensor | None = None) -> None:
        if list(sources) == list(range(len(sources))) or shared_columns >= self._stop:
            return
        try:
            reorder_rows(self._spans(shared_columns, self._stop), sources, index)
        except torch.OutOfMemoryError:
            self._go_without()

    def pause(self) -> None:
        if self._gathering is not None:
            self._gathering.pause()

    def do_without_copies(self) -> None:
        layouts, num_rows, start, stop = self._layouts, self._num_rows, self._start, self._stop
        self._go_without()
        self.start_forward(layouts, num_rows, start, stop)

    def _go_without(self) -> None:
        """Gather the rows, from the next forward on."""
        self.drop()
        self._gathering = GatherReader(self._pool, self._windows)

    @property
    def num_bytes(self) -> int:
        return self._buffer_bytes + (self._gathering.num_bytes if self._gathering else 0)

    @property
    def _most_columns(self) -> float:
        """The most that the rows are known to get; they may go on after the call."""
        return self._max_columns if self._stop <= self._max_columns else math.inf


def with_spare_columns(needed: int, most: float) -> int:
    """Columns of a buffer that needs so many now, with room for more, up to `most`."""
    return max(needed, int(min(needed + max(MIN_SPARE_COLUMNS, needed // 4), most)))


def expand_in_place(held: Tensor, sources: Sequence[int], num_columns: int) -> None:
    """Let row `i` of a buffer be a copy of row `sources[i] <= i`, of its first columns.

    Shapes: [row capacity, H, column capacity, D], with as many rows as sources or more.
    """
    for row in range(len(sources) - 1, -1, -1):  # a source is never right of its copy
        if sources[row] != row:
            held[row, :, :num_columns] = held[sources[row], :, :num_columns]
