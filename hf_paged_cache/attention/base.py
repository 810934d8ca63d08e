"""Owns the interface between the pool and attention: a reader gives a layer the keys and values of the running rows.

A reader holds copies of what is in the pool. They may be dropped between any two forwards, and are made again; but for
the columns of held steps, see `call/held_steps.py`, which must have been written to the pool first.
A layer reads all columns, or with a window the last ones; `Windows` says from which on.
Columns of padding hold finite values; they are not attended to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ..kv.slot_mapping import RowLayout
from ..kv.transfers import Transfer


class Reader(Protocol):
    """Columns are counted from the left, padding included.

    Attributes:
        keeps_columns: what a step writes is read from the reader's own memory, so the pool may get it later.
        most_copies: of all columns of the rows, held at a time.
    """

    keeps_columns: bool
    most_copies: int

    def start_rows(self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float) -> None:
        """Other rows run from here on.

        Args:
            num_columns: where their first forward stops.
            max_rows, max_columns: the most there will be, as far as the call says; else infinite.
        """

    def start_forward(
        self,
        rows: Callable[[], Sequence[RowLayout]],
        num_rows: int,
        start: int,
        stop: int,
        transfer: Transfer | None = None,
    ) -> None:
        """A forward of columns `[start, stop)` of `num_rows` rows begins; `rows` is called only if they are gathered.

        Args:
            transfer: that goes to the devices of this forward; None: nothing else does.
        """

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """name -> [R, H, stop - first, D]: the columns `[first, start)` of the rows, then `new`, which is in the pool already.

        The first column is 0, or that of the layer's window. Valid until the next forward, and read only: it may be the
        reader's own memory. Without a graph where `start` is not 0: `GradientPath.join` puts `new` itself there.
        """

    def read_pair(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The fast path of `read` for a "key" and a "value" without gradients; None: call `read`.

        Where the reader keeps columns, `key` and `value` need not be in the pool; None also where they are no
        [R, H, T, D] of the sizes that the layer has had.
        """

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Of each layer name -> [R, H, stop - start, D], columns as they were written here, where the reader keeps them."""

    def expand_rows(self, sources: Sequence[int]) -> None:
        """Row `i` goes on as a copy of row `sources[i] <= i`."""

    def reorder_rows(self, sources: Sequence[int], shared_columns: int, index: Tensor | None = None) -> None:
        """Row `i` goes on as a copy of row `sources[i]`; the first `shared_columns` columns of the two are equal.

        Args:
            index: [R] integers, the sources as a tensor on some device, if there is one.
        """

    def crop(self, num_columns: int) -> None:
        """Columns from `num_columns` on are taken back."""

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """The rows end. Rows that start with the same tokens may use the columns of those named here."""

    def pause(self) -> None:
        """A call has ended; its rows may go on. Gives back memory that only a running forward needs."""

    def drop(self) -> None:
        """Forget all copies."""

    def do_without_copies(self) -> None:
        """Memory has run out: forget all copies, also in the middle of a forward, and hold none until other rows start."""

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the pool."""
