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
    """`ForwardRequest` describes a forward as it was called."""

    rows: tuple[RowInput, ...]  # one for each row of the batch
    num_new_columns: int  # columns of the forward's token ids, padding included
    num_logits_needed: int = 1  # last columns that are computed whatever is known; at least 1
    bypass: str | None = None  # why no row may match or be kept; None when they may
    keep_columns: str | None = None  # why no known column may be left out; None when they may
    may_alias: bool = True  # equal rows may be computed once
    max_position: int | None = None  # largest position passed, of padding, too; None where no positions were passed

    def latest_start(self, num_needed: int) -> int:
        """Return the last column at which rows may start, so that the last `num_needed` columns are computed."""
        if self.keep_columns is not None or self.bypass is not None:
            return 0
        return self.num_new_columns - num_needed


class RequestRead(BaseException):
    """`RequestRead` ends a `generate` that was begun to see what its first forward would ask of the cache.

    Attributes:
        request: what that forward would ask.
    """

    def __init__(self, request: ForwardRequest) -> None:
        super().__init__()
        self.request = request
