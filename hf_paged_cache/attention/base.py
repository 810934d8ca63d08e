"""What stands between the pool and attention: it gives a layer the keys and values of all columns of the running rows.

All that a reader holds are copies of what is in the pool: they may be dropped between any two forwards and are made
again. Columns of a row's padding are never attended to; they hold finite values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ..kv.slot_mapping import RowLayout


class Reader(Protocol):
    """Between the pool and attention. Columns are counted from the left, padding included."""

    def start_rows(
        self, rows: Sequence[RowLayout], num_columns: int, *, max_rows: int, max_columns: float
    ) -> None:
        """Other rows run from here on.

        Args:
            num_columns: of their first forward and what is known before it.
            max_rows, max_columns: the most there will be, as far as the call says; else infinite.
        """

    def start_forward(self, rows: Callable[[], Sequence[RowLayout]], num_rows: int, start: int, stop: int) -> None:
        """A forward of columns `[start, stop)` begins, in `num_rows` rows; `rows` is called only where their blocks matter."""

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """name -> [R, H, stop, D]: the columns `[0, start)` of the rows, then `new`, which is in the pool already.

        To be read until the next forward, not written: it may be the reader's own memory.
        """

    def read_step(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The fast path of `read`, for a "key" and a "value" of one token a row, without gradients; None: call `read`."""

    def expand_rows(self, sources: Sequence[int]) -> None:
        """Row `i` goes on as a copy of row `sources[i] <= i`."""

    def reorder_rows(self, sources: Sequence[int], shared_columns: int) -> None:
        """Row `i` goes on as a copy of row `sources[i]`; both are equal in the first `shared_columns` columns."""

    def crop(self, num_columns: int) -> None:
        """Columns from `num_columns` on are taken back."""

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """The rows end. The columns of the tokens named here may be used again by rows that start the same."""

    def pause(self) -> None:
        """A call has ended; its rows may go on. Memory that only a running forward needs goes."""

    def drop(self) -> None:
        """Forget all copies."""

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the pool."""
