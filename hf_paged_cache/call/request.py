"""Describes a forward as it is asked for.

Columns are counted from the left, padding included; positions count a row's tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..blocks.tokens import TokenIds


class RowInput(NamedTuple):
    """`RowInput` has what one row of a forward brings."""

    token_ids: TokenIds  # the new tokens, without left padding; -1 for embeddings
    pad: int  # columns of left padding of the whole row
    first_position: int  # position of the row's first token; 0 unless somebody numbers tokens otherwise
    root: bytes = b""  # parent of the first block: all that conditions keys and values besides tokens
    salt: bytes = b""  # namespace of the row's blocks
    shift: int | None = 0  # how far images have moved the positions of the text after them; None: not known


class Chunks(NamedTuple):
    """`Chunks` says how `generate` cuts a prompt into forwards.

    They are the same forwards whatever is known, so each gives the same bits.

    Columns: `[0, stop)` whole chunks, kept under a root of their own | `[stop, ..)` the rest of the prompt and what is
    generated, in forwards of other shapes, which are not kept.
    """

    size: int  # columns of a chunk
    stop: int = 0

    def commit_end(self, before: int, num_new_columns: int) -> int:
        """Return the column from which on nothing is committed, where a forward begins at `before`."""
        is_whole = before % self.size == 0 and num_new_columns == self.size
        return self.stop if is_whole else min(before, self.stop)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """`ForwardRequest` describes a forward as it was called.

    Attributes:
        rows: one input for each row of the batch.
        num_new_columns: columns of the forward's token ids, padding included.
        num_logits_needed: number of last columns that are computed whatever is known; at least 1.
        bypass: why no row may match or be committed; None when they may.
        keep_columns: why no known column may be left out; None when they may.
        may_alias: True if equal rows may be computed once.
        max_position: largest position passed, that of padding included; None where no positions were passed.
    """

    rows: tuple[RowInput, ...]
    num_new_columns: int
    num_logits_needed: int = 1
    bypass: str | None = None
    keep_columns: str | None = None
    may_alias: bool = True
    max_position: int | None = None

    def latest_start(self, before: int, num_needed: int) -> int:
        """Return the last column at which the forward may start, so that all that is asked of it is computed in it.

        Args:
            before: columns that the rows have before the forward.
            num_needed: number of last columns that must be computed.
        """
        if self.keep_columns is not None or self.bypass is not None:
            return before
        return before + self.num_new_columns - num_needed


class RequestRead(BaseException):
    """`RequestRead` ends a `generate` that was begun to see what its first forward would ask of the cache.

    Attributes:
        request: what that forward would ask.
    """

    def __init__(self, request: ForwardRequest) -> None:
        super().__init__()
        self.request = request
