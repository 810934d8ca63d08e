"""A forward as it is asked for.

Columns are counted from the left, padding included; positions count a row's tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..blocks.tokens import TokenIds


class RowInput(NamedTuple):
    """What one row of a forward brings."""

    token_ids: TokenIds  # the new tokens, without left padding; -1 for embeddings
    pad: int  # columns of left padding of the whole row
    first_position: int  # of the row's first token; 0 unless somebody numbers them otherwise
    root: bytes = b""  # parent of the first block: all that conditions keys and values besides tokens
    num_hidden: int = 0  # new tokens that the mask hides, as right padding does
    salt: bytes = b""  # namespace of the row's blocks
    shift: int | None = 0  # how far images have moved the positions of the text after them; None: not known


class Chunks(NamedTuple):
    """How `generate` cuts a prompt into forwards, the same ones whatever is known: so each gives the same bits.

    Columns: `[0, stop)` whole chunks, kept under a root of their own | `[stop, ..)` the rest of the prompt and what is generated,
    in forwards of other shapes, which are not.
    """

    size: int  # columns of a chunk
    stop: int = 0

    def commit_end(self, before: int, num_new_columns: int) -> int:
        """The column from which on nothing is committed, where a forward begins at `before`."""
        is_whole = before % self.size == 0 and num_new_columns == self.size
        return self.stop if is_whole else min(before, self.stop)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A forward as it was called.

    Attributes:
        rows: one for each row of the batch.
        num_new_columns: columns of the forward's token ids, padding included.
        num_logits_needed: how many of the last columns are computed whatever is known; at least 1.
        bypass: why no row may match or be committed; None when they may.
        keep_columns: why no known column may be left out; None when they may.
        may_alias: whether equal rows may be computed once.
        max_position: the largest position passed, of padding, too; None where none were.
        has_images: ids of some rows do not say what runs, see `image_tokens`.
        chunks: of the prompt, where each forward must be one of the shapes that they say.
    """

    rows: tuple[RowInput, ...]
    num_new_columns: int
    num_logits_needed: int = 1
    bypass: str | None = None
    keep_columns: str | None = None
    may_alias: bool = True
    max_position: int | None = None
    has_images: bool = False
    chunks: Chunks | None = None

    def latest_start(self, before: int, num_needed: int) -> int:
        """The column at which it starts at the latest, of rows of `before` columns: what is asked of it is computed in it."""
        if self.keep_columns is not None or self.bypass is not None:
            return before
        return before + self.num_new_columns - num_needed


class RequestRead(BaseException):
    """Ends a `generate` that was begun to see what its first forward would ask of the cache.

    Attributes:
        request: that.
    """

    def __init__(self, request: ForwardRequest) -> None:
        super().__init__()
        self.request = request
