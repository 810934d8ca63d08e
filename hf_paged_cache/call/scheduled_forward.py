"""What a forward brings, and the ticket it gets: the one announced write that layers are let through with.

Both are frozen. Columns are counted from the left, padding included; positions count a row's tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..blocks.tokens import TokenIds
from ..kv.slot_mapping import SlotMapping


class RowInput(NamedTuple):
    """What one row of a forward brings."""

    token_ids: TokenIds  # the new tokens, without padding
    pad: int  # columns of left padding of the whole row
    first_position: int  # position of the row's first token, 0 unless somebody numbers them otherwise
    root: bytes  # parent of the row's first block: all that conditions its keys and values besides tokens


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A forward as it was called, in terms of rows and columns.

    Attributes:
        rows: one entry a row of the batch.
        num_new_columns: columns of the forward's token ids, padding included.
        num_logits_needed: how many of the last columns must be computed whatever is known; at least 1.
        bypass: why no row may match or be committed; None when they may.
        keep_columns: why no known column may be left out; None when they may.
        may_alias: whether equal rows may be computed once.
        prefilled: for each row, tokens that were computed just before in a forward of that row alone; () for none.
    """

    rows: tuple[RowInput, ...]
    num_new_columns: int
    num_logits_needed: int = 1
    bypass: str | None = None
    keep_columns: str | None = None
    may_alias: bool = True
    prefilled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledForward:
    """One announced forward: what will be computed and where it is written.

        columns of a row: [0, start) read only, known | [start, stop) computed | of those, `target` says what is written

    Attributes:
        sources: for each row that runs, the row of the request it stands for.
        copies: for each row of the request, the row that runs for it; None when they are the same.
        is_step: each row only goes on, by one token.
    """

    start: int
    stop: int
    sources: tuple[int, ...]
    copies: tuple[int, ...] | None
    target: SlotMapping
    is_step: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that run."""
        return len(self.sources)

    @property
    def num_columns(self) -> int:
        """Columns that are computed."""
        return self.stop - self.start
